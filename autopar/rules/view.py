"""Views and copies that rearrange: which digits of the output are which digits of the input.

A reshape keeps the row-major order, so a factor that both shapes have at the same place is one letter. From the left,
the major digits of the first unfinished dims are common as far as their gcd goes; likewise from the right; what is
left in between has no common digits and stays whole:

    [b s d]   -> [(b s) d]           b s d -> (b s) d
    [6 4]     -> [4 6]               (a x!) (y! c) -> (a z!) (w! c), a = c = 2

Slices, splits, cats and pads work in equal blocks (see `letters.block`). All of these are linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, all_inputs, block, block_size, linear_in, names, present, write


def view_dims(ins: Sequence[int], outs: Sequence[int]) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of a reshape from `ins` to `outs` and the sizes of their letters."""
    if 0 in ins:
        return names(ins, "x", "!"), names(outs, "y", "!"), {}
    rest = (list(ins), list(outs))
    major: tuple[list[list[str]], list[list[str]]] = ([[] for _ in ins], [[] for _ in outs])
    minor: tuple[list[list[str]], list[list[str]]] = ([[] for _ in ins], [[] for _ in outs])
    sizes: dict[str, int] = {}
    for letters, order in ((major, 1), (minor, -1)):
        while True:
            at = [next((i for i in range(len(r))[::order] if r[i] > 1), None) for r in rest]
            if at[0] is None or at[1] is None:
                break
            common = math.gcd(rest[0][at[0]], rest[1][at[1]])
            if common == 1:
                break
            x = f"v{len(sizes)}"
            sizes[x] = common
            for side in (0, 1):
                i = at[side]
                assert i is not None
                rest[side][i] //= common
                letters[side][i].insert(len(letters[side][i]) if order > 0 else 0, x)
    dims: tuple[list[str], list[str]] = ([], [])
    for side, prefix in ((0, "x"), (1, "y")):
        for i, left in enumerate(rest[side]):
            here = [*major[side][i], *([f"{prefix}{i}!"] if left > 1 else []), *minor[side][i]]
            if left > 1:
                sizes[f"{prefix}{i}"] = left
            dims[side].append("1" if not here else here[0] if len(here) == 1 else f"({' '.join(here)})")
    return dims[0], dims[1], sizes


@rule(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default",
)  # fmt: skip
def _reshape(op: Op) -> Line:
    ins, outs, sizes = view_dims(op.inputs[0].shape, op.out.shape)
    return write([ins], [outs], linear_in(op, "0"), "view", sizes)


def _permuted(op: Op, order: Sequence[int]) -> Line:
    dims = names(op.inputs[0].shape)
    return write([dims], [[dims[i] for i in order]], linear_in(op, "0"), "view")


@rule("aten.t.default")
def _t(op: Op) -> Line:
    return _permuted(op, range(len(op.out.shape))[::-1])


@rule("aten.transpose.int")
def _transpose(op: Op) -> Line:
    n = len(op.out.shape)
    order = list(range(n))
    if n:
        i, j = op.args[1] % n, op.args[2] % n
        order[i], order[j] = j, i
    return _permuted(op, order)


@rule("aten.permute.default")
def _permute(op: Op) -> Line:
    n = len(op.out.shape)
    return _permuted(op, [i % n for i in op.args[1]])


@rule("aten.expand.default")
def _expand(op: Op) -> Line:
    out = op.out.shape
    dims = names(out)
    return write([aligned(op.inputs[0].shape, out, dims)], [dims], linear_in(op, "0"), "view")


@rule("aten.repeat.default")
def _repeat(op: Op) -> Line:
    """A dim repeated r times is `(r n)`, both of which may be split."""
    x, out = op.inputs[0].shape, op.out.shape
    new = len(out) - len(x)
    inner = names(x, "n")
    outer, sizes = names(out[:new], "r"), {}
    for i, (n, m) in enumerate(zip(x, out[new:], strict=True), new):
        if n == m:
            outer.append(inner[i - new])
        elif n <= 1 or not m:
            outer.append(f"r{i}" if n else "1")
        else:
            sizes[f"r{i}"] = m // n
            outer.append(f"(r{i} {inner[i - new]})")
    return write([inner], [outer], linear_in(op, "0"), "view", sizes)


