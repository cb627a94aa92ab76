"""The language of op rules: one einsum-like line that names an op's loop dims ("factors").

    aten.mm                  m k+, k+ n -> m n
    aten.native_layer_norm   ... h!, h!, h! -> ... h!, ... 1, ... 1

Operands are separated by commas, dims by blanks. Two dims share a letter when they are the same loop.
Marks stand behind a letter, anywhere it occurs:
    +            absent from an output, it is summed: splitting it leaves that output Partial(sum)
    :max :min    likewise, reduced by max / min
    :all         absent from an output, that output is whole all the same: the local lowering reduces it itself
    !            may not be split
    ^            the op reads indices along it: splitting needs the rank's offset (a local lowering in passes/local)
A letter absent from some output and without a mark that says how it reduces may not be split.
`(h d)` is a composite dim, h major; `1` a dim of size one (or one that is no loop); `...` any further dims, equal in
all operands, aligned to the right; `-` an output that is not a tensor; `?` behind an operand: it may be missing.

From the line follow which splits are legal, what every operand must look like, and the FLOPs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.graph.graph import Op

Dim = tuple[str, ...]  # letters, major first; () is a `1`


@dataclass(frozen=True)
class Factor:
    """A loop: size, how it reduces where an output lacks it (None: not at all), whether it may be split (a loop without a turn may not)."""

    name: str
    size: int
    reduce: str | None
    split: bool
    index: bool = False


@dataclass(frozen=True)
class Rule:
    """What one op call allows.

    inputs/outputs: per tensor operand, per dim, the letters; None for an output that is no tensor.
    linear: sets of input positions; if exactly those inputs are Partial(sum) over an axis and the op is not split on it,
    the outputs are Partial(sum) over it too.
    pairs: letter -> another one that it takes along: an axis on it splits both, itself whole and the other at the strategy's stride, whichever that is (what
    is split into experts, and the tokens beside them).
    alongside: letter -> another one of its size that it takes along: an axis on it splits both, at one stride (keys and queries that attention has of a sequence).
    kind: "matmul" | "attention" | "conv" | "norm" | "embedding" | "loss" | "moe" | "random" | "view" | "cheap".
    """

    factors: Mapping[str, Factor]
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...] | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    kind: str = "cheap"
    is_fallback: bool = False
    pairs: Mapping[str, str] = field(default_factory=dict)
    alongside: Mapping[str, str] = field(default_factory=dict)

    @property
    def taken(self) -> Mapping[str, str]:
        """Letter -> the one that it takes along, either way. Such a letter is a strategy of its own: it follows from no placement."""
        return {**self.pairs, **self.alongside}

    @property
    def is_heavy(self) -> bool:
        return self.kind in ("matmul", "attention", "conv", "embedding", "moe")


@dataclass(frozen=True)
class Line:
    """A rule before it is matched to shapes. linear: "0&1|2" = inputs 0 and 1 together, or input 2 alone. pairs, alongside: as a `Rule` has them."""

    text: str
    linear: str = ""
    kind: str = "cheap"
    sizes: Mapping[str, int] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)
    alongside: Mapping[str, str] = field(default_factory=dict)


class RuleError(AssertionError):
    """A line that does not fit its op: a defect in the rule, not in the user's model."""


MOST = 4096  # matches that are kept
_MATCHED: dict[tuple[object, ...], Rule] = {}

_TOKEN = re.compile(r"\(|\)|\.\.\.|[A-Za-z_]\w*(?:\+|!|\^|:max|:min|:all)*|1|-")
_LETTER = re.compile(r"([A-Za-z_]\w*)((?:\+|!|\^|:max|:min|:all)*)$")


def match(line: Line | str, op: Op) -> Rule:
    """Matches a line to the shapes of `op`'s tensors. Layers repeat, so what was found for the same shapes is kept.

    Raises RuleError, naming op and line, where they do not fit.
    """
    if isinstance(line, str):
        line = Line(line)
    shapes = tuple(t.shape for t in op.inputs), tuple(None if t is None else t.shape for t in op.outputs)
    key = line.text, line.linear, line.kind, *(tuple(m.items()) for m in (line.sizes, line.pairs, line.alongside)), shapes
    if key not in _MATCHED:
        if len(_MATCHED) >= MOST:
            _MATCHED.clear()
        _MATCHED[key] = _match(line, op)
    return _MATCHED[key]


