"""Prices for a step as it is compiled, not as it was planned: what fuses is found anew in the halves that run.

The integer program, and so `autopar.simulate.price`, knows fusion from the captured graph: an operator that runs again in backward reads and writes what it does in
forward. Inductor fuses what runs again with the backward operators that read it, where it can, which then is neither written nor read, nor in
memory. min-cut counts on that ("recomputing is free"). Here `autopar.cost.fusion` looks at forward and backward as partitioned: the same model of
fusion, another graph. Collectives and copies cost what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from autopar.capture.describe import describe_calls
from autopar.cost import Cost
from autopar.cost.fusion import fused
from autopar.cost.recompute import Halves
from autopar.graph.calls import is_issue, is_wait, part_bytes
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.passes.partition import Parts
from autopar.rules import lookup


def as_compiled(parts: Parts, cost: Cost) -> tuple[dict[fx.Node, float], Callable[[fx.Node], list[int]]]:
    """Seconds of the calls of both halves on compute, and bytes of every part of a call's result that are in memory."""
    seconds: dict[fx.Node, float] = {}
    sizes: dict[fx.Node, list[int]] = {}
    for gm in (parts.forward, parts.backward):
        if gm is not None:
            _half(gm, cost, seconds, sizes)
    return seconds, lambda n: sizes.get(n) or part_bytes(n)


def _half(gm: fx.GraphModule, cost: Cost, seconds: dict[fx.Node, float], sizes: dict[fx.Node, list[int]]) -> None:
    graph, nodes = describe_calls(gm.graph.nodes, gm.graph.output_node().args[0])
    rules = {op.name: lookup(op) for op in graph.ops}
    shares = fused(graph, rules)
    one = replace(cost, mesh=Mesh.of({}), fused=shares, halves=Halves())
    for op in graph.ops:
        n = nodes[op.name]
        if is_issue(n) or is_wait(n):
            continue
        rule = rules[op.name]
        whole = tuple(None if t is None else Placement.of(t.shape) for t in op.outputs)
        seconds[n] = one.op(op, rule, {}, tuple(Placement.of(t.shape) for t in op.inputs), whole).seconds
        if op.name in shares and not rule.is_heavy:
            there = [t is not None and t.name in shares[op.name].writes for t in op.outputs]
            sizes[n] = [b * w for b, w in zip(part_bytes(n), there, strict=True)]
