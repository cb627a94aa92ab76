"""Where a captured program is cut into the stages of a pipeline, and on which stage each operator is.

A layer is what the first number in a module's path stands for: `model.layers.3`, `encoder.block.0`. Layers are in the order in which forward comes to them. An operator of forward is
of its module's layer, or of a later one that something it reads comes from; what comes before any layer (an embedding) goes with the first that reads it.
An operator of backward is where the one of forward is that it belongs to, and no later than the gradients it reads: sums of gradients fall where the last part arrives.

*Free* operators have no stage. They follow from inputs, buffers and constants alone (masks, rotary tables, shifted labels), or are a view or a cast of a parameter. Each stage
makes them by itself: that is cheap, and nothing has to be sent.

Cuts are between layers, such that the slowest stage is as fast as can be:

    minimise over cuts 0 = c_0 < c_1 < ... < c_p = L:   max over stages of  work of layers c_s to c_{s+1} - 1

by dynamic programming over (stages, layers), exact. Work is FLOPs of forward and backward, with an operation for every element made; the embedding's is in the first layer, the head's in
the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.cost.compute import HEAVY, flops
from autopar.cost.memory import is_view
from autopar.errors import LayoutError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.rules import lookup

LAYER = re.compile(r"((?:[^.]*?\.)*?\d+)(?:\.|$)")


@dataclass(frozen=True)
class Cut:
    """stages: which layers are on each."""

    stages: tuple[tuple[str, ...], ...]

    @property
    def of_layer(self) -> dict[str, int]:
        return {layer: s for s, layers in enumerate(self.stages) for layer in layers}


def layer_of(op: Op) -> str:
    found = LAYER.match(op.module)
    return found[1] if found else ""


def cut_into(graph: Graph, belongs: Mapping[str, str], stages: int) -> Cut:
    """As balanced as can be. belongs: operator of backward -> that of forward whose gradient it computes. Raises LayoutError where there are fewer layers than stages."""
    free = free_ops(graph)
    order = layers(graph, free)
    of_enough(order, stages)
    unit = units(graph, free, {layer: i for i, layer in enumerate(order)})
    work = [0.0] * len(order)
    for op in graph.ops:
        at = unit.get(op.name, unit.get(belongs.get(op.name, "")))
        if at is not None:
            work[at] += work_of(op)
    return cut_work(order, work, stages)


def of_enough(order: Sequence[str], stages: int) -> None:
    """Raises LayoutError where there are fewer layers than stages."""
    if len(order) < stages:
        shown = ", ".join(order[:4]) + (" ..." if len(order) > 4 else "")
        raise LayoutError(
            f"a pipeline of {stages} stages needs as many layers, and the model has {len(order)}",
            where=f"layers, by numbers in the paths of modules: {shown or 'none'}",
            fix=f"make the pipeline shorter (at most {max(1, len(order))} stages in all), or put the model's parts into an nn.ModuleList or nn.Sequential",
        )


def cut_work(order: Sequence[str], work: Sequence[float], stages: int) -> Cut:
    """Of layers in order with what each has to do."""
    ends = balanced(work, stages)
    return Cut(tuple(tuple(order[a:b]) for a, b in zip((0, *ends[:-1]), ends, strict=True)))


def stages_of(graph: Graph, belongs: Mapping[str, str], cut: Cut) -> dict[str, int]:
    """The stage of every operator that is not free. Layers that the cut does not know are where what they read is."""
    free, last = free_ops(graph), len(cut.stages) - 1
    stage = units(graph, free, cut.of_layer)
    backward = [op for op in graph.ops if op.direction == "backward" and op.name not in free]
    behind = {op.name for op in backward}
    for op in backward:
        known = [stage[a] for a in producers(op) if a in behind and a in stage]
        if belongs.get(op.name) in stage:
            known.append(stage[belongs[op.name]])
        if known:
            stage[op.name] = min(known)
    readers = readers_of(graph)
    for op in reversed(backward):
        if op.name not in stage:
            stage[op.name] = max((stage[r] for r in readers.get(op.name, ()) if r in stage), default=last)
    return stage


def free_ops(graph: Graph) -> frozenset[str]:
    tangents, params = {t.name for t in graph.tangents}, {t.name for t in graph.params.values()}
    made = {op.name for op in graph.ops}
    free: set[str] = set()
    of_params: set[str] = set()
    for op in graph.ops:
        names = {t.name for t in op.inputs}
        if names & tangents or any(a in made and a not in free for a in producers(op)):
            continue
        rule = lookup(op)
        reads_params = bool(names & params) or any(a in of_params for a in producers(op))
        looks = is_view(op, rule) or op.target.startswith("aten._to_copy")
        if rule.kind in (*HEAVY, "random") or (reads_params and not looks):
            continue
        free.add(op.name)
        if reads_params:
            of_params.add(op.name)
    return frozenset(free)


def producers(op: Op) -> list[str]:
    """Names of what makes the operands: an operator's has no dot, and its results' names have one behind it."""
    return [t.name.split(".")[0] for t in op.inputs]


def readers_of(graph: Graph) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for op in graph.ops:
        for a in producers(op):
            found.setdefault(a, []).append(op.name)
    return found


def layers(graph: Graph, free: frozenset[str]) -> list[str]:
    """In the order in which forward comes to them."""
    found = [layer_of(op) for op in graph.ops if op.direction == "forward" and op.name not in free]
    return [layer for layer in dict.fromkeys(found) if layer]


def units(graph: Graph, free: frozenset[str], number: Mapping[str, int]) -> dict[str, int]:
    """For every operator of forward that is not free the number of its layer, or of the stage that has it."""
    forward = [op for op in graph.ops if op.direction == "forward" and op.name not in free]
    unit: dict[str, int] = {}
    for op in forward:
        known = [unit[a] for a in producers(op) if a in unit]
        layer = layer_of(op)
        if layer in number:
            known.append(number[layer])
        if known:
            unit[op.name] = max(known)
    readers = readers_of(graph)
    for op in reversed(forward):
        behind = [unit[r] for r in readers.get(op.name, ()) if r in unit]
        if op.name not in unit and behind:
            unit[op.name] = min(behind)
    for op in forward:  # what backward alone reads
        unit.setdefault(op.name, max((unit[a] for a in producers(op) if a in unit), default=0))
    return unit


def shares(graph: Graph, stages: Mapping[str, int], number: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What share of all work each stage has in forward, and in backward."""
    work = {"forward": [0.0] * number, "backward": [0.0] * number}
    for op in graph.ops:
        if op.name in stages:
            work[op.direction][stages[op.name]] += work_of(op)
    total = sum(map(sum, work.values())) or 1.0
    return tuple(w / total for w in work["forward"]), tuple(w / total for w in work["backward"])


def work_of(op: Op) -> float:
    return flops(op, lookup(op), {}, Mesh(())) + sum(t.numel for t in op.outputs if t is not None)


def balanced(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where each stage ends, at least one layer in each."""
    total = [0.0, *accumulate(work)]
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for s in range(1, stages + 1):
        for j in range(s, len(work) - (stages - s) + 1):
            best[s, j] = min(
                (max(best[s - 1, i][0], total[j] - total[i]), (*best[s - 1, i][1], j)) for i in range(s - 1, j) if (s - 1, i) in best
            )
    return best[stages, len(work)][1]
