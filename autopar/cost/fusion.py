"""What memory-bound ops read and write once neighbours are compiled into one kernel, as Inductor does.

A group is a maximal set of fusible ops (pointwise, reductions, norms, losses, copies) joined by producer-consumer edges, also through views, all
of one direction. It reads each tensor from outside once, charged to the first op that reads it, and writes only what somebody else reads.

A kernel runs as a whole, so nothing may lead out of a group and back into it: in `x2 = x1 + mlp(norm(x1))` the sum cannot join the norm.
Give ops levels that never fall along an edge, and rise behind every non-fusible op; join two fusible ops with an edge between them only at equal
levels. If a path from a group came back to it through a non-fusible op, its end would be at a higher level than its start; so there is
none, and what lies on a path between members is itself at their level, and a member. (A path between ops of one direction stays in
it, so each direction may have levels of its own.)

The level is first the lowest possible, the most non-fusible ops on any path that leads to the op. Then groups sink to the level of the first
that uses them: in backward, what only needs forward's values, such as a norm's `2 x`, could be made at once, but is made where it is used.

Constants, and what is made of them alone (a mask), are made where they are used, and operands that were expanded are read from cache: neither is charged. What the plan redistributes between
two ops of a group is written and read all the same: that is not seen here. Nor is the pass that batch statistics take by themselves (`memory.again_bytes`), or another reduction
whose rows are too long for a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autopar.cost.memory import base_name, is_view, reads, writes
from autopar.graph.graph import Graph, Op, Tensor
from autopar.rules.grammar import Rule


class Share(NamedTuple):
    """An op's share of its kernel: names of the operands it reads from memory and of the outputs it writes to it; whether the kernel's launch
    is put down to it (to one op of every kernel: the first that writes)."""

    reads: frozenset[str]
    writes: frozenset[str]
    launches: bool


Fused = Mapping[str, Share]  # by the op's name

FUSIBLE = ("cheap", "norm", "loss", "random", "view")
# Cheap ops that Inductor leaves to library kernels or gives a kernel of their own.
_ALONE = """
    sort argsort topk kthvalue median nanmedian mode histc searchsorted cumsum cumprod logcumsumexp cummax cummin
    index_put _unsafe_index_put scatter scatter_add index_add masked_scatter masked_scatter_backward _fft_c2c _fft_r2c _fft_c2r
    grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward im2col col2im as_strided_scatter