def _along(op: Op, shape: Sequence[int], dim: int, mark: str = "!") -> list[str]:
    """Letters of `shape`, that of `dim` with a mark of its own."""
    dims = names(shape)
    dims[dim] = f"x{mark}"
    return dims


def _with(dims: list[str], dim: int, text: str) -> list[str]:
    return [*dims[:dim], text, *dims[dim + 1 :]]


def bounds(op: Op, whole: int, at: int) -> tuple[int, int]:
    """Start and step of a slice of a dim of `whole` whose dim, start, end, step begin at argument `at`."""
    start, step = op.arg(at + 1, "start"), op.arg(at + 3, "step", 1)
    start = 0 if start is None else start
    return min(max(start + whole if start < 0 else start, 0), whole), step


def _slice_dims(op: Op, whole: Sequence[int], part: Sequence[int], at: int) -> tuple[list[str], list[str], dict[str, int]]:
    """Letters of the whole and of its slice."""
    dim = op.arg(at, "dim", 0) % len(whole)
    start, step = bounds(op, whole[dim], at)
    n, m = whole[dim], part[dim]
    # Named by the whole: a slice of one element is a dim of size one there, but no `1` in the whole.
    dims = names(whole)
    if m and step > 1 and n == m * step:
        return _with(dims, dim, "(g s!)"), _with(dims, dim, "g"), {"g": m}
    g = block_size(n, start, m) if step == 1 and m else 1
    return _with(dims, dim, block(n, g, "g", "p")), _with(dims, dim, block(m, g, "g", "q")), {"g": g}


@rule("aten.slice.Tensor")
def _slice(op: Op) -> Line:
    whole, part, sizes = _slice_dims(op, op.inputs[0].shape, op.out.shape, 1)
    return write([whole], [part], linear_in(op, "0"), "view", sizes)


@rule("aten.slice_backward.default")
def _slice_backward(op: Op) -> Line:
    whole, part, sizes = _slice_dims(op, op.out.shape, op.inputs[0].shape, 2)
    return write([part], [whole], linear_in(op, "0"), "view", sizes)


@rule("aten.slice_scatter.default")
def _slice_scatter(op: Op) -> Line:
    whole, part, sizes = _slice_dims(op, op.out.shape, op.inputs[1].shape, 2)
    return write([whole, part], [whole], linear_in(op, "0&1"), "view", sizes)


@rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split(op: Op) -> Line:
    x = op.inputs[0].shape
    dim = op.arg(2, "dim", 0) % len(x)
    parts = [o.shape[dim] for o in present(op.outputs)]
    g = block_size(x[dim], *parts)
    dims = names(x)
    outs = [_with(dims, dim, block(n, g, "g", f"q{i}")) for i, n in enumerate(parts)]
    return write([_with(dims, dim, block(x[dim], g, "g", "p"))], outs, linear_in(op, "0"), "view", {"g": g})


@rule("aten.cat.default")
def _cat(op: Op) -> Line:
    out = op.out.shape
    dim = op.arg(1, "dim", 0) % len(out)
    dims = names(out)
    # An empty 1-d tensor is skipped by cat whatever the others' dims.
    parts = [None if t.shape == (0,) != out else t.shape[dim] for t in op.inputs]
    g = block_size(out[dim], *(n for n in parts if n))
    ins = [["1"] if n is None else _with(dims, dim, block(n, g, "g", f"q{i}")) for i, n in enumerate(parts)]
    return write(ins, [_with(dims, dim, block(out[dim], g, "g", "p"))], all_inputs(op), "view", {"g": g})


