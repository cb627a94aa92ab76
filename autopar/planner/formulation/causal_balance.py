"""Where queries of causal attention are split so that all ranks have as much to do.

Query i sees i + 1 keys, so of n ranks with a stretch of queries each the last has nearly all the work that causality hides from the others: 2 - 1/n times the mean. With m blocks
of queries that are split each over all ranks, it has 1 + (1 - 1/n) / m of it (as Striped Attention, Brandon et al., 2023, of which a block is a token a rank). For that the
sequence is cut into m blocks, in all operators that have it: one more place for an axis to go to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost.compute import flops, is_causal
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.rules.grammar import Rule

BLOCKS = (8, 4, 2)
ROWS = 512  # neighbouring queries: kernels over fewer are slow
SHARE = 1 / 8  # attention's of forward's FLOPs: balance wins at most half of it


def balancing_cuts(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> dict[tuple[str, str], int]:
    """(op, letter) -> the stride at which blocks of its queries begin. Empty where samples are enough for all devices, or attention is little of the work."""
    forward = [op for op in graph.ops if op.direction == "forward"]
    work = {op.name: flops(op, rules[op.name], {}, Mesh(())) for op in forward}
    causal = [op for op in forward if rules[op.name].kind == "attention" and is_causal(op)]
    if not causal or sum(work[op.name] for op in causal) < SHARE * sum(work.values()):
        return {}
    found = {}
    for op in causal:
        size = {x: f.size for x, f in rules[op.name].factors.items()}
        ranks = mesh.size // math.gcd(mesh.size, size["b"])
        if ranks > 1 and size["q"] == size["s"]:
            blocks = next((m for m in BLOCKS if size["q"] % (m * mesh.size) == 0 and size["q"] >= ROWS * m * ranks), None)
            if blocks is not None:
                found[op.name, "q"] = size["q"] // blocks
    return found
