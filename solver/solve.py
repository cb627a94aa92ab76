"""Solves a Problem: the bound, then policies, with a gap, a hint, determinism and an explanation when nothing fits.

Two steps. (a) strategies binary, policies continuous: a policy is then a share of a fold's layers, and the solver's bound is the bound of the whole
problem. (b) strategies fixed, policies binary. What is reported as the gap is (b)'s answer against (a)'s bound.

HiGHS stops at a relative gap or a node limit, which are functions of the problem alone, so the same problem gives the same answer; if the
clock stopped it, `Solution.stopped_by` says "time".
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ortools.math_opt.python import mathopt

from autopar.solver.evaluate import Price, evaluate, rests_bytes, tidy, variables_on
from autopar.solver.highs import highs
from autopar.solver.model import Options, Program
from autopar.solver.problem import Decision, Problem


@dataclass(frozen=True)
class Limits:
    """seconds: of planning, from capture to plan; in_proportion: fewer where a step takes milliseconds; memory_bytes: of the process that plans; may_fail: there is a plan already,
    of another mesh, form or number of micro-batches: at the end of the time there need be none of this; below_s: only what takes less is wanted, of a step."""

    gap: float = 0.01
    seconds: float = 60.0
    nodes: int = 10_000
    in_proportion: bool = False
    memory_bytes: float = float("inf")
    may_fail: bool = False
    below_s: float = float("inf")


@dataclass(frozen=True)
class Solution:
    """objective_s, bound_s: of one step. stopped_by: "gap" | "nodes" | "time" | "axes" (those of the mesh were merged) |
    "cuts" (no more of them between layers of different policies). variables, rows: of step (a)'s program."""

    decision: Decision
    price: Price
    bound_s: float
    seconds: float
    stopped_by: str
    variables: int
    rows: int

    @property
    def objective_s(self) -> float:
        return self.price.objective_s

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


@dataclass(frozen=True)
class Infeasible:
    """The budget is short by `shortfall_bytes`; `position` is the row that would bind, `least_bytes` the smallest peak found (within 2%), with
    `strategies`."""

    shortfall_bytes: float
    least_bytes: float
    position: str
    strategies: tuple[int, ...] = ()


LEAST_S = 0.3  # of a call of the solver: less is not worth its start
SLIGHT = 1e-5  # of the budget: so much more is still within it
KILOBYTE = 1e3  # which the solver may take a row to be kept with
ASKED = 4  # times at most, for an answer that is


class _Failed(Exception):
    pass


class NoneFaster(Exception):
    """Nothing was found that takes less than `Limits.below_s`. bound_s: nothing at all takes less than that."""

    def __init__(self, bound_s: float) -> None:
        super().__init__(f"nothing takes less than {bound_s:.4g} s")
        self.bound_s = bound_s


class NoAnswer(TimeoutError):
    """The clock stopped before any answer. bound: of the program's objective, in seconds; -inf where there is none."""

    def __init__(self, text: str, bound_s: float) -> None:
        super().__init__(text)
        self.bound_s = bound_s


def solve(
    problem: Problem,
    limits: Limits | None = None,
    hints: Sequence[Sequence[int]] = (),
    progress: Callable[[str, float], None] | None = None,
) -> Solution | Infeasible:
    """hints: strategies of known feasible answers, one index per choice. Raises NoAnswer; NoneFaster, of answers whose layers share their policies."""
    limits, start = limits or Limits(), time.perf_counter()
    answer = _solve(problem, limits, hints, progress)
    bound_s, less = answer.bound_s if isinstance(answer, Solution) else math.inf, 0.0
    # The solver holds rows to a kilobyte, which is much where a budget is a few hundred: until one is within, it is asked for less.
    for _ in range(ASKED):
        over = answer.price.over_bytes if isinstance(answer, Solution) else 0.0
        if not isinstance(answer, Solution) or over <= SLIGHT * problem.budget_bytes:
            break
        less += 2 * over + min(KILOBYTE, 1e-3 * problem.budget_bytes)
        left = replace(limits, seconds=max(LEAST_S, limits.seconds - (time.perf_counter() - start)))
        answer = _solve(replace(problem, budget_bytes=problem.budget_bytes - less), left, hints, progress)
        if isinstance(answer, Infeasible):
            answer = replace(answer, shortfall_bytes=max(over, answer.least_bytes - problem.budget_bytes))
        else:
            price = evaluate(problem, answer.decision)
            answer = replace(answer, price=price, bound_s=min(bound_s, price.objective_s))
    return answer


