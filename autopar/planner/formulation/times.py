"""What operators take of the accounts of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autopar.cost import Cost
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.program import Program
from autopar.planner.formulation.strategies import OpStrategy


class Times:
    def __init__(self, program: Program, clusters: Clusters, cost: Cost, mesh: Mesh) -> None:
        self.program, self.clusters, self.cost, self.mesh = program, clusters, cost, mesh

    def of(self, op: Op, stage: int, segment: int | None = None) -> list[dict[int, float]]:
        """Per strategy of its cluster, what all operators of a class (those of one segment) take of the accounts of `stage`."""
        return [_summed(found) for found in self.of_copies(op, stage, segment)]

    def of_copies(
        self, op: Op, stage: int, segment: int | None = None, recompute: bool = False
    ) -> list[list[tuple[int, dict[int, float]]]]:
        """Per strategy and operator in the graph: of how many it is, and what one of them takes; compute waits for collectives inside them, but for what runs beside."""
        chosen = self.clusters.clusters[self.clusters.of[op.name]].members[op.name]
        known: dict[OpStrategy, list[tuple[int, dict[int, float]]]] = {}
        for s, strategy in enumerate(chosen):
            if strategy in known:
                continue
            want, made = self.clusters.want[op.name][s], self.clusters.made[op.name][s]
            known[strategy] = []
            for copy in self.program.copies[op.name]:
                if segment is not None and self.program.q.segment[copy.name] != segment:
                    continue
                rule, split, spent = self.program.rules[copy.name], dict(strategy.split), defaultdict[int, float](float)
                own_s = self.cost.op(copy, rule, split, want, made, recompute).seconds
                spent[account(stage, "compute")] += own_s
                for kind, axes, sent, beside in self.cost.inside(copy, rule, split, want):
                    c = self.cost.collective(kind, axes, sent)
                    spent[account(stage, c.link)] += c.seconds
                    spent[account(stage, "compute")] += self.cost.waits_s(c.seconds, beside * own_s)
                known[strategy].append((self.program.q.times[copy.name], spent))
        return [known[s] for s in chosen]

    def hidden(self, strategies: Sequence[int], rerun: Collection[tuple[str, int]]) -> dict[int, float]:
        """Per stage, seconds of links that operators' own compute hides: of keys and values that go round. rerun: classes and segments that run again in backward."""
        found: dict[int, float] = defaultdict(float)
        for name, copies in self.program.copies.items():
            if not self.program.rules[name].alongside:
                continue
            c = self.clusters.of[name]
            s = strategies[c]
            split, want, made = (
                dict(self.clusters.clusters[c].members[name][s].split),
                self.clusters.want[name][s],
                self.clusters.made[name][s],
            )
            for copy in copies:
                rule = self.program.rules[copy.name]
                own_s = self.cost.op(copy, rule, split, want, made).seconds
                seconds = 0.0
                for kind, axes, sent, beside in self.cost.inside(copy, rule, split, want):
                    taken_s = self.cost.collective(kind, axes, sent).seconds
                    seconds += taken_s - self.cost.waits_s(taken_s, beside * own_s)
                again = (name, self.program.q.segment[copy.name]) in rerun
                for stage in (int(copy.direction == "backward"), *([1] if again else [])):
                    found[stage] += self.program.q.times[copy.name] * seconds
        return found

    def recompute(self, op: Op, segment: int) -> tuple[tuple[dict[int, float], ...], tuple[dict[int, float], ...]]:
        """What it takes to run the operators of a class and segment again: all of them; and as many that take as little as any does. Of a share it is not said which
        of them run, and the first, fused with what is before the layers, may take ten times as long as another."""
        each = self.of_copies(op, 1, segment, True)
        return tuple(map(_summed, each)), tuple(map(_least, each))


def _summed(each: Sequence[tuple[int, Mapping[int, float]]]) -> dict[int, float]:
    spent: dict[int, float] = defaultdict(float)
    for n, times in each:
        for a, t in times.items():
            spent[a] += n * t
    return {a: t for a, t in spent.items() if t}


def _least(each: Sequence[tuple[int, Mapping[int, float]]]) -> dict[int, float]:
    n = sum(n for n, _ in each)
    least = {a: min(times.get(a, 0.0) for _, times in each) for a in {a for _, times in each for a in times}}
    return {a: n * t for a, t in least.items() if t}