@rule("aten.stack.default")
def _stack(op: Op) -> Line:
    out = op.out.shape
    dim = op.arg(1, "dim", 0) % len(out)
    dims = _along(op, out, dim)
    return write([dims[:dim] + dims[dim + 1 :]] * len(op.inputs), [dims], all_inputs(op), "view")


@rule("aten.unbind.int")
def _unbind(op: Op) -> Line:
    dim = op.arg(1, "dim", 0) % len(op.inputs[0].shape)
    dims = _along(op, op.inputs[0].shape, dim)
    return write([dims], [dims[:dim] + dims[dim + 1 :]] * len(op.outputs), linear_in(op, "0"), "view")


@rule("aten.select.int")
def _select(op: Op) -> Line:
    """The rank that has the element gives it, the others give zero: split, the output is a sum."""
    x = op.inputs[0]
    dim = op.args[1] % len(x.shape)
    dims = _along(op, x.shape, dim, "!" if x.dtype == "bool" else "^+")
    return write([dims], [dims[:dim] + dims[dim + 1 :]], linear_in(op, "0"), "view")


@rule("aten.select_backward.default", "aten.select_scatter.default")
def _select_scatter(op: Op) -> Line:
    scatter = op.target == "aten.select_scatter.default"
    dim = op.args[2] % len(op.out.shape)
    dims = _along(op, op.out.shape, dim, "^")
    part = dims[:dim] + dims[dim + 1 :]
    return write([dims, part] if scatter else [part], [dims], linear_in(op, "0&1" if scatter else "0"), "view")


@rule("aten.constant_pad_nd.default")
def _pad(op: Op) -> Line:
    x, out, pad = op.inputs[0].shape, op.out.shape, op.args[1]
    ins, outs = names(x), names(x)
    sizes = {}
    for k in range(len(pad) // 2):
        i = len(x) - 1 - k
        if x[i] != out[i] or pad[2 * k]:
            g = block_size(x[i], out[i], pad[2 * k])
            sizes[f"g{i}"] = g
            ins[i], outs[i] = block(x[i], g, f"g{i}", f"p{i}"), block(out[i], g, f"g{i}", f"q{i}")
    linear = linear_in(op, "0") if not op.arg(2, "value", 0) else ""
    return write([ins], [outs], linear, "view", sizes)


@rule("aten.flip.default")
def _flip(op: Op) -> Line:
    dims = names(op.out.shape)
    for d in op.args[1]:
        dims[d] += "!" if op.out.shape[d] > 1 else ""
    return write([dims], [dims], linear_in(op, "0"), "view")


@rule("aten.roll.default")
def _roll(op: Op) -> Line:
    x = op.out.shape
    along = [d % len(x) for d in op.arg(2, "dims", [])]
    dims = names(x, "d", "" if along else "!")
    sizes: dict[str, int] = {}
    for i, by in zip(along, op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[1]], strict=False):
        g = block_size(sizes.get(f"g{i}", x[i]), by)
        sizes[f"g{i}"] = g
        dims[i] = block(x[i], g, f"g{i}", f"p{i}")
    return write([dims], [dims], linear_in(op, "0"), "view", sizes)


@rule("aten.unfold.default", "aten.unfold_backward.default")
def _unfold(op: Op) -> Line:
    """Windows of a dim, which become a last dim. Windows side by side are a reshape: `(m s) -> m s`."""
    backward = op.target == "aten.unfold_backward.default"
    whole, parts = (op.out.shape, op.inputs[0].shape) if backward else (op.inputs[0].shape, op.out.shape)
    if not whole:
        return write([["1"] * len(parts) if backward else []], [[] if backward else ["1"] * len(parts)], "0", "view")
    dim, size, step = (op.args[2] % len(whole), *op.args[3:5]) if backward else (op.args[1] % len(whole), *op.args[2:4])
    dims = names(whole)
    if size == step and whole[dim] % step == 0:
        a, b = _with(dims, dim, "(m s!)"), [*_with(dims, dim, "m"), "s!"]
    else:
        a, b = _with(dims, dim, "x!"), [*_with(dims, dim, "m!"), "s!"]
    sizes = {"m": parts[dim], "s": size}
    return write([b if backward else a], [a if backward else b], linear_in(op, "0"), "view", sizes)