def _solve(
    problem: Problem, limits: Limits, hints: Sequence[Sequence[int]], progress: Callable[[str, float], None] | None
) -> Solution | Infeasible:
    start = time.perf_counter()
    on_progress = progress or (lambda stage, seconds: None)
    first = below(Program(problem, Options()), limits.below_s)
    on_progress("program", time.perf_counter() - start)
    try:
        values, bound, stopped = _run(first, limits, start, hints)
    except _Failed:
        return _explained(problem, limits, start)
    on_progress("strategies", time.perf_counter() - start)
    decision, whole = first.decision(values)
    decision = tidy(problem, decision) if whole else decision
    price = evaluate(problem, decision) if whole else None
    if price is None or not price.feasible:
        second = below(Program(problem, Options(policies="binary", fixed=decision.strategies)), limits.below_s)
        try:
            values, _, more = _run_from_elastic(second, limits, start)
        except _Failed:  # shares of layers fit, one policy for all layers does not: choose strategies knowing that
            second = below(Program(problem, Options(policies="binary")), limits.below_s)
            try:
                values, _, more = _run(second, limits, start, [decision.strategies])
            except _Failed:
                return _explained(problem, limits, start)
        stopped = more if stopped == "gap" else stopped
        decision = tidy(problem, second.decision(values)[0])
        price = evaluate(problem, decision)
    on_progress("policies", time.perf_counter() - start)
    assert not price.unmet, price.unmet[:3]
    return Solution(
        decision,
        price,
        first.true_bound(bound) / 1e3 + problem.constant_s,
        time.perf_counter() - start,
        stopped,
        len(first.lower),
        len(first.row_lower),
    )


@dataclass(frozen=True)
class RelaxedSolution:
    """An answer of a relaxed problem. price: its price in the problem itself, None where policies are shares of layers. The rest as in Solution."""

    decision: Decision
    price: Price | None
    bound_s: float
    stopped_by: str
    variables: int
    rows: int


def solve_relaxed(
    problem: Problem, within: Problem, limits: Limits | None = None, progress: Callable[[str, float], None] | None = None
) -> RelaxedSolution | None:
    """Step (a) for `problem`, which is `within` with fewer memory rows. None: even this does not fit, or takes no less than `limits.below_s`."""
    limits, start = limits or Limits(), time.perf_counter()
    program = below(Program(problem, Options()), limits.below_s)
    try:
        values, bound, stopped = _run(program, limits, start, ())
    except _Failed:
        return None
    if progress is not None:
        progress("strategies", time.perf_counter() - start)
    decision, whole = program.decision(values)
    decision = tidy(within, decision) if whole else decision
    bound_s = program.true_bound(bound) / 1e3 + problem.constant_s
    return RelaxedSolution(
        decision, evaluate(within, decision) if whole else None, bound_s, stopped, len(program.lower), len(program.row_lower)
    )


def whole(problem: Problem, limits: Limits | None = None, known: Decision | None = None) -> Solution | None:
    """The optimum, within the limits' gap, if all layers share their policies; None where nothing fits. known: something that fits. Raises NoAnswer."""
    limits, start = limits or Limits(), time.perf_counter()
    program = Program(problem, Options(policies="binary"))
    try:
        values, bound, stopped = _run(program, limits, start, (), known)
        decision, bound_s = program.decision(values)[0], program.true_bound(bound) / 1e3 + problem.constant_s
    except _Failed:
        return None
    except NoAnswer as e:
        if known is None:
            raise
        decision, bound_s, stopped = known, e.bound_s, "nodes"
    decision = tidy(problem, decision)
    price = evaluate(problem, decision)
    assert not price.unmet, price.unmet[:3]
    return Solution(decision, price, bound_s, time.perf_counter() - start, stopped, len(program.lower), len(program.row_lower))


def smallest(
    problem: Problem, limits: Limits | None = None, gap: float = 0.02, within_s: float = float("inf")
) -> tuple[float, Decision] | None:
    """The smallest peak within `gap` and a decision that has it, if all layers share their policies; None where demands cannot be met at all.

    within_s: of decisions that take no longer."""
    limits = limits or Limits()
    decision = _smallest(replace(problem, budget_bytes=0.0), limits, time.perf_counter(), gap, within_s)
    return None if decision is None else (max(evaluate(problem, decision).row_bytes, default=0.0), decision)


def explain(problem: Problem, limits: Limits | None = None) -> Infeasible:
    """By how much the budget is short, if all layers share their policies."""
    return _explain(problem, limits or Limits(), time.perf_counter())


def least(problem: Problem, limits: Limits | None = None) -> float:
    """A bound of the problem's optimum in seconds, from policies as shares of layers; infinite where nothing fits."""
    program = Program(problem, Options())
    try:
        _, bound, _ = _run(program, limits or Limits(), time.perf_counter(), ())
    except _Failed:
        return float("inf")
    return program.true_bound(bound) / 1e3 + problem.constant_s