"""
ALONE = frozenset(_ALONE.split())


def is_fusible(op: Op, rule: Rule) -> bool:
    return rule.kind in FUSIBLE and not rule.is_fallback and base_name(op) not in ALONE


def fused(graph: Graph, rules: Mapping[str, Rule], by_module: bool = False) -> dict[str, Share]:
    """For every op that makes something, by name: its share of the kernel it is compiled into.

    rules: op name -> its rule. Views are left out: they are free. Products are in it too, as if by themselves. by_module: only ops of one module are
    joined, as where a norm or a rotation has a kernel written by hand.
    """
    storages = Storages(graph, rules)
    group = _groups(graph, rules, storages, by_module)
    needed = _needed(graph, rules, storages, group)
    seen: set[tuple[str, str]] = set()  # (group, tensor) that some op of the group has read
    launched: set[str] = set()
    out: dict[str, Share] = {}
    for op in graph.ops:
        if op.name not in group:
            continue
        here = group[op.name]
        read = set()
        for t in reads(op):
            made_by = storages.maker.get(t.name)
            if made_by is not None and (group[made_by.name] == here or made_by.name in storages.constant):
                continue
            key = (here, storages.contents(t))
            if key not in seen and not storages.is_expanded(t):
                seen.add(key)
                read.add(t.name)
        written = frozenset(t.name for t in writes(op) if t.name in needed)
        out[op.name] = Share(frozenset(read), written, bool(written) and here not in launched)
        if written:
            launched.add(here)
    return out


def kernels(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, str]:
    """Op -> a name for the kernel it is compiled into, that of one of its ops; no views."""
    return _groups(graph, rules, Storages(graph, rules), by_module=False)


class Storages:
    """Through views to the memory behind them. maker: tensor -> the op that wrote that memory; absent for graph inputs."""

    def __init__(self, graph: Graph, rules: Mapping[str, Rule]) -> None:
        self.of: dict[str, Tensor] = {}  # a view's output -> what it looks at
        self.maker: dict[str, Op] = {}
        self.root: dict[str, str] = {}
        self.constant = set[
            str
        ]()  # cheap ops of nothing but their arguments and other constants: made again in every kernel that uses them
        for op in graph.ops:
            view = is_view(op, rules[op.name]) and bool(op.inputs)
            of_constants = all(t.name in self.maker and self.maker[t.name].name in self.constant for t in reads(op))
            if rules[op.name].kind == "cheap" and is_fusible(op, rules[op.name]) and of_constants:
                self.constant.add(op.name)
            for t in op.outputs:
                if t is None:
                    continue
                if view:
                    source = op.inputs[0]
                    self.of[t.name] = source
                    self.root[t.name] = self.root.get(source.name, source.name)
                    if source.name in self.maker:
                        self.maker[t.name] = self.maker[source.name]
                else:
                    self.maker[t.name] = op

    def contents(self, t: Tensor) -> str:
        """The same name for tensors that hold the same elements: through reshapes and transposes, but not through slices."""
        while t.name in self.of and self.of[t.name].numel == t.numel:
            t = self.of[t.name]
        return t.name

    def is_expanded(self, t: Tensor) -> bool:
        """Whether the tensor has more elements than the memory behind it."""
        while t.name in self.of:
            if self.of[t.name].numel < t.numel:
                return True
            t = self.of[t.name]
        return False


def _groups(graph: Graph, rules: Mapping[str, Rule], storages: Storages, by_module: bool) -> dict[str, str]:
    """Op -> a name for its group, that of one of its ops; no views."""
    after: dict[str, int] = {}  # tensor -> the level of a fusible op that reads only this
    level: dict[str, int] = {}
    for op in graph.ops:
        at = max((after.get(t.name, 0) for t in op.inputs), default=0)
        for t in op.outputs:
            if t is not None:
                after[t.name] = at if is_fusible(op, rules[op.name]) else at + 1
        if not is_view(op, rules[op.name]):
            level[op.name] = at
    # Within a direction: (producer, consumer), in the consumers' order.
    edges = [
        (made_by.name, op.name)
        for op in graph.ops
        if op.name in level
        for t in reads(op)
        if (made_by := storages.maker.get(t.name)) is not None
        and made_by.direction == op.direction
        and (not by_module or made_by.module == op.module)
    ]
    joins = {op.name for op in graph.ops if is_fusible(op, rules[op.name]) and op.name not in storages.constant}
    first = _joined(level, edges, joins)
    uses: dict[str, set[str]] = {}
    for p, c in edges:
        if p in joins and first[p] != first[c]:
            uses.setdefault(first[p], set()).add(c)
    at_of = {g: level[g] for g in first.values()}
    # From the highest level down, so that whatever uses a group has sunk before it.
    for g in sorted(uses, key=lambda g: -level[g]):
        at_of[g] = min(at_of[first[c]] for c in uses[g])
    return _joined({x: at_of[g] for x, g in first.items()}, edges, joins)


def _joined(level: Mapping[str, int], edges: list[tuple[str, str]], joins: set[str]) -> dict[str, str]:
    """The groups that edges between `joins` at equal levels make."""
    parent = {x: x for x in level}

    def find(x: str) -> str:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for p, c in edges:
        if p in joins and c in joins and level[p] == level[c]:
            parent[find(c)] = find(p)
    return {x: find(x) for x in parent}


def _needed(graph: Graph, rules: Mapping[str, Rule], storages: Storages, group: Mapping[str, str]) -> set[str]:
    """Tensors that have to be in memory: read by another group, by an op by itself, or returned."""
    by_name = {op.name: op for op in graph.ops}
    needed = {storages.root.get(t, t) for t in (*graph.outputs, *graph.grads.values(), *graph.buffer_updates.values()) if t}
    for op in graph.ops:
        if op.name not in group:
            continue
        for t in reads(op):
            p = storages.maker.get(t.name)
            if p is None or group[p.name] == group[op.name]:
                continue
            if p.name in storages.constant and is_fusible(by_name[op.name], rules[op.name]):
                continue
            needed.add(storages.root.get(t.name, t.name))
    return needed
