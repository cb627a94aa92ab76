"""The integer program against the exhaustive oracle on random small problems."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from autopar.solver.brute_force import brute_force
from autopar.solver.descent import Descent, descend
from autopar.solver.evaluate import evaluate, tidy
from autopar.solver.frontier import Relaxation
from autopar.solver.model import TIE, Options, Program
from autopar.solver.problem import (
    DEVICE,
    HOST,
    NONE,
    NVME,
    Account,
    Arc,
    Choice,
    Decision,
    End,
    Event,
    Flow,
    Limit,
    Policy,
    Problem,
    Rerun,
    Row,
    Value,
)
from autopar.solver.prune import prune
from autopar.solver.solve import Infeasible, Limits, NoneFaster, Solution, solve, solve_relaxed

EXACT = Limits(gap=1e-9, seconds=60)


def _end(g: random.Random, choices: tuple[Choice, ...], nodes: int, none: bool = False) -> End:
    c = g.randrange(len(choices))
    return End(c, tuple(g.choice([*range(nodes), NONE] if none else range(nodes)) for _ in choices[c].labels))


def _arcs(g: random.Random, nodes: int, stage: int) -> tuple[Arc, ...]:
    """From every node to every other, so that only memory can make it infeasible."""
    return tuple(Arc(i, j, {2 * stage + g.randint(0, 1): g.uniform(0, 1)}) for i in range(nodes) for j in range(nodes) if i != j)


def random_problem(seed: int) -> Problem:
    """Two or three choices, one or two values with two or three placements, policies, a rerun, two memory rows."""
    g = random.Random(seed)
    accounts = (Account(0, "compute"), Account(0, "inter"), Account(1, "compute"), Account(1, "inter"))
    choices = tuple(
        Choice(f"c{i}", tuple("abc"[: g.randint(2, 3)]), tuple({g.choice((0, 2)): g.uniform(0, 2)} for _ in range(3)))
        for i in range(g.randint(2, 3))
    )
    choices = tuple(replace(c, times=c.times[: len(c.labels)]) for c in choices)
    values, reruns = [], []
    for v in range(g.randint(1, 2)):
        nodes = g.randint(2, 3)

        forward = Flow(_arcs(g, nodes, 0), (_end(g, choices, nodes),), (_end(g, choices, nodes, True),))
        backward = Flow(_arcs(g, nodes, 1), (), (_end(g, choices, nodes, True),)) if g.random() < 0.7 else None
        policies = tuple(Policy(n) for n in range(nodes)) if backward else ()
        if backward and g.random() < 0.5:
            policies += tuple(
                Policy(n, g.choice((HOST, NVME)), {g.randrange(4): g.uniform(0, 0.3)}) for n in range(nodes) if g.random() < 0.7
            )
        values.append(Value(f"v{v}", tuple(map(str, range(nodes))), forward, backward, policies))
    for v, value in enumerate(values):
        if value.backward and g.random() < 0.7:
            supply = value.forward.supplies[0]
            reads = [(w, tuple(0 for _ in supply.nodes)) for w in range(v) if values[w].backward]
            reruns.append(
                Rerun(f"r{v}", supply.choice, tuple({2: g.uniform(0, 2)} for _ in supply.nodes), tuple(reads), ((v, supply.nodes),))
            )
    keys = [("x", c, s) for c in range(len(choices)) for s in range(len(choices[c].labels))]
    keys += [("y", v, n) for v, value in enumerate(values) for n in range(len(value.policies))]
    keys += [("e", v, 0, a) for v, value in enumerate(values) for a in range(len(value.forward.arcs))]
    rows = tuple(Row(f"row{i}", 1e9, tuple((k, g.uniform(0, 3e9)) for k in keys if g.random() < 0.5)) for i in range(2))
    # What is kept elsewhere is moved beside the work of some choices, and takes little memory.
    offloaded = {("y", v, k) for v, value in enumerate(values) for k, policy in enumerate(value.policies) if policy.medium != DEVICE}
    rows = tuple(replace(row, terms=tuple((k, b * 0.2 if k in offloaded else b) for k, b in row.terms)) for row in rows)
    beside = [("x", c, s) for c in range(len(choices)) for s in range(len(choices[c].labels)) if g.random() < 0.5]
    terms = [(k, g.uniform(0, 2)) for k in sorted(offloaded)] + [(k, -g.uniform(0, 1)) for k in beside]
    limits = (Limit("link", g.uniform(0, 1), tuple(terms)),) if offloaded else ()
    budget = g.uniform(2e9, 5e9) if offloaded else g.uniform(3e9, 9e9)
    return Problem(("forward", "backward"), accounts, choices, tuple(values), tuple(reruns), rows, budget, limits=limits)


@pytest.mark.parametrize("block", range(25))
def test_equals_brute_force(block: int) -> None:
    """500 problems: same optimum, and what is infeasible for one is for the other."""
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed)
        best, _ = brute_force(problem)
        found = solve(problem, EXACT)
        if best == float("inf"):
            assert isinstance(found, Infeasible), seed
            assert found.shortfall_bytes > 0, seed
            continue
        assert isinstance(found, Solution), seed
        assert found.price.feasible, seed
        assert found.bound_s <= best + 1e-6, (seed, found.bound_s, best)
        binary = _all_binary(problem)
        assert best - 1e-9 <= binary <= best * (1 + 4 * TIE), (seed, binary, best)


def test_answers_below_a_time() -> None:
    """There is one just above the optimum of brute force, and none just below: the bound that is then told is no more than the optimum."""
    asked = 0
    for seed in range(200):
        problem = random_problem(seed)
        best, _ = brute_force(problem)
        if best == float("inf"):
            with pytest.raises(NoneFaster):
                solve(problem, replace(EXACT, below_s=1e6))
            continue
        asked += 1
        found = solve(problem, replace(EXACT, below_s=best * (1 + 1e-3)))
        assert isinstance(found, Solution) and found.price.feasible, seed
        assert best - 1e-9 <= found.objective_s <= best * (1 + 1e-3) + 1e-9, seed
        less = replace(EXACT, below_s=best * (1 - 1e-3))
        with pytest.raises(NoneFaster) as e:
            solve(problem, less)
        assert e.value.bound_s <= best, seed
        seen = solve_relaxed(problem.relaxed, problem, less)
        assert seen is None or seen.bound_s <= less.below_s + 1e-9, seed
        relaxed = Relaxation(problem, best * (1 + 1e-3)).at(problem.budget_bytes)
        assert relaxed is not None and relaxed.tangent.at_s <= best + 1e-9, seed
    assert asked > 100


def _checked(problem: Problem, seed: int) -> tuple[float, Decision | None]:
    """What brute force finds, which the integer program has to find too."""
    best, decision = brute_force(problem)
    found = solve(problem, EXACT)
    if best == float("inf"):
        assert isinstance(found, Infeasible), seed
        return best, None
    assert isinstance(found, Solution) and found.price.feasible and found.bound_s <= best + 1e-6, seed
    binary = _all_binary(problem)
    assert best - 1e-9 <= binary <= best * (1 + 4 * TIE), (seed, binary, best)
    return best, decision


def test_events_equal_brute_force() -> None:
    """Bytes that depend on what runs again, and on what does not: same optimum."""
    changed = 0
    for seed in range(300):
        plain = random_problem(seed)
        if not plain.reruns:
            continue
        problem = _with_events(plain, seed)
        best, _ = _checked(problem, seed)
        if best == float("inf"):
            continue
        changed += best > brute_force(plain)[0] + 1e-9
    assert changed >= 3


def test_micro_batches_equal_brute_force() -> None:
    """Gradients that wait unreduced between micro-batches, or are reduced in each, for time and less memory: same optimum."""
    early = 0
    for seed in range(200):
        problem = _with_gradients(random_problem(seed), seed)
        best, decision = _checked(problem, seed)
        if best == float("inf"):
            continue
        assert decision is not None
        flow = problem.values[-1].backward
        assert flow is not None
        early += any(flow.arcs[a].way for a in decision.arcs.get((len(problem.values) - 1, 1), ()))
    assert early >= 5


def _with_gradients(problem: Problem, seed: int) -> Problem:
    """With a value that backward makes at one of three nodes and a choice wants at another. What waits between micro-batches takes its size at the node where it is made, or,
    of an arc whose price is paid in each of four, a half of that."""
    g = random.Random(seed)
    sizes, v = [g.uniform(0.5e9, 3e9) for _ in range(3)], len(problem.values)
    supply, demand = _end(g, problem.choices, 3), _end(g, problem.choices, 3)
    once = _arcs(g, 3, 1)
    arcs = tuple(a for arc in once for a in (arc, replace(arc, times={k: 4 * t for k, t in arc.times.items()}, way=1)))
    held = [(("x", supply.choice, s), sizes[n]) for s, n in enumerate(supply.nodes)]
    less = [(("e", v, 1, a), -sizes[arc.src] / 2) for a, arc in enumerate(arcs) if arc.way]
    rows = tuple(replace(row, terms=_summed([*row.terms, *held, *less])) for row in problem.rows)
    value = Value("gradient", ("0", "1", "2"), Flow((), (), ()), Flow(arcs, (supply,), (demand,)))
    return replace(problem, values=(*problem.values, value), rows=rows, budget_bytes=problem.budget_bytes + 1e9)


def test_parameters_that_stay_equal_brute_force() -> None:
    """Parameters that every micro-batch gathers, or the first one for all: same optimum, with memory and without, also of what pruning leaves; and no answer without a solver is
    faster, or lacks something."""
    stay = both = 0
    for seed in range(200):
        problem = _with_parameters(random_problem(seed), seed)
        v = len(problem.values) - 1
        best, decision = _checked(problem, seed)
        free = replace(problem, budget_bytes=1e18, limits=())
        least, _ = brute_force(free)
        lower = sum(min(t.get(a, 0.0) for t in c.times) for c in problem.choices for a in (0, 2))
        assert brute_force(prune(free, lower, least * (1 + 1e-9)))[0] == pytest.approx(least), seed
        d = Descent(replace(free, rows=()))
        for at in descend(d.problem):
            price = evaluate(d.problem, d.decision(at))
            assert not price.unmet and price.objective_s >= least - 1e-9, seed
        if decision is None:
            continue
        used = {problem.values[v].forward.arcs[a].stays for a in decision.arcs.get((v, 0), ())}
        tidied = tidy(problem, decision)
        assert evaluate(problem, tidied).feasible and evaluate(problem, tidied).objective_s <= best + 1e-9
        stay, both = stay + (used == {True}), both + (False in used)
    assert stay >= 20 and both >= 20, (stay, both)


def test_what_stays_has_been_there() -> None:
    """Backward has of forward only what an arc brought from where the value was, to where forward read it."""
    choices = (Choice("a", ("",), ({},)), Choice("b", ("",), ({},)))
    arcs = tuple(Arc(i, j, {0: 0.1}, stays=True) for i in range(3) for j in range(3) if i != j)
    account, end = (Account(0, "compute"), Account(1, "compute")), (End(0, (0,)),)
    forward = Flow(arcs, end, (End(1, (1,)),))
    backward = Flow((Arc(0, 2, {1: 5.0}), Arc(1, 2, {1: 1.0})), end, (End(1, (2,)),))
    problem = Problem(("forward", "backward"), account, choices, (Value("v", ("0", "1", "2"), forward, backward),))
    found = solve(problem, EXACT)
    assert isinstance(found, Solution) and found.objective_s == pytest.approx(brute_force(problem)[0]) == pytest.approx(1.1)


def _with_parameters(problem: Problem, seed: int) -> Problem:
    """With a value that a choice stores at one of three nodes, in forward and backward, and others read in both. What forward brings may stay for all of four micro-batches, in memory
    throughout, or until backward."""
    g = random.Random(seed)
    sizes, v = [g.uniform(0.5e9, 3e9) for _ in range(3)], len(problem.values)
    supply, again = _end(g, problem.choices, 3), _end(g, problem.choices, 3, True)
    reads = tuple(_end(g, problem.choices, 3, True) for _ in range(g.randint(1, 2)))
    often = _arcs(g, 3, 0)
    arcs = tuple(a for arc in often for a in (arc, replace(arc, times={k: t / 4 for k, t in arc.times.items()}, stays=True)))
    held = [(("e", v, 0, a), sizes[arc.dst]) for a, arc in enumerate(arcs) if arc.stays]
    kept = [(("y", v, k), sizes[k] / 2) for k in range(3)]
    rows = tuple(replace(row, terms=_summed([*row.terms, *held, *kept])) for row in problem.rows)
    value = Value(
        "parameter", ("0", "1", "2"), Flow(arcs, (supply,), reads), Flow(_arcs(g, 3, 1), (supply,), (again,)), tuple(map(Policy, range(3)))
    )
    return replace(problem, values=(*problem.values, value), rows=rows, budget_bytes=problem.budget_bytes + 1e9)


def _summed(terms: list[tuple[Any, float]]) -> tuple[tuple[Any, float], ...]:
    found: dict[Any, float] = {}
    for key, n in terms:
        found[key] = found.get(key, 0.0) + n
    return tuple(found.items())


def _with_events(problem: Problem, seed: int) -> Problem:
    """All, one and none of reruns and of earlier events; each has bytes of its own in every row."""
    g = random.Random(seed)
    members = [("r", i) for i in range(len(problem.reruns))]
    events: list[Event] = []
    for k in range(4):
        some = g.sample(members, len(members))
        first, more = some[:1], some[1:]
        split = g.randint(0, len(more))
        events.append(Event(tuple(first), tuple(more[:split]), tuple(more[split : split + g.randint(0, 1)])))
        members.append(("z", k))
    rows = [replace(r, terms=(*r.terms, *((("z", k, 0), g.uniform(0, 3e9)) for k in range(4)))) for r in problem.rows]
    return replace(problem, events=tuple(events), rows=tuple(rows))


def _all_binary(problem: Problem) -> float:
    """The price of what the program with whole policies finds."""
    program = Program(problem, Options(policies="binary"))
    model = mathopt.Model.from_model_proto(program.proto())
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(relative_gap_tolerance=1e-9))
    values = result.variable_values()
    price = evaluate(problem, program.decision([values[v] for v in model.variables()])[0])
    assert price.feasible
    return price.objective_s


def test_pruning_leaves_an_optimum() -> None:
    """What cannot be in an answer as good as the best goes, and much does; the best stays."""
    left = total = 0
    for seed in range(120):
        problem = replace(random_problem(seed), budget_bytes=1e18)
        best, _ = brute_force(problem)
        lower = sum(min(t.get(a, 0.0) for t in c.times) for c in problem.choices for a in (0, 2))
        pruned = prune(problem, lower, best * (1 + 1e-9))
        again, decision = brute_force(pruned)
        assert decision is not None and abs(again - best) <= 1e-9, seed
        left, total = left + _size(pruned) - len(pruned.forbidden), total + _size(problem)
    assert left < 0.8 * total


def _size(problem: Problem) -> int:
    """Strategies and arcs."""
    flows = [f for v in problem.values for f in (v.forward, v.backward) if f is not None]
    return sum(len(c.labels) for c in problem.choices) + sum(len(f.arcs) for f in flows)


def test_some_random_problems_are_tight() -> None:
    """The comparison means something: memory binds in some, some are infeasible, some rerun."""
    kinds = {"infeasible": 0, "binds": 0, "reruns": 0}
    for seed in range(100):
        problem = random_problem(seed)
        best, decision = brute_force(problem)
        free, _ = brute_force(replace(problem, budget_bytes=1e18))
        kinds["infeasible"] += decision is None and free < float("inf")
        kinds["binds"] += decision is not None and best > free + 1e-9
        kinds["reruns"] += decision is not None and bool(decision.rerun)
    assert min(kinds.values()) >= 3, kinds


def test_the_price_of_a_decision_is_the_program_s_objective() -> None:
    for seed in range(50):
        problem = replace(random_problem(seed), budget_bytes=1e18)
        found = solve(problem, EXACT)
        if isinstance(found, Solution):
            assert abs(evaluate(problem, found.decision).objective_s - found.objective_s) < 1e-12
