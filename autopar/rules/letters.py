"""Writing a rule's line from shapes: names for dims, equal blocks within a dim, and which inputs may be Partial.

A dim of N elements that an op reads in runs starting and ending at multiples of g is `(p! g)`: p = N / g blocks that
stay whole as a sequence, each of g elements that may be split alike. The g of several such dims is one letter, so a
fused q,k,v split, `chunk` or a concatenation of halves leaves every piece split in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.graph.graph import Op, Tensor
from autopar.rules.grammar import Line


def names(shape: Sequence[int], prefix: str = "d", mark: str = "") -> list[str]:
    """One letter a dim; a dim of size one is `1`. An empty tensor stays whole: there is nothing to split."""
    mark += "!" if 0 in shape else ""
    return ["1" if n == 1 else f"{prefix}{i}{mark}" for i, n in enumerate(shape)]


def operand(dims: Iterable[str]) -> str:
    """A 0-d operand is an optional one with no dims: an empty text would read as no operand at all."""
    return " ".join(dims) or "?"


def write(
    inputs: Iterable[Iterable[str]],
    outputs: Iterable[Iterable[str] | None],
    linear: str = "",
    kind: str = "cheap",
    sizes: dict[str, int] | None = None,
) -> Line:
    left = ", ".join(operand(d) for d in inputs)
    right = ", ".join("-" if d is None else " ".join(d) for d in outputs)
    return Line(f"{left} -> {right}", linear, kind, sizes or {})


def aligned(shape: Sequence[int], to: Sequence[int], dims: Sequence[str]) -> list[str]:
    """The letters of a tensor that broadcasts to shape `to` with letters `dims`."""
    start = len(to) - len(shape)
    return ["1" if n == 1 else dims[start + i] for i, n in enumerate(shape)]


def block(n: int, g: int, letter: str, outer: str) -> str:
    """A dim of n as n / g blocks of `letter`."""
    if g <= 1:
        return f"{outer}!"
    return letter if n == g else f"({outer}! {letter})"


def block_size(*runs: int) -> int:
    """The largest block that all runs and starts are multiples of."""
    return math.gcd(*runs)


def dim_of(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def linear_in(op: Op, sets: str) -> str:
    """`sets` without those that name a bool: a sum of bools is no bool."""
    inputs = op.inputs
    kept = []
    for alternative in filter(None, sets.split("|")):
        at = [int(i) for i in alternative.split("&")]
        if all(i < len(inputs) and inputs[i].dtype != "bool" for i in at):
            kept.append(alternative)
    return "|".join(kept)


def all_inputs(op: Op) -> str:
    """Every tensor input together, as where a cat or a stack is Partial."""
    return linear_in(op, "&".join(str(i) for i in range(len(op.inputs))))


def is_float(t: Tensor) -> bool:
    return t.dtype.startswith(("float", "bfloat", "complex"))


def present(outputs: Sequence[Tensor | None]) -> list[Tensor]:
    return [o for o in outputs if o is not None]
