"""Strategies: how a mesh splits one op.

A strategy gives each mesh axis at most one factor: axis -> (letter, stride within the letter). From it and the rule's line
follow the placement every operand must have and the placement every output gets: an axis on a letter owns, in each dim
that holds the letter, the digit with `stride x (product of the letters to its right)` elements to its right; an output
that lacks the letter is Partial over that axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules.grammar import Dim, Rule

Strategy = Mapping[str, tuple[str, int]]


def right_of(dim: Dim, letter: str, rule: Rule) -> int:
    """Product of the sizes of the letters to the right of `letter` in `dim`."""
    return math.prod(rule.factors[x].size for x in dim[dim.index(letter) + 1 :])


def digit(dim: Dim, letter: str, stride: int, rule: Rule) -> int | None:
    """How many elements of `dim` are to the right of the digit that an axis on `letter` at `stride` owns there; None where it owns none."""
    if letter in rule.pairs and letter not in dim:
        letter = rule.pairs[letter]
    elif letter in rule.pairs:
        stride = 1  # the strategy's is that of the other
    elif letter in rule.alongside and letter not in dim:
        letter = rule.alongside[letter]
    return stride * right_of(dim, letter, rule) if letter in dim else None


def is_legal(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Every letter may be split, and the digits divide and do not overlap."""
    for a, (x, _) in strategy.items():
        if x in rule.pairs and (rule.factors[x].size != mesh.axis_size(a) or sum(y == x for y, _ in strategy.values()) > 1):
            return False
    taken = rule.taken
    for x in {taken.get(x, x) for x, _ in strategy.values()}:
        f = rule.factors[x]
        where = {a: (0, stride) for a, (y, stride) in strategy.items() if taken.get(y, y) == x}
        if not f.split or not Placement.of((f.size,), where).is_valid(mesh):
            return False
    return all(rule.factors[x].split for x, _ in strategy.values())


def placements(
    rule: Rule,
    strategy: Strategy,
    in_shapes: tuple[tuple[int, ...], ...],
    out_shapes: tuple[tuple[int, ...] | None, ...],
    partial: Mapping[str, frozenset[int]] | None = None,
) -> tuple[tuple[Placement, ...], tuple[Placement | None, ...]]:
    """Placements the operands must have and the outputs get.

    partial: axis -> the set of inputs (one of `rule.linear`) that are Partial(sum) over it and passed through.
    """
    partial = partial or {}

    def operand(dims: tuple[Dim, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        at = ((a, i, digit(d, x, stride, rule)) for a, (x, stride) in strategy.items() for i, d in enumerate(dims))
        return {a: (i, right) for a, i, right in at if right is not None}

    inputs = tuple(
        Placement.of(s, operand(d, s), {a: "sum" for a, who in partial.items() if i in who})
        for i, (d, s) in enumerate(zip(rule.inputs, in_shapes, strict=True))
    )
    outputs: list[Placement | None] = []
    for dims, shape in zip(rule.outputs, out_shapes, strict=True):
        if dims is None or shape is None:
            outputs.append(None)
            continue
        where = operand(dims, shape)
        sums = {a: rule.factors[x].reduce or "sum" for a, (x, _) in strategy.items() if a not in where and rule.factors[x].reduce != "all"}
        sums.update({a: "sum" for a in partial})
        outputs.append(Placement.of(shape, where, sums))
    return inputs, tuple(outputs)


def letter_at(dims: tuple[Dim, ...], at: tuple[int, int], width: int, rule: Rule) -> tuple[str, int] | None:
    """The (letter, stride) that owns the digit of `width` at `at` = (dim, stride); None if it straddles letters."""
    dim, stride = at
    right = 1
    for x in reversed(dims[dim]):
        size = rule.factors[x].size
        if stride < right * size:
            inside = stride % right == 0 and (right * size) % (stride * width) == 0
            return (x, stride // right) if inside else None
        right *= size
    return None


def follows(rule: Rule, letter: str) -> bool:
    """Whether an operand that is split on `letter` is reason enough to split the operator there."""
    return rule.factors[letter].split and letter not in rule.alongside


def single_axis(rule: Rule, axis: str, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Every letter that `axis` alone can split, at its major digit."""
    width = mesh.axis_size(axis)
    for x, f in rule.factors.items():
        if f.split and f.size % width == 0 and x not in rule.taken:
            yield x, f.size // width
