"""A plan for the same program at other sizes: what it says of dims that vary, said of others.

A digit that a mesh axis owns has so many elements to its right: a constant, or a size that varies, or what a split leaves of one. Which it is follows from the sizes that
stand for all (`autopar.graph.varying`): they are primes that divide no constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.graph.graph import Graph, Op
from autopar.graph.placement import Placement, Split
from autopar.plan.decisions import OpChoice
from autopar.plan.plan import Plan
from autopar.rules import lookup


@dataclass(frozen=True)
class Resize:
    """units: numbers of units that the plan was made for, and those it shall be for."""

    units: tuple[int, ...]
    others: tuple[int, ...]

    def stride(self, stride: int, size: int, other: int) -> int:
        """What `stride` in a dim of `size` is in one of `other`."""
        if stride and size % stride == 0 and other % (size // stride) == 0 and not self._constant(size // stride, size, other):
            return other // (size // stride)
        for p, q in zip(self.units, self.others, strict=True):
            count = 0
            while stride and stride % p == 0:
                stride, count = stride // p, count + 1
            stride *= q**count
        return stride

    def _constant(self, left: int, size: int, other: int) -> bool:
        """Whether what varies of the dim is to the left of the digit, not to its right."""
        return size != other and any(left % p == 0 for p in self.units)

    def placement(self, p: Placement, shape: Sequence[int]) -> Placement:
        splits = tuple(Split(s.dim, self.stride(s.stride, p.shape[s.dim], shape[s.dim]), s.axis) for s in p.splits)
        return Placement(tuple(shape), splits, p.partial)

    def choice(self, c: OpChoice, op: Op, other: Op) -> OpChoice:
        if not c.strategy:
            return c
        mine, theirs = lookup(op).factors, lookup(other).factors
        strategy = {a: (x, self.stride(n, mine[x].size, theirs[x].size)) for a, (x, n) in c.strategy.items()}
        return replace(c, strategy=strategy)


def resized(plan: Plan, graph: Graph, other: Graph, units: tuple[int, ...], others: tuple[int, ...]) -> Plan | None:
    """`plan`, made for `graph`, for the same program `other`. None where that is another one: then a plan for all sizes there is not."""
    if [(o.name, o.target) for o in graph.ops] != [(o.name, o.target) for o in other.ops] or graph.outputs != other.outputs:
        return None
    r = Resize(units, others)
    theirs = {o.name: o for o in other.ops}
    try:
        ops = {o.name: r.choice(plan.ops[o.name], o, theirs[o.name]) for o in graph.ops}
    except KeyError:  # a rule that has other loops there
        return None
    inputs = tuple(r.placement(p, t.shape) for p, t in zip(plan.inputs, other.inputs, strict=True))
    outputs = tuple(r.placement(p, other.tensors[n].shape) if n else p for p, n in zip(plan.outputs, other.outputs, strict=True))
    kept = {n: r.placement(p, other.tensors[n].shape) for n, p in plan.kept.items()}
    return replace(plan, ops=ops, inputs=inputs, outputs=outputs, kept=kept)
