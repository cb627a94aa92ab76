"""Where the solver breaks down: once more without presolve, then an error that says so."""

from __future__ import annotations

from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from autopar.solver.highs import highs


def model() -> tuple[mathopt.Model, mathopt.Variable]:
    m = mathopt.Model()
    x = m.add_variable(lb=0, ub=4)
    m.maximize(x)
    return m, x


@pytest.mark.parametrize("breaks, answers", [(0, True), (1, True), (2, False)])
def test_without_presolve_where_it_breaks_down(monkeypatch: pytest.MonkeyPatch, breaks: int, answers: bool) -> None:
    solve, seen = mathopt.solve, list[Any]()

    def breaking(*args: Any, params: mathopt.SolveParameters, **kwargs: Any) -> mathopt.SolveResult:
        seen.append(params)
        if len(seen) <= breaks:
            raise AttributeError("'StatusNotOk' object has no attribute 'canonical_code'")
        return solve(*args, params=params, **kwargs)

    monkeypatch.setattr(mathopt, "solve", breaking)
    m, x = model()
    given = mathopt.SolveParameters(relative_gap_tolerance=1e-3)
    if answers:
        assert highs(m, given).variable_values()[x] == 4
    else:
        with pytest.raises(TimeoutError, match="with presolve and without"):
            highs(m, given)
    assert [p.presolve for p in seen] == [None, mathopt.Emphasis.OFF][: min(breaks, 1) + 1]
    assert all(p.relative_gap_tolerance == 1e-3 for p in seen)
