"""An answer without the solver: every choice in turn takes the strategy that is best for it beside what its neighbours have taken, until none changes.

For where the clock leaves the solver no time (iterated conditional modes; J. Besag, "On the Statistical Analysis of Dirty Pictures", J. R. Stat. Soc. B 48, 1986, section 2).
It sees one step of a large program in about a second. It finds no bound, and no way out of where one choice alone cannot improve: it is
as good as where it starts. Memory is not looked at: everything that backward reads is kept, where it can be.

A stage takes as long as the largest of its accounts, which no sum over choices says. So accounts are weighed: at first all are, then those that were largest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product

from autopar.solver.problem import BACKWARD, DEVICE, FORWARD, NONE, Decision, Flow, Problem, Times

UNASKED = -1  # a strategy that is not chosen yet
UNMET_S = 1e3  # per demand that nothing reaches: more than any step takes
SWEEPS = 8
BESIDE = 0.3  # the weight of an account that is not the largest
ROUNDS = 2  # of weights
# What moves between placements is first taken to cost so much more: neighbours then agree, and part where it pays.
DEARER = 1.0, 4.0, 30.0


def descend(problem: Problem, starts: Iterable[Sequence[int]] = (), late: Callable[[], bool] = lambda: False) -> list[tuple[int, ...]]:
    """Sets of strategies, one per choice, none of them forbidden: the fastest first, as if all fitted.

    starts: such sets to begin from, besides what each choice takes when it comes first; late: whether to end with what there is."""
    d = Descent(problem)
    found = {tuple(at): d.seconds(at) for at in starts}
    first = d.weights(None)
    for at in chain(sorted(found, key=found.__getitem__), (d.agreed(dearer, first, late) for dearer in DEARER)):
        if found and late():
            break
        weights = first
        for _ in range(ROUNDS):
            at = d.settled(at, weights, late)
            found[at] = d.seconds(at)
            weights = d.weights(at)
    return sorted(found, key=found.__getitem__)


class Descent:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.allowed = [[s for s in range(len(c.labels)) if (i, s) not in problem.forbidden] for i, c in enumerate(problem.choices)]
        self.reruns = needed_reruns(problem)
        self.times: list[list[Times]] = [list(c.times) for c in problem.choices]
        reads: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        makes: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for r in self.reruns:
            rerun = problem.reruns[r]
            self.times[rerun.choice] = [_sum(a, b) for a, b in zip(self.times[rerun.choice], rerun.times, strict=True)]
            for v, nodes in rerun.reads:
                reads[v].append((rerun.choice, nodes))
            for v, nodes in rerun.makes:
                makes[v].append((rerun.choice, nodes))
        self.values = [_Value(problem, v, reads[v], makes[v]) for v in range(len(problem.values))]
        self.of_choice: list[list[_Value]] = [[] for _ in problem.choices]
        for value in self.values:
            for c in value.choices:
                self.of_choice[c].append(value)

    def weights(self, at: Sequence[int] | None) -> list[float]:
        """Of every account: of all the same, or of those that are largest under strategies `at` the most."""
        if at is None:
            return [1.0 if a.resource == "compute" else BESIDE for a in self.problem.accounts]
        busy = self.busy(at)
        most: dict[int, float] = defaultdict(float)
        for i, a in enumerate(self.problem.accounts):
            most[a.stage] = max(most[a.stage], busy[i])
        return [1.0 if busy[i] == most[a.stage] else BESIDE * busy[i] / most[a.stage] for i, a in enumerate(self.problem.accounts)]

    def busy(self, at: Sequence[int]) -> list[float]:
        """Seconds of every account."""
        out = [0.0] * len(self.problem.accounts)
        paid: list[Times] = [self.times[c][s] for c, s in enumerate(at)]
        for value in self.values:
            paid += value.paid(at, [1.0] * len(out))
        for times in paid:
            for a, t in times.items():
                out[a] += t
        return out

    def seconds(self, at: Sequence[int]) -> float:
        """Of a step, whatever memory that takes."""
        busy, stages = self.busy(at), [0.0] * len(self.problem.stages)
        for i, a in enumerate(self.problem.accounts):
            stages[a.stage] = max(stages[a.stage], busy[i])
        return self.problem.constant_s + sum(stages) + UNMET_S * sum(v.unmet(at) for v in self.values)

    def agreed(self, dearer: float, weights: Sequence[float], late: Callable[[], bool]) -> tuple[int, ...]:
        """Every choice takes what is best beside those before it, what moves being so much dearer; then less so."""
        at = [UNASKED] * len(self.problem.choices)
        known: list[dict[tuple[int, ...], float]] = [{} for _ in self.values]
        for c in range(len(at)):
            at[c] = self.best(c, at, weights, known, dearer)
        while dearer > 1:
            at = list(self.settled(at, weights, late, dearer))
            dearer /= 3
        return tuple(at)

    def settled(self, start: Sequence[int], weights: Sequence[float], late: Callable[[], bool], dearer: float = 1.0) -> tuple[int, ...]:
        at = list(start)
        known: list[dict[tuple[int, ...], float]] = [{} for _ in self.values]
        waiting = set(range(len(at)))
        for sweep in range(SWEEPS):
            # There and back: what is best for the last is soon known to the first.
            for c in sorted(waiting, reverse=bool(sweep % 2)):
                waiting.discard(c)
                chosen = self.best(c, at, weights, known, dearer)
                if chosen != at[c]:
                    at[c] = chosen
                    waiting |= {n for value in self.of_choice[c] for n in value.choices if n != c and len(self.allowed[n]) > 1}
                if late():
                    return tuple(at)
            if not waiting:
                break
        return tuple(at)

    def best(self, c: int, at: list[int], weights: Sequence[float], known: list[dict[tuple[int, ...], float]], dearer: float) -> int:
        before = at[c]
        if len(self.allowed[c]) == 1:
            return self.allowed[c][0]
        best_s, best = float("inf"), before
        for s in self.allowed[c]:
            at[c] = s
            total = sum(weights[a] * t for a, t in self.times[c][s].items())
            for value in self.of_choice[c]:
                key = tuple(at[n] for n in value.choices)
                if key not in known[value.v]:
                    known[value.v][key] = value.seconds(at, weights)
                total += dearer * known[value.v][key]
                if total >= best_s:
                    break
            # What is no better changes nothing.
            if total < best_s * (1 - 1e-9) or (total <= best_s and s == before):
                best_s, best = total, s
        at[c] = before
        return best

    def decision(self, at: Sequence[int]) -> Decision:
        """With all that backward reads kept, and made again only what cannot be."""
        kept: dict[int, frozenset[int]] = {}
        arcs: dict[tuple[int, int], frozenset[int]] = {}
        weights = [1.0] * len(self.problem.accounts)
        for value in self.values:
            for direction, (policy, used) in value.ways(at, weights).items():
                if policy is not None:
                    kept[value.v] = frozenset({policy})
                if used:
                    arcs[value.v, direction] = frozenset(used)
        return Decision(tuple(at), kept, self.reruns, arcs)


class _Value:
    """What brings a value from where it is made to where it is read. reads, makes: of what runs again in any case, as a rerun has them."""

    def __init__(
        self, problem: Problem, v: int, reads: list[tuple[int, tuple[int, ...]]], makes: list[tuple[int, tuple[int, ...]]]
    ) -> None:
        value = problem.values[v]
        self.v, self.policies = v, {p.node: k for k, p in enumerate(value.policies) if p.medium == DEVICE}
        self.flows: list[tuple[int, Flow, _Ends, _Ends, dict[int, list[tuple[int, int]]]]] = []
        for direction, flow in ((FORWARD, value.forward), (BACKWARD, value.backward)):
            if flow is not None:
                again = (makes, reads) if direction == BACKWARD else ([], [])
                supplies = [*((e.choice, e.nodes) for e in flow.supplies), *again[0]]
                demands = [*((e.choice, e.nodes) for e in flow.demands), *again[1]]
                to: dict[int, list[tuple[int, int]]] = defaultdict(list)
                for i, arc in enumerate(flow.arcs):
                    to[arc.dst].append((arc.src, i))
                self.flows.append((direction, flow, supplies, demands, to))
        self.may_stay = any(arc.stays for arc in value.forward.arcs)
        self.choices = tuple(sorted({c for _, _, s, d, _ in self.flows for c, _ in (*s, *d)}))

    def seconds(self, at: Sequence[int], weights: Sequence[float]) -> float:
        found, unmet = self._ways(at, weights)
        total = UNMET_S * sum(map(len, unmet))
        for direction, flow, *_ in self.flows:
            for i in found[direction][1]:
                total += sum(weights[a] * t for a, t in flow.arcs[i].times.items())
        return total

    def paid(self, at: Sequence[int], weights: Sequence[float]) -> list[Times]:
        found = self.ways(at, weights)
        return [flow.arcs[a].times for direction, flow, *_ in self.flows for a in found[direction][1]]

    def unmet(self, at: Sequence[int]) -> int:
        """Demands that nothing reaches."""
        return sum(len(missing) for missing in self._ways(at, ())[1])

    def ways(self, at: Sequence[int], weights: Sequence[float]) -> dict[int, tuple[int | None, list[int]]]:
        """By direction: the policy it is kept by, if it is, and the arcs that are used."""
        return self._ways(at, weights)[0]

    def _ways(self, at: Sequence[int], weights: Sequence[float]) -> tuple[dict[int, tuple[int | None, list[int]]], list[set[int]]]:
        out: dict[int, tuple[int | None, list[int]]] = {}
        unmet: list[set[int]] = []
        there: set[int] = set()
        stay: set[int] = set()  # where backward has what forward brought there
        for direction, flow, supplies, demands, to in self.flows:
            have, want = _nodes(supplies, at) | stay, _nodes(demands, at)
            if want <= have:
                out[direction] = None, []
                there |= have | want
                continue
            best: tuple[float, int | None, list[int], set[int]] | None = None
            kept = [n for n in sorted(there) if n in self.policies] if direction == BACKWARD else []
            some: list[int | None] = [*kept] or [None]
            for node, stays in product(some, (False, True) if self.may_stay and direction == FORWARD else (False,)):
                seconds, used, missing = _brought(flow, to, have | ({node} if node is not None else set()), want, weights, stays)
                seconds += UNMET_S * len(missing)
                if best is None or seconds < best[0]:
                    best = seconds, None if node is None else self.policies[node], used, missing
            assert best is not None
            out[direction] = best[1], best[2]
            if direction == FORWARD:
                stay = {flow.arcs[i].dst for i in best[2] if flow.arcs[i].stays}
            unmet.append(best[3])
            there |= have | want
        return out, unmet


_Ends = list[tuple[int, tuple[int, ...]]]


def _nodes(ends: _Ends, at: Sequence[int]) -> set[int]:
    return {nodes[at[c]] for c, nodes in ends if at[c] != UNASKED} - {NONE}


def _brought(
    flow: Flow, to: Mapping[int, list[tuple[int, int]]], have: set[int], want: set[int], weights: Sequence[float], stays: bool = False
) -> tuple[float, list[int], set[int]]:
    """Seconds and arcs that bring it to where it is wanted, the cheapest first, each also from where it was brought; and where none leads. stays: by arcs that stay, which start
    where it is, and those that take no time; else by the others."""
    given, have, missing, total, used = have, set(have), want - have, 0.0, list[int]()
    if not have:
        return (0.0, [], missing) if missing else (0.0, [], set())
    while missing:
        best: tuple[float, int, int] | None = None
        for dst in missing:
            for src, i in to.get(dst, ()):
                arc = flow.arcs[i]
                if arc.stays != stays and (arc.stays or arc.times):
                    continue
                if src in (given if stays and arc.times else have):
                    seconds = sum(weights[a] * t for a, t in arc.times.items()) if weights else 0.0
                    if best is None or (seconds, i) < best[:2]:
                        best = seconds, i, dst
        if best is None:
            break
        total += best[0]
        used.append(best[1])
        have.add(best[2])
        missing.discard(best[2])
    return total, used, missing


def needed_reruns(problem: Problem) -> frozenset[int]:
    """What runs again whatever is decided: it makes what backward reads and what cannot be kept."""
    makers: dict[int, list[int]] = defaultdict(list)
    for r, rerun in enumerate(problem.reruns):
        for v, _ in rerun.makes:
            makers[v].append(r)
    waiting = [v for v, value in enumerate(problem.values) if value.backward is not None and value.backward.demands]
    needed: set[int] = set()
    seen = set(waiting)
    while waiting:
        value = problem.values[v := waiting.pop()]
        if value.policies or value.backward is None or value.backward.supplies:
            continue
        for r in makers[v]:
            if r not in needed:
                needed.add(r)
                more = {read for read, _ in problem.reruns[r].reads} - seen
                seen |= more
                waiting += more
    return frozenset(needed)


def _sum(a: Times, b: Times) -> Times:
    out = dict(a)
    for k, t in b.items():
        out[k] = out.get(k, 0.0) + t
    return out
