"""Price and check a decision from the Problem alone, sharing no code with the program that found it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from autopar.solver.problem import BACKWARD, DEVICE, FORWARD, NONE, Decision, Flow, Key, Member, Problem


@dataclass(frozen=True)
class Price:
    """objective_s: the step; stage_s: per stage; row_bytes: per memory row. feasible: demands met and every row within the budget."""

    objective_s: float
    stage_s: tuple[float, ...]
    row_bytes: tuple[float, ...]
    unmet: tuple[str, ...]
    over_bytes: float

    @property
    def feasible(self) -> bool:
        return not self.unmet and self.over_bytes <= 0


def evaluate(problem: Problem, decision: Decision) -> Price:
    x = decision.strategies
    accounts: dict[int, float] = defaultdict(float)
    unmet: list[str] = []

    def pay(times: Mapping[int, float]) -> None:
        for a, t in times.items():
            accounts[a] += t

    for c, choice in enumerate(problem.choices):
        pay(choice.times[x[c]])
        if (c, x[c]) in problem.forbidden:
            unmet.append(f"{choice.name}: strategy {choice.labels[x[c]]} is forbidden")
    for r in decision.rerun:
        rerun = problem.reruns[r]
        pay(rerun.times[x[rerun.choice]])
    for v, value in enumerate(problem.values):
        kept = decision.kept.get(v, frozenset())
        if len(kept) > 1:
            unmet.append(f"{value.name}: kept in {len(kept)} ways")
        for k in kept:
            pay(value.policies[k].times)
        there = {e.nodes[x[e.choice]] for e in (*value.forward.supplies, *value.forward.demands)}
        if not {value.policies[k].node for k in kept} <= there:
            unmet.append(f"{value.name}: kept where forward does not have it")
        for direction, flow in ((FORWARD, value.forward), (BACKWARD, value.backward)):
            if flow is None:
                continue
            arcs = decision.arcs.get((v, direction), frozenset())
            for a in arcs:
                pay(flow.arcs[a].times)
            wanted = wanted_nodes(problem, decision, v, direction, flow)
            given = supplied_nodes(problem, decision, v, direction, flow)
            have = reach(given, wanted, flow, arcs)
            if any(flow.arcs[a].stays and not (flow.arcs[a].src in given and flow.arcs[a].dst in wanted) for a in arcs):
                unmet.append(f"{value.name}: stays where forward does not bring it")
            if len({flow.arcs[a].stays for a in arcs if flow.arcs[a].times}) > 1:
                unmet.append(f"{value.name}: stays, and is brought again")
            if not wanted <= have:
                unmet.append(f"{value.name}: {[value.nodes[n] for n in sorted(wanted - have)]} missing, direction {direction}")
    stages = [0.0] * len(problem.stages)
    for i, account in enumerate(problem.accounts):
        stages[account.stage] = max(stages[account.stage], accounts[i])
    on = variables_on(problem, decision)
    rests = rests_bytes(problem, decision)
    rows = tuple(row.constant + sum(k * (rests[key[1]] if key[0] == "s" else on(key)) for key, k in row.terms) for row in problem.rows)
    for limit in problem.limits:
        reached = sum(k for key, k in limit.terms if on(key))
        if reached > limit.most + 1e-6 * limit.unit:
            unmet.append(f"{limit.name}: {reached:g} of at most {limit.most:g}")
    over = max((b - problem.budget_bytes for b in rows), default=0.0)
    return Price(problem.constant_s + sum(stages), tuple(stages), rows, tuple(unmet), max(0.0, over))


def tidy(problem: Problem, decision: Decision) -> Decision:
    """`decision` without reruns, kept values and arcs that nobody needs: where there is time to spare, a spare one costs the program nothing.

    One is dropped if all wanted nodes are reached without it; the dearest are tried first. What is kept away from the device stays on it where there is room.
    """
    decision = _without_spare_reruns(problem, decision)
    kept = {v: k for v, k in decision.kept.items() if not _is_met(problem, replace(decision, kept={**decision.kept, v: frozenset()}), v)}
    decision = replace(decision, kept=kept)
    arcs: dict[tuple[int, int], frozenset[int]] = {}
    for (v, direction), used in sorted(decision.arcs.items()):
        value = problem.values[v]
        flow = value.forward if direction == FORWARD else value.backward
        assert flow is not None
        wanted = wanted_nodes(problem, decision, v, direction, flow)
        have = supplied_nodes(problem, decision, v, direction, flow)
        for a in sorted(used, key=lambda a: (-sum(flow.arcs[a].times.values()), a)):
            if not wanted <= reach(have, wanted, flow, used - {a}):
                continue
            if flow.arcs[a].stays and not _is_met(problem, replace(decision, arcs={**decision.arcs, (v, FORWARD): used - {a}}), v):
                continue
            used = used - {a}
        if used:
            arcs[v, direction] = used
    return _without_spare_moves(problem, Decision(decision.strategies, decision.kept, decision.rerun, arcs))


def _without_spare_moves(problem: Problem, decision: Decision) -> Decision:
    home: dict[int, frozenset[int]] = {}
    for v, kept in decision.kept.items():
        policies = problem.values[v].policies
        here = {policy.node: k for k, policy in enumerate(policies) if policy.medium == DEVICE}
        if any(policies[k].medium != DEVICE for k in kept) and all(policies[k].node in here for k in kept):
            home[v] = frozenset(here[policies[k].node] for k in kept)
    if not home:
        return decision
    best_s = evaluate(problem, decision).objective_s

    def fits(staying: Mapping[int, frozenset[int]]) -> bool:
        price = evaluate(problem, replace(decision, kept={**decision.kept, **staying}))
        return price.feasible and price.objective_s <= best_s

    if fits(home):
        return replace(decision, kept={**decision.kept, **home})
    for v, kept in home.items():
        if fits({v: kept}):
            decision = replace(decision, kept={**decision.kept, v: kept})
    return decision


def _without_spare_reruns(problem: Problem, decision: Decision) -> Decision:
    x = decision.strategies

    def seconds(r: int) -> float:
        return sum(problem.reruns[r].times[x[problem.reruns[r].choice]].values())

    dropped = True
    while dropped:
        dropped = False
        for r in sorted(decision.rerun, key=lambda r: (-seconds(r), r)):
            less = replace(decision, rerun=decision.rerun - {r})
            if all(_is_met(problem, less, v) for v, _ in problem.reruns[r].makes):
                decision, dropped = less, True
    return decision


def _is_met(problem: Problem, decision: Decision, v: int) -> bool:
    flow = problem.values[v].backward
    if flow is None:
        return True
    wanted = wanted_nodes(problem, decision, v, BACKWARD, flow)
    if not wanted:
        return True
    arcs = decision.arcs.get((v, BACKWARD), frozenset())
    return wanted <= reach(supplied_nodes(problem, decision, v, BACKWARD, flow), wanted, flow, arcs)


def wanted_nodes(problem: Problem, decision: Decision, v: int, direction: int, flow: Flow) -> set[int]:
    x = decision.strategies
    out = {d.nodes[x[d.choice]] for d in flow.demands}
    if direction == BACKWARD:
        for r in decision.rerun:
            rerun = problem.reruns[r]
            out |= {nodes[x[rerun.choice]] for value, nodes in rerun.reads if value == v}
    return out - {NONE}


def supplied_nodes(problem: Problem, decision: Decision, v: int, direction: int, flow: Flow) -> set[int]:
    x = decision.strategies
    out = {s.nodes[x[s.choice]] for s in flow.supplies}
    if direction == BACKWARD:
        out |= {problem.values[v].policies[k].node for k in decision.kept.get(v, ())}
        out |= staying_nodes(problem, decision, v)
        for r in decision.rerun:
            rerun = problem.reruns[r]
            out |= {nodes[x[rerun.choice]] for value, nodes in rerun.makes if value == v}
    return out - {NONE}


def staying_nodes(problem: Problem, decision: Decision, v: int) -> set[int]:
    """Where backward has what forward brought there."""
    flow = problem.values[v].forward
    return {flow.arcs[a].dst for a in decision.arcs.get((v, FORWARD), ()) if flow.arcs[a].stays}


def reach(have: set[int], wanted: set[int], flow: Flow, arcs: frozenset[int]) -> set[int]:
    """`have`, and those of `wanted` that `arcs` bring from there or from one another."""
    grown = True
    while grown:
        new = ({flow.arcs[a].dst for a in arcs if flow.arcs[a].src in have} & wanted) - have
        have, grown = have | new, bool(new)
    return have


def rests_bytes(problem: Problem, decision: Decision) -> list[float]:
    """What a decision makes of `Problem.rests`."""
    on, out = variables_on(problem, decision), list[float]()
    for rest in problem.rests:
        out.append(max(0.0, sum(k * (out[key[1]] if key[0] == "s" else on(key)) for key, k in rest)))
    return out


def happening(problem: Problem, rerun: Collection[int]) -> list[bool]:
    """Which of the events happen."""
    found: list[bool] = []

    def does(member: Member) -> bool:
        return member[1] in rerun if member[0] == "r" else found[member[1]]

    for e in problem.events:
        found.append(all(map(does, e.every)) and (not e.one or any(map(does, e.one))) and not any(map(does, e.no)))
    return found


def variables_on(problem: Problem, decision: Decision) -> Callable[[Key], bool]:
    """Which of the program's binary variables a decision sets."""
    happened = happening(problem, decision.rerun)

    def on(key: Key) -> bool:
        if key[0] == "x":
            return decision.strategies[key[1]] == key[2]
        if key[0] == "y":
            return key[2] in decision.kept.get(key[1], frozenset())
        if key[0] == "e":
            assert len(key) == 4
            return key[3] in decision.arcs.get((key[1], key[2]), frozenset())
        if key[0] == "z":
            return happened[key[1]]
        return key[1] in decision.rerun and decision.strategies[problem.reruns[key[1]].choice] == key[2]

    return on
