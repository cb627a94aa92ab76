"""Where queries of causal attention are split so that all ranks have as much to do.

Query i sees i + 1 keys, so of n ranks with a stretch of queries each the last has nearly all the work that causality hides from the others: 2 - 1/n times the mean. With m blocks
of queries that are split each over all ranks, it has 1 + (1 - 1/n) / m of it (as Striped Attention, Brandon et al., 2023, of which a block is a token a rank). For that the
sequence is cut into m blocks, in all operators that have it: one more place for an axis to go to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.cost.compute import flops, is_causal
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.rules.attention import bounds
from autopar.rules.grammar import Rule

BLOCKS = (8, 4, 2)
ROWS = 512  # neighbouring queries: kernels over fewer are slow
SHARE = 1 / 8  # attention's of forward's FLOPs: balance wins at most half of it


def balancing_cuts(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> dict[tuple[str, str], int]:
    """(op, letter) -> the stride at which blocks of its queries begin. Empty where samples are enough for all devices, or attention is little of the work."""
    found = {}
    for op, size, ranks in _long(graph, rules, mesh, lambda op: is_causal(op) or (bool(rules[op.name].alongside) and _sees_all_before(op))):
        blocks = next((m for m in BLOCKS if size["q"] % (m * mesh.size) == 0 and size["q"] >= ROWS * m * ranks), None)
        if blocks is not None:
            found[op.name, "q"] = size["q"] // blocks
    return found


def _sees_all_before(op: Op) -> bool:
    """Whether a mask hides what is behind a query, by its own program, and else what it likes: a ring need not compute that (`autopar.cost.ring`)."""
    before, after = bounds(op)
    return before < 0 <= after


def in_rings(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> dict[str, int]:
    """op -> how many neighbouring keys a rank has at least, of attention whose keys may go round (`autopar.kernels.ring`), backward's too. Empty where nothing
    has to be split, as above."""
    backward = [op for op in graph.ops if op.direction == "backward" and rules[op.name].kind == "attention"]
    whole = {_names(op.args[1:4]) for op in backward if not rules[op.name].alongside}  # a bias wants its gradient
    found = _long(graph, rules, mesh, lambda op: bool(rules[op.name].alongside) and _names(op.args[:3]) not in whole)
    return {op.name: ROWS for op, size, ranks in found if size["s"] >= ROWS * ranks}


def _names(tensors: Sequence[Any]) -> tuple[str, ...]:
    return tuple(t.name for t in tensors)


def _long(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, wanted: Callable[[Op], bool]) -> list[tuple[Op, dict[str, int], int]]:
    """Attention over a sequence that some devices have to share, as there are fewer samples, if it is much of the work: the sizes of its loops, how many share."""
    forward = [op for op in graph.ops if op.direction == "forward"]
    attention = [op for op in forward if rules[op.name].kind == "attention" and wanted(op)]
    work = {op.name: flops(op, rules[op.name], {}, Mesh(())) for op in forward} if attention else {}
    if sum(work[op.name] for op in attention) < SHARE * sum(work.values()):
        return []
    sizes = [{x: f.size for x, f in rules[op.name].factors.items()} for op in attention]
    many = [mesh.size // math.gcd(mesh.size, size["b"]) for size in sizes]
    return [(op, size, n) for op, size, n in zip(attention, sizes, many, strict=True) if n > 1 and size["q"] == size["s"]]
