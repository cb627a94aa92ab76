"""The one call of HiGHS, and what to do where it breaks down."""

from __future__ import annotations

from dataclasses import replace

from ortools.math_opt.python import mathopt


def highs(model: mathopt.Model, params: mathopt.SolveParameters, given: mathopt.ModelSolveParameters | None = None) -> mathopt.SolveResult:
    """Its result. Raises TimeoutError where it fails with presolve and without.

    HiGHS ends with kError on some programs that have no answer, of which its presolve leaves a remainder that it cannot put back; as they stand, it
    finds them infeasible. OR-Tools 9.15 cannot even report such a failure: what it raises is an AttributeError of its own.
    """
    try:
        return mathopt.solve(model, mathopt.SolverType.HIGHS, params=params, model_params=given)
    except (AttributeError, RuntimeError):
        pass
    try:
        plain = replace(params, presolve=mathopt.Emphasis.OFF)
        return mathopt.solve(model, mathopt.SolverType.HIGHS, params=plain, model_params=given)
    except (AttributeError, RuntimeError) as e:
        raise TimeoutError(f"the solver failed, with presolve and without ({e})") from e
