"""Every tensor's versions, one per placement it was brought to; each is made once, from the cheapest there is.

Later readers find the version that an earlier one had made: this is the deduplication of collectives.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph.calls import OFFLOADED
from autopar.graph.placement import Placement
from autopar.graph.redistribution import Step, redistribute
from autopar.passes.redistribute import run_step
from autopar.passes.sharding.emit import Emitter
from autopar.passes.sharding.groups import group_name
from autopar.plan.decisions import CollectiveUse, Decisions


class Versions:
    """coordinates: mesh axis -> the placeholder of this rank's index along it. collectives: those inserted so far."""

    def __init__(self, emit: Emitter, plan: Decisions) -> None:
        self.emit, self.plan, self.mesh = emit, plan, plan.mesh
        self.coordinates: dict[str, fx.Node] = {}
        self.collectives: list[CollectiveUse] = []
        self.versions: dict[str, dict[Placement, fx.Node]] = {}
        self.primary: dict[str, Placement] = {}
        self.made_in: dict[tuple[str, Placement], str] = {}  # versions that a redistribution made -> direction
        self.read_again: set[tuple[str, Placement]] = set()  # versions that operators of forward read which run again in backward

    def put(self, name: str, placement: Placement, node: fx.Node) -> None:
        self.versions[name] = {placement: node}
        self.primary[name] = placement
        self.keep(name, placement, node)

    def keep(self, name: str, placement: Placement, node: fx.Node) -> None:
        """Marks the version that the plan keeps, so that backward does not make it again with an operator that is."""
        if self.emit.direction == "forward" and self.plan.kept.get(name) == placement:
            node.meta["kept"] = name
            if name in self.plan.offload:
                node.meta[OFFLOADED] = self.plan.offload[name]

    def get(self, name: str, want: Placement) -> fx.Node:
        """The version of `name` in placement `want`, made from the cheapest there is."""
        have = self.versions[name]
        if self.emit.direction == "forward" and self.emit.current in self.plan.recompute:
            self.read_again.add((name, want))
        if want in self.sources(name, have):
            return have[want]
        itemsize = next(iter(have.values())).meta["val"].element_size()

        def price(p: Placement) -> float:
            if any(p.reductions.get(a) != r for a, r in want.partial):
                return float("inf")
            return sum(s.wire_bytes(self.mesh, itemsize) + 1e-3 for s in redistribute(p, want, self.mesh))

        source = min(self.sources(name, have), key=price)
        node = have[source]
        for step in redistribute(source, want, self.mesh):
            node = self.step(node, step, name)
            if step.kind == "slice" and self.emit.direction == "forward" and self.plan.kept.get(name) == step.dst:
                node = self.emit.call(torch.ops.aten.clone.default, (node,), {})  # a view of it would keep all of what it was cut from
            have[step.dst] = node
            self.keep(name, step.dst, node)
            self.made_in[name, step.dst] = self.emit.direction
        return node

    def sources(self, name: str, have: dict[Placement, fx.Node]) -> list[Placement]:
        """The versions that may be drawn on: in forward (results are brought to their places last) those made in forward; in backward those the plan keeps,
        those made again, those that operators read which run again (they are brought there once more), and those made in backward."""
        kept = self.plan.kept.get(name)
        if self.emit.direction == "forward":
            return [p for p in have if self.made_in.get((name, p)) != "backward"]
        if kept is None and name.split(".")[0] not in self.plan.recompute:
            return list(have)
        rerun = self.primary[name] if name.split(".")[0] in self.plan.recompute else None
        return [p for p in have if p in (kept, rerun) or (name, p) in self.read_again or self.made_in.get((name, p)) == "backward"]

    def step(self, node: fx.Node, step: Step, name: str) -> fx.Node:
        self.collectives.append(
            CollectiveUse(step.kind, step.axes, step.wire_bytes(self.mesh, node.meta["val"].element_size()), name, self.emit.direction)
        )
        coords = [self.coordinates[a] for a in step.axes] if step.kind == "slice" else []

        def fn(x: torch.Tensor, *cs: torch.Tensor) -> torch.Tensor:
            at = dict(zip(step.axes, cs, strict=False))
            return run_step(x, step, self.mesh, at.__getitem__, lambda axes: group_name(self.emit.options.group_prefix, axes))

        self.emit.is_moving = True
        made = self.emit.trace(fn, [node, *coords], ("step", step))
        self.emit.is_moving = False
        assert isinstance(made, fx.Node)
        return made
