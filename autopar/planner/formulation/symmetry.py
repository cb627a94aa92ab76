"""What is decided once for all copies of a layer: operators by class, parameters by class, tensors by class and by who reads them.

Operators of layers that are alike but no copies (`solver.patterns`) are one class too. A class has one strategy. A tensor's class is not enough to say what flows: the last layer's result goes to the head, the others' to the next
layer, and a gather that only the head wants must not be paid for every layer. So tensors of one class with the same readers are one value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.graph.graph import Graph, Op, Tensor
from autopar.solver.patterns import alike
from autopar.solver.shrink import Shrunk
from autopar.solver.stacks import Stack


@dataclass(frozen=True)
class SymmetryClasses:
    """graph: the shrunk one, which has copies. classes: one operator per class, reading the tensors that stand for a class; where a layer reads
    the layer before it, an operator reads what is made further on.

    rep, tensor_rep: the class of everything in `graph`. group: tensor -> the value it belongs to (the name of one of its tensors);
    members: value -> its tensors. together: as of `solver.fold.Folded`. times, tensor_times: how many of the program each in `graph` stands for. segment: operators of a class that
    share a policy (`solver.shrink`). patterned: classes of operators of layers that are alike but no copies.
    """

    graph: Graph
    classes: Graph
    rep: Mapping[str, str]
    tensor_rep: Mapping[str, str]
    group: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]
    times: Mapping[str, int]
    tensor_times: Mapping[str, int]
    stacks: tuple[Stack, ...]
    segment: Mapping[str, int]
    together: int = 1
    patterned: frozenset[str] = frozenset()

    def count(self, value: str) -> int:
        """How many tensors of the program a value is."""
        return self.counts[value]

    @cached_property
    def counts(self) -> dict[str, int]:
        return {value: sum(self.tensor_times[t] for t in tensors) for value, tensors in self.members.items()}


FEW = 256  # kinds of operators: layers of so small a program may all decide for themselves


def symmetry(s: Shrunk, patterns: bool | None = None) -> SymmetryClasses:
    """patterns: whether layers that are alike but no copies decide alike; None: where the program is large."""
    f = s.fold
    patterns = len(f.count) > FEW if patterns is None else patterns
    graph = f.graph
    tied = alike(f) if patterns else {}
    rep, tensor_rep = _tied(s, tied)

    def classed(x: Any) -> Any:
        if isinstance(x, Tensor):
            return graph.tensors[tensor_rep[x.name]]
        if isinstance(x, (list, tuple)):
            return type(x)(classed(y) for y in x)
        if isinstance(x, dict):
            return {key: classed(y) for key, y in x.items()}
        return x

    ops: list[Op] = [replace(op, args=classed(op.args), kwargs=classed(op.kwargs)) for op in graph.ops if rep[op.name] == op.name]
    leaves = {n for n, t in graph.params.items() if tensor_rep[t.name] == t.name}
    classes = replace(
        graph,
        params={n: t for n, t in graph.params.items() if n in leaves},
        ops=tuple(ops),
        grads={n: tensor_rep[g] for n, g in graph.grads.items() if n in leaves},
        tensors={n: t for n, t in graph.tensors.items() if tensor_rep[n] == n},
    )
    group, members = _groups(s, rep, tensor_rep)
    return SymmetryClasses(graph, classes, rep, tensor_rep, group, members, s.times, s.tensor_times, f.stacks, s.segment, f.together, frozenset(tied.values()))  # fmt: skip


def _tied(s: Shrunk, tied: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Classes of operators and of tensors: those of the fold, and of them one where layers are alike."""
    f, by_name = s.fold, {op.name: op for op in s.graph.ops}
    leaves = {t.name for t in (*s.graph.params.values(), *s.graph.buffers.values())}
    same: dict[str, str] = {}

    def root(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    for mine, other in tied.items():
        a, b = by_name[mine], by_name[other]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            if x is not None and y is not None:
                same[x.name] = y.name
        for x, y in zip(a.inputs, b.inputs, strict=True):
            one, two = (root(f.tensor_rep[t.name]) for t in (x, y))
            if one != two and x.name in leaves and y.name in leaves:
                same[one] = two
    rep = {n: tied.get(r, r) for n, r in f.rep.items()}
    return rep, {n: root(r) for n, r in f.tensor_rep.items()}


def _groups(s: Shrunk, rep_of: Mapping[str, str], tensor_rep: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    graph = s.graph
    read: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for op in graph.ops:
        for i, t in enumerate(op.inputs):
            read[t.name].add((rep_of[op.name], i))
    for i, name in enumerate(graph.outputs):
        read[name].add(("output", i))
    for n, g in graph.grads.items():
        read[g].add((f"gradient of {tensor_rep[graph.params[n].name]}", 0))
    for n, u in graph.buffer_updates.items():
        read[u].add((f"update of {n}", 0))
    params = {t.name for t in graph.params.values()}
    found: dict[tuple[str, frozenset[tuple[str, int]], int], list[str]] = defaultdict(list)
    for name in graph.tensors:
        rep = tensor_rep[name]
        key = (
            (rep, frozenset[tuple[str, int]](), 0) if rep in params else (rep, frozenset(read[name]), s.segment.get(name.split(".")[0], 0))
        )
        found[key].append(name)
    group: dict[str, str] = {}
    members: dict[str, tuple[str, ...]] = {}
    for (rep, _, _), names in found.items():
        value = rep if rep in names else names[0]
        members[value] = tuple(names)
        group |= dict.fromkeys(names, value)
    return group, members
