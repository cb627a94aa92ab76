"""Where tensor dims are composite: a flattened (b s) is one dim of a product, but may be split along b or along s.

A cut of a dim is a stride at which some view of it, before or after, begins another letter. Cuts travel through every op that
keeps a letter, to a fixpoint, so that a product's `m` knows it is (b s) and its `n` that it is (heads d).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.graph.graph import Graph, Op
from autopar.rules.grammar import Rule
from autopar.rules.strategy import right_of

SWEEPS = 6  # each sweep goes through the graph forwards or backwards; three reach the fixpoint on every model seen


def letter_cuts(
    graph: Graph, rules: Mapping[str, Rule], also: Mapping[tuple[str, str], int] = MappingProxyType({})
) -> dict[tuple[str, str], tuple[int, ...]]:
    """(op, letter) -> strides at which the letter may be cut, ascending, 1 and its size included. also: a cut that is not from a view."""
    dims: dict[tuple[str, int], set[int]] = {}
    letters = {(op, x): {1, cut, rules[op].factors[x].size} for (op, x), cut in also.items()}
    places = [_places(op, rules[op.name]) for op in graph.ops]
    for sweep in range(SWEEPS):
        changed = False
        for mine_of in places if sweep % 2 == 0 else reversed(places):
            for place, group in mine_of:
                known = dims.get(place, ())
                for letter, size, right in group:
                    mine = letters.setdefault(letter, {1, size})
                    before = len(mine)
                    mine |= {c // right for c in known if c % right == 0 and size % (c // right) == 0 and c // right <= size}
                    changed |= len(mine) > before
            for place, group in mine_of:
                if len(group) == 1 and len(letters[group[0][0]]) == 2 and place not in dims:
                    continue
                mine = dims.setdefault(place, set())
                before = len(mine)
                for letter, _, right in group:
                    mine |= {c * right for c in letters[letter]}
                changed |= len(mine) > before
        if not changed:
            break
    return {key: _chain(cuts) for key, cuts in letters.items()}


Letter = tuple[str, str]  # of an operator
Place = tuple[tuple[str, int], list[tuple[Letter, int, int]]]  # a tensor's dim, and of what: each letter, its size, what is right of it


def _places(op: Op, rule: Rule) -> list[Place]:
    return [
        ((t.name, d), [((op.name, x), max(1, rule.factors[x].size), max(1, right_of(group, x, rule))) for x in group])
        for tensors, operands in ((op.inputs, rule.inputs), (op.outputs, rule.outputs))
        for t, operand in zip(tensors, operands, strict=True)
        if t is not None and operand is not None
        for d, group in enumerate(operand)
    ]


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