def _run(
    program: Program, limits: Limits, start: float, hints: Sequence[Sequence[int]], known: Decision | None = None
) -> tuple[Sequence[float], float, str]:
    model = mathopt.Model.from_model_proto(program.proto())
    variables = list(model.variables())
    left = max(LEAST_S, limits.seconds - (time.perf_counter() - start))
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=left), relative_gap_tolerance=limits.gap, node_limit=limits.nodes, random_seed=1
    )
    given = mathopt.ModelSolveParameters(
        solution_hints=[
            mathopt.SolutionHint(
                variable_values={
                    variables[program.variable["x", c, s]]: float(s == chosen)
                    for c, chosen in enumerate(h)
                    for s in range(len(program.problem.choices[c].labels))
                }
            )
            for h in hints
        ]
    )
    if known is not None:
        on = variables_on(program.problem, known)
        rests = rests_bytes(program.problem, known)
        values = {variables[i]: rests[key[1]] / 1e9 if key[0] == "s" else float(on(key)) for key, i in program.variable.items()}
        given.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    try:
        result = highs(model, params, given)
    except TimeoutError as e:
        raise NoAnswer(str(e), -float("inf")) from e
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE):
        found = result.variable_values()
        bound = result.termination.objective_bounds.dual_bound
        limit = result.termination.limit
        stopped = "gap" if reason == mathopt.TerminationReason.OPTIMAL else "time" if limit == mathopt.Limit.TIME else "nodes"
        return [found[v] for v in variables], bound, stopped
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        raise _Failed
    bound_s = program.true_bound(result.termination.objective_bounds.dual_bound) / 1e3 + program.problem.constant_s
    raise NoAnswer(f"no answer within {limits.seconds:.0f} s ({reason.name.lower()})", bound_s)


def _run_from_elastic(program: Program, limits: Limits, start: float) -> tuple[Sequence[float], float, str]:
    """Little above the smallest peak the solver may find nothing for minutes where elastic rows lead to an answer in seconds: to be started from. What
    it has found by itself in a quarter of the time, it goes on with."""
    left = limits.seconds - (time.perf_counter() - start)
    try:
        found = _run(program, replace(limits, seconds=left / 4), time.perf_counter(), ())
        if found[2] != "time":
            return found
        known: Decision | None = program.decision(found[0])[0]
    except NoAnswer:
        try:
            known = _smallest(program.problem, limits, start, 0.02, fixed=program.options.fixed)
        except TimeoutError:
            known = None
        if known is None or not evaluate(program.problem, known).feasible:
            raise
    return _run(program, limits, start, (), known)


def below(program: Program, seconds: float) -> Program:
    """`program`, of answers that take no more."""
    if seconds < math.inf:
        most = (seconds - program.problem.constant_s) * 1e3
        program.constrain("limit", -math.inf, most, [(t, 1.0) for t in program.stages])
    return program


def _explained(problem: Problem, limits: Limits, start: float) -> Infeasible:
    """Why there is no answer. Raises NoneFaster where one was to be fast, too."""
    if limits.below_s < math.inf:
        raise NoneFaster(limits.below_s)
    return _explain(problem, limits, start)


def _explain(problem: Problem, limits: Limits, start: float) -> Infeasible:
    """Elastic rows: the least by which the budget must grow, and the position that binds then."""
    decision = _smallest(problem, limits, start, 0.02)
    assert decision is not None, "a demand that no supply can reach: the problem is wrong, not its budget"
    rows = evaluate(problem, decision).row_bytes
    worst = max(range(len(rows)), key=rows.__getitem__)
    return Infeasible(rows[worst] - problem.budget_bytes, rows[worst], problem.rows[worst].name, decision.strategies)


def _all_recomputed(program: Program, variables: list[mathopt.Variable]) -> list[mathopt.SolutionHint]:
    """That everything is made again, where strategies are no question: near the smallest peak, and soon looked at."""
    p = program.problem
    if program.options.fixed is None and any(len(c.labels) > 1 for c in p.choices):
        return []
    made = {v for r in p.reruns for v, _ in r.makes}
    recompute = {i: 1.0 for key, i in program.variable.items() if key[0] == "r"}
    recompute |= {i: 0.0 for key, i in program.variable.items() if key[0] == "y" and key[1] in made}
    return [mathopt.SolutionHint(variable_values={variables[i]: x for i, x in recompute.items()})]


def _smallest(
    problem: Problem, limits: Limits, start: float, gap: float, within_s: float = float("inf"), fixed: Sequence[int] | None = None
) -> Decision | None:
    """What exceeds the budget by the least; None where demands cannot be met. fixed: at these strategies."""
    program = Program(problem, Options(policies="binary", elastic=True, fixed=fixed))
    if within_s < float("inf"):
        program.constrain("limit", -float("inf"), (within_s - problem.constant_s) * 1e3, [(t, 1.0) for t in program.stages])
    model = mathopt.Model.from_model_proto(program.proto("over"))
    left = max(LEAST_S, limits.seconds - (time.perf_counter() - start))
    params = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=left), relative_gap_tolerance=gap)
    result = highs(model, params, mathopt.ModelSolveParameters(solution_hints=_all_recomputed(program, list(model.variables()))))
    reason = result.termination.reason
    if reason not in (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE):
        if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND:
            raise TimeoutError(f"the budget does not suffice, and by how much was not found within {limits.seconds:.0f} s")
        return None
    values = result.variable_values()
    return program.decision([values[v] for v in model.variables()])[0]
