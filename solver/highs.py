"""The one call of HiGHS, and what to do where it breaks down."""

from __future__ import annotations

from dataclasses import replace

from ortools.math_opt.python import mathopt

from autopar.solver.watch import check, in_time

HOUR_S = 3600.0


def highs(model: mathopt.Model, params: mathopt.SolveParameters, given: mathopt.ModelSolveParameters | None = None) -> mathopt.SolveResult:
    """Its result. Raises TimeoutError where it fails with presolve and without, or does not stop in time.

    HiGHS ends with kError on some programs that have no answer, of which its presolve leaves a remainder that it cannot put back; as they stand, it
    finds them infeasible. OR-Tools 9.15 cannot even report such a failure: what it raises is an AttributeError of its own.
    """
    limit_s = HOUR_S if params.time_limit is None else params.time_limit.total_seconds()
    try:
        return in_time(lambda: mathopt.solve(model, mathopt.SolverType.HIGHS, params=params, model_params=given), limit_s)
    except (AttributeError, RuntimeError):
        pass
    try:
        plain = replace(params, presolve=mathopt.Emphasis.OFF)
        check()
        return in_time(lambda: mathopt.solve(model, mathopt.SolverType.HIGHS, params=plain, model_params=given), limit_s)
    except (AttributeError, RuntimeError) as e:
        raise TimeoutError(f"the solver failed, with presolve and without ({e})") from e