@rule("aten.diagonal.default", "aten.diagonal_backward.default")
def _diagonal(op: Op) -> Line:
    backward = op.target == "aten.diagonal_backward.default"
    whole = op.out.shape if backward else op.inputs[0].shape
    at = 2 if backward else 1
    gone = {op.arg(at + 1, "dim1", 0) % len(whole), op.arg(at + 2, "dim2", 1) % len(whole)}
    a = [f"x{i}!" if i in gone else x for i, x in enumerate(names(whole))]
    b = [x for i, x in enumerate(a) if i not in gone] + ["z!"]
    return write([b if backward else a], [a if backward else b], linear_in(op, "0"), "view")


@rule("aten.diagonal_scatter.default")
def _diagonal_scatter(op: Op) -> Line:
    whole = op.out.shape
    gone = {op.arg(3, "dim1", 0) % len(whole), op.arg(4, "dim2", 1) % len(whole)}
    a = [f"x{i}!" if i in gone else x for i, x in enumerate(names(whole))]
    return write([a, [x for i, x in enumerate(a) if i not in gone] + ["z!"]], [a], linear_in(op, "0&1"), "view")


@rule("aten.view_as_real.default")
def _view_as_real(op: Op) -> Line:
    dims = names(op.inputs[0].shape)
    return write([dims], [[*dims, "c!"]], "0", "view")


@rule("aten.view_as_complex.default")
def _view_as_complex(op: Op) -> Line:
    dims = names(op.out.shape)
    return write([[*dims, "c!"]], [dims], "0", "view")


@rule("aten.im2col.default", "aten.col2im.default")
def _im2col(op: Op) -> Line:
    """Patches of an image as columns, `n (c k!) l!`; col2im is the transpose."""
    forward = op.target == "aten.im2col.default"
    image = op.inputs[0] if forward else op.out
    lead = ["n"] if len(image.shape) == 4 else []
    a, b = [*lead, "c", "h!", "w!"], [*lead, "(c k!)", "l!"]
    return write([a if forward else b], [b if forward else a], "0", "view", {"c": image.shape[-3]})


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def strided_prefix(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> int:
    """How many leading dims `as_strided` leaves as they are, its window of the other dims staying inside each.

    x counts as contiguous: strides are no part of a tensor's description.
    """
    if offset:
        return 0
    whole = contiguous_strides(x.shape)
    for k in range(min(len(size), len(x.shape)), 0, -1):
        reach = sum((n - 1) * s for n, s in zip(size[k:], stride[k:], strict=True)) + 1
        if tuple(size[:k]) == x.shape[:k] and list(stride[:k]) == whole[:k] and reach <= whole[k - 1]:
            return k
    return 0


@rule("aten.as_strided.default")
def _as_strided(op: Op) -> Line:
    x = op.inputs[0]
    k = strided_prefix(x, op.args[1], op.args[2], op.arg(3, "storage_offset"))
    lead = names(x.shape)[:k]
    return write([lead + names(x.shape, "x", "!")[k:]], [lead + names(op.out.shape, "y", "!")[k:]], linear_in(op, "0"), "view")


@rule("aten.as_strided_scatter.default")
def _as_strided_scatter(op: Op) -> Line:
    x, src = op.inputs
    k = strided_prefix(x, op.args[2], op.args[3], op.arg(4, "storage_offset"))
    lead = names(x.shape)[:k]
    whole = lead + names(x.shape, "x", "!")[k:]
    return write([whole, lead + names(src.shape, "y", "!")[k:]], [whole], linear_in(op, "0&1"), "view")
