"""Where tensor dims are composite: a flattened (b s) is one dim of a product, but may be split along b or along s.

A cut of a dim is a stride at which some view of it, before or after, begins another letter. Cuts travel through every op that
keeps a letter, to a fixpoint, so that a product's `m` knows it is (b s) and its `n` that it is (heads d).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.graph.graph import Graph
from autopar.rules.grammar import Rule
from autopar.rules.strategy import right_of

SWEEPS = 6  # each sweep goes through the graph forwards or backwards; three reach the fixpoint on every model seen


def letter_cuts(
    graph: Graph, rules: Mapping[str, Rule], also: Mapping[tuple[str, str], int] = MappingProxyType({})
) -> dict[tuple[str, str], tuple[int, ...]]:
    """(op, letter) -> strides at which the letter may be cut, ascending, 1 and its size included. also: a cut that is not from a view."""
    dims: dict[tuple[str, int], set[int]] = {}
    letters = {(op, x): {1, cut, rules[op].factors[x].size} for (op, x), cut in also.items()}
    for sweep in range(SWEEPS):
        changed = False
        for op in graph.ops if sweep % 2 == 0 else reversed(graph.ops):
            rule = rules[op.name]
            places = [
                (t.name, d, x)
                for tensors, operands in ((op.inputs, rule.inputs), (op.outputs, rule.outputs))
                for t, operand in zip(tensors, operands, strict=True)
                if t is not None and operand is not None
                for d, x in enumerate(operand)
            ]
            for name, d, group in places:
                known = dims.get((name, d), ())
                for x in group:
                    size, right = max(1, rule.factors[x].size), max(1, right_of(group, x, rule))
                    mine = letters.setdefault((op.name, x), {1, size})
                    before = len(mine)
                    mine |= {c // right for c in known if c % right == 0 and size % (c // right) == 0 and c // right <= size}
                    changed |= len(mine) > before
            for name, d, group in places:
                if len(group) == 1 and len(letters[op.name, group[0]]) == 2 and (name, d) not in dims:
                    continue
                mine = dims.setdefault((name, d), set())
                before = len(mine)
                for x in group:
                    right = max(1, right_of(group, x, rule))
                    mine |= {c * right for c in letters[op.name, x]}
                changed |= len(mine) > before
        if not changed:
            break
    return {key: _chain(cuts) for key, cuts in letters.items()}


def _chain(cuts: set[int]) -> tuple[int, ...]:
    """The cuts that divide one another; a view that crosses another's boundary adds none."""
    out: list[int] = []
    for c in sorted(cuts):
        if not out or c % out[-1] == 0:
            out.append(c)
    top = max(cuts)
    while out[-1] != top:
        out.pop()
        if top % out[-1] == 0:
            out.append(top)
    return tuple(out)
