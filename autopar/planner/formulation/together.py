"""Which collectives of parameters and gradients go in one bucket, before there are any: those of one stretch (`overlap_windows`), at most.

A stretch's gathers are issued at one place and its reductions awaited at one (`autopar.passes.bucket`). How they are placed is not known yet, so a tensor's company is all
parameters that the stretch reads, or gradients that it makes, of one dtype: where some of them are placed otherwise, and so in a bucket of their own, that bucket's latency
is counted in part only.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from autopar.cost.buckets import Company
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.program import Program

DIRECTIONS = ("forward", "backward")
Group = tuple[str, int, str]  # what for, stretch, dtype


class Together:
    def __init__(self, program: Program, clusters: Clusters) -> None:
        self.program, self.clusters = program, clusters

    def companies(self, value: str, direction: int, is_gradient: bool) -> tuple[Company, ...]:
        """Of the tensors of `value`, gathered for `direction` (0: forward), or reduced: one where all have the same."""
        what = "gradient" if is_gradient else DIRECTIONS[direction]
        found = tuple(self._company(tensor, what) for tensor in self.program.q.members[value] if (tensor, what) in self._groups)
        return found[:1] if len(set(found)) == 1 else found

    def _company(self, tensor: str, what: str) -> Company:
        return Company(self.program.graph.tensors[tensor].nbytes, tuple(self._bytes[self._groups[tensor, what]]))

    @cached_property
    def _groups(self) -> dict[tuple[str, str], Group]:
        p = self.program
        position = {op.name: i for i, op in enumerate(p.graph.ops)}
        found: dict[tuple[str, str], Group] = {}
        for t in p.graph.params.values():
            for direction in DIRECTIONS:
                if users := p.users(t.name, direction, self.clusters):
                    found[t.name, direction] = direction, p.windows.at(min(position[op.name] for op in users)), t.dtype
        for name in p.params_of_grad:
            if name in p.graph.tensors:
                made = position.get(name, position.get(name.split(".")[0], p.windows.turn))
                found[name, "gradient"] = "gradient", p.windows.at(made), p.graph.tensors[name].dtype
        return found

    @cached_property
    def _bytes(self) -> dict[Group, list[float]]:
        found: dict[Group, list[float]] = defaultdict(list)
        for (tensor, _), group in self._groups.items():
            found[group].append(self.program.graph.tensors[tensor].nbytes)
        return {group: sorted(sizes) for group, sizes in found.items()}