def _match(line: Line, op: Op) -> Rule:
    left, right = line.text.split("->")
    operands = [o.strip() for o in left.split(",")] if left.strip() else []
    present = list(op.inputs)
    for i in reversed(range(len(operands))):
        if operands[i].endswith("?"):
            if len(operands) > len(present):
                del operands[i]
            else:
                operands[i] = operands[i][:-1]
    outs = [o.strip() for o in right.split(",")]
    if len(operands) != len(present) or len(outs) != len(op.outputs):
        raise RuleError(f"{op.target} ({op.name}): {line.text!r} does not fit {len(present)} inputs, {len(op.outputs)} outputs")
    marks: dict[str, str] = {}
    sizes: dict[str, int] = dict(line.sizes)
    shapes = [t.shape for t in present] + [t.shape if t is not None else None for t in op.outputs]
    parsed = [_parse(o, marks, None if s is None else len(s), op, line) for o, s in zip(operands + outs, shapes, strict=True)]
    pending = [
        (d, n) for dims, s in zip(parsed, shapes, strict=True) if dims is not None and s is not None for d, n in zip(dims, s, strict=True)
    ]
    _solve(pending, sizes, op, line)
    names = dict.fromkeys(x for dims in parsed if dims is not None for d in dims for x in d)
    inputs, outputs = parsed[: len(operands)], parsed[len(operands) :]
    factors = {}
    for x in names:
        m = marks.get(x, "")
        reduce = "all" if ":all" in m else "sum" if "+" in m else "max" if ":max" in m else "min" if ":min" in m else None
        everywhere = all(o is None or any(x in d for d in o) for o in outputs)
        factors[x] = Factor(x, sizes[x], reduce, sizes[x] > 0 and "!" not in m and (everywhere or reduce is not None), "^" in m)
    linear = tuple(frozenset(int(i) for i in alt.split("&")) for alt in line.linear.split("|") if alt)
    linear = tuple(s for s in linear if max(s) < len(present))
    return Rule(
        factors, tuple(d for d in inputs if d is not None), tuple(outputs), linear, line.kind, pairs=line.pairs, alongside=line.alongside
    )


def _parse(text: str, marks: dict[str, str], ndim: int | None, op: Op, line: Line) -> tuple[Dim, ...] | None:
    if text == "-":
        if ndim is not None:
            raise RuleError(f"{op.target} ({op.name}): {line.text!r} has '-' for a tensor")
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise RuleError(f"{op.target} ({op.name}): cannot read {text!r} in {line.text!r}")
    dims: list[Dim] = []
    group: list[str] | None = None
    dots = -1
    for t in tokens:
        if t == "...":
            dots = len(dims)
        elif t == "(":
            group = []
        elif t == ")":
            assert group is not None
            dims.append(tuple(group))
            group = None
        elif t == "1":
            dims.append(())
        else:
            m = _LETTER.match(t)
            assert m is not None
            marks[m[1]] = marks.get(m[1], "") + m[2]
            if group is None:
                dims.append((m[1],))
            else:
                group.append(m[1])
    if ndim is None:
        raise RuleError(f"{op.target} ({op.name}): {line.text!r} has dims for an output that is no tensor")
    if dots >= 0:
        extra = ndim - len(dims)
        dims[dots:dots] = [(f"_{extra - i}",) for i in range(extra)]
    if len(dims) != ndim:
        raise RuleError(f"{op.target} ({op.name}): {text!r} in {line.text!r} has {len(dims)} dims, the tensor {ndim}")
    return tuple(dims)


def _solve(pending: list[tuple[Dim, int]], sizes: dict[str, int], op: Op, line: Line) -> None:
    """Finds every letter's size; checks that they agree."""
    while pending:
        rest = []
        for d, n in pending:
            known = 1
            unknown = []
            for x in d:
                if x in sizes:
                    known *= sizes[x]
                else:
                    unknown.append(x)
            if len(unknown) == 1 and known and n % known == 0:
                sizes[unknown[0]] = n // known
            elif unknown:
                rest.append((d, n))
            elif known != n and d:
                raise RuleError(f"{op.target} ({op.name}): sizes do not agree in {line.text!r}: {d} is {known}, not {n}")
        if len(rest) == len(pending):
            raise RuleError(f"{op.target} ({op.name}): cannot find the sizes of {rest} in {line.text!r}")
        pending = rest
