"""Lookups and scatters: ops that read or write where an index tensor says.

A dim that is indexed may be split: a rank reads the rows it owns and gives zero for the others, so a lookup is a sum over
the ranks (`^+`); a rank writes the rows it owns and drops the others (`^`). The dims of the index are loops of the output
in a lookup; in a scatter that accumulates they are summed (`+`), each rank scattering its share, and the tensor that is
accumulated on counts once; in a scatter that overwrites they stay whole, or the order of writes would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, linear_in, names, write

T = TypeVar("T")


@rule("aten.embedding.default")
def _embedding(op: Op) -> Line:
    rows = names(op.inputs[1].shape)
    return write([["v^+", "e"], rows], [[*rows, "e"]], "0", "embedding")


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(op: Op) -> Line:
    """Scaling by frequency divides by counts over the whole batch."""
    scaled = bool(op.arg(4, "scale_grad_by_freq", False))
    rows = names(op.inputs[1].shape, mark="!" if scaled else "+")
    return write([[*rows, "e"], rows], [["v!" if scaled else "v^", "e"]], "0", "embedding")


@rule("aten._embedding_bag.default", "aten._embedding_bag_backward.default")
def _embedding_bag(op: Op) -> Line:
    """Features by themselves; positions and sizes of bags have none. (Most bags are captured as other operators: `capture_bags`.)"""
    backward = op.target.startswith("aten._embedding_bag_backward")

    def dims(at: int, t: Tensor | None) -> list[str]:
        assert t is not None
        return [*(f"x{at}_{i}!" for i in range(len(t.shape) - 1)), "e:all"] if len(t.shape) == 2 else [f"x{at}_0!"]

    inputs = [dims(i, t) for i, t in enumerate(op.inputs)]
    outputs = [dims(len(inputs) + i, t) for i, t in enumerate(op.outputs)]
    return write(inputs, outputs, linear_in(op, "0") if backward else "", "embedding")


def _looked_up(x: Tensor) -> str:
    """Bools have no sum."""
    return "x!" if x.dtype == "bool" else "x^+"


@rule("aten.gather.default")
def _gather(op: Op) -> Line:
    x, index = op.inputs
    if not x.shape:
        return write([[], ["1"] * len(index.shape)], [["1"] * len(index.shape)])
    dim = op.args[1] % len(x.shape)
    own, j = _shared(x.shape, index.shape, dim)
    own[dim] = _looked_up(x)
    return write([own, j], [j], linear_in(op, "0"))


def _shared(shape: Sequence[int], index: Sequence[int], dim: int, mark: str = "") -> tuple[list[str], list[str]]:
    """Letters of a tensor and of an index along `dim` of it, with `mark` there.

    In another dim the index may be smaller and touch the first part only: then both stay whole.
    """
    own, j = [], []
    for i, (n, m) in enumerate(zip(shape, index, strict=True)):
        same = n == m or i == dim
        own.append(f"j{i}" if same else f"x{i}!")
        j.append("1" if m == 1 else f"j{i}{mark if i == dim else ''}" if same else f"j{i}!")
    return own, j


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def _scatter(op: Op) -> Line:
    x, index, *src = op.inputs
    if not x.shape or not index.shape:
        return write([["1"] * len(t.shape) for t in op.inputs], [[]])
    dim = op.args[1] % len(x.shape)
    adds = op.target == "aten.scatter_add.default"
    whole, j = _shared(x.shape, index.shape, dim, "+" if adds else "!")
    whole[dim] = "x^"
    sources = []
    for s in src:
        # Of a larger source the index takes the first part: neither may be split there.
        j = [a if n == m or a == "1" else f"{a}!" for n, m, a in zip(s.shape, index.shape, j, strict=True)]
        sources.append([a if n == m else f"z{i}!" for i, (n, m, a) in enumerate(zip(s.shape, index.shape, j, strict=True))])
    linear = "0&2" if src else "0" if op.arg(3, "value") == 0 else ""
    return write([whole, j, *sources], [whole], linear_in(op, linear))


@rule("aten.index_select.default")
def _index_select(op: Op) -> Line:
    x, index = op.inputs
    if not x.shape:
        return write([[], ["1"] * len(index.shape)], [[]])
    dim = op.args[1] % len(x.shape)
    own, out = names(x.shape), names(x.shape)
    own[dim], out[dim] = _looked_up(x), "j"
    return write([own, ["j"] * len(index.shape)], [out], linear_in(op, "0"))


@rule("aten.index_add.default")
def _index_add(op: Op) -> Line:
    x, index, src = op.inputs
    if not x.shape or not src.shape:
        return write([["1"] * len(t.shape) for t in op.inputs], [[]])
    dim = op.args[1] % len(x.shape)
    own, part = names(x.shape), names(x.shape)
    own[dim], part[dim] = "x^", "j+"
    return write([own, ["j+"] * len(index.shape), part], [own], linear_in(op, "0&2"))


def layout(op: Op) -> tuple[list[int], tuple[int, ...], list[int | None]]:
    """Of `x[indices]`: the dims indexed, the shape the indices broadcast to, and the dims of the result, each a dim of
    x or None for one of the indices'.

    Indices that stand side by side leave their dims where they stood; otherwise these come first.
    """
    x, indices = op.inputs[0], op.args[1]
    at = [i for i, t in enumerate(indices) if t is not None]
    shapes = [indices[i].shape for i in at]
    ndim = max(len(s) for s in shapes)
    shape = tuple(max((s[len(s) - ndim + i] for s in shapes if len(s) - ndim + i >= 0), key=lambda n: (n != 1, n)) for i in range(ndim))
    return at, shape, placed(at, len(x.shape), [None] * ndim)


def placed(at: Sequence[int], ndim: int, of_indices: Sequence[T]) -> list[int | T]:
    """Dims of a lookup by dims `at` of `ndim`, in order: those that are left, by number, and in one place those of the indices."""
    rest = [i for i in range(ndim) if i not in at]
    first = at[0] if at[-1] - at[0] + 1 == len(at) else 0
    return [*rest[:first], *of_indices, *rest[first:]]


def _index_dims(op: Op, own: str, index: str) -> tuple[list[str], list[str], list[str], tuple[int, ...]] | None:
    """Letters of x, of the broadcast indices and of `x[indices]`, whose shape is the last."""
    x, indices = op.inputs[0], [t for t in op.args[1] if t is not None]
    if any(t.dtype in ("bool", "uint8") for t in indices) or not indices:
        return None
    at, shape, order = layout(op)
    dims = [f"x{i}{own}" if i in at else a for i, a in enumerate(names(x.shape))]
    js = names(shape, "j", index)
    each = iter(js)
    result = [next(each) if i is None else dims[i] for i in order]
    sizes = iter(shape)
    return dims, js, result, tuple(next(sizes) if i is None else x.shape[i] for i in order)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(op: Op) -> Line | None:
    found = _index_dims(op, "!" if op.inputs[0].dtype == "bool" else "^+", "")
    if found is None:
        return None
    dims, js, result, _ = found
    indices = [t for t in op.args[1] if t is not None]
    shape = layout(op)[1]
    return write([dims, *(aligned(t.shape, shape, js) for t in indices)], [result], linear_in(op, "0"))


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(op: Op) -> Line | None:
    adds = bool(op.arg(3, "accumulate", False))
    indices = [t for t in op.args[1] if t is not None]
    values = op.inputs[-1]
    if len(indices) == 1 and indices[0].dtype == "bool":
        return _masked_put(op, indices[0], values)
    found = _index_dims(op, "^", "+" if adds else "!")
    if found is None:
        return None
    dims, js, result, full = found
    shape = layout(op)[1]
    each = [aligned(t.shape, shape, js) for t in indices]
    return write([dims, *each, aligned(values.shape, full, result)], [dims], linear_in(op, f"0&{len(indices) + 1}"))


def _masked_put(op: Op, mask: Tensor, values: Tensor) -> Line | None:
    """x[mask] = one value: pointwise."""
    if values.numel != 1:
        return None
    first = next(i for i, t in enumerate(op.args[1]) if t is not None)
    dims = names(op.out.shape)
    return write([dims, dims[first : first + len(mask.shape)], ["1"] * len(values.shape)], [dims])


@rule("aten.bucketize.Tensor", "aten.searchsorted.Tensor")
def _bucketize(op: Op) -> Line | None:
    """Each value by itself against all boundaries; rows of boundaries go with rows of values."""
    boundaries, values = (op.inputs[1], op.inputs[0]) if "bucketize" in op.target else op.inputs[:2]
    if len(op.inputs) > 2:
        return None
    dims = names(values.shape)
    edges = [*(dims[:-1] if len(boundaries.shape) > 1 else []), "x!"]
    return write([dims, edges] if "bucketize" in op.target else [edges, dims], [dims])
