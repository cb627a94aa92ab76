"""Convolutions, pools and resampling. Spatial dims stay whole: splitting them would need a halo of the neighbours' pixels.

convolution, g groups     n (g i) s!, (g o) i k!, (g o)? -> n (g o) t!         i summed; the bias then counts once
its backward              dx is a sum over o, dW and db over n; db does not depend on i and so is whole if i is split
pools, resampling         n c s! -> n c t!
"""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import names, write


def _weight(w: Tensor, transposed: bool) -> list[str]:
    return (["(g i)", "o"] if transposed else ["(g o)", "i"]) + names(w.shape[2:], "k", "!")


@rule("aten.convolution.default")
def _convolution(op: Op) -> Line:
    x, w, bias = op.args[:3]
    left = [["n", "(g i+)", *names(x.shape[2:], "s", "!")], _weight(w, op.args[6])]
    if isinstance(bias, Tensor):
        left.append(["(g o)"])
    right = [["n", "(g o)", *names(op.out.shape[2:], "t", "!")]]
    linear = "0&2|1&2" if isinstance(bias, Tensor) else "0|1"
    return write(left, right, linear, "conv", {"g": op.args[8]})


@rule("aten.convolution_backward.default")
def _convolution_backward(op: Op) -> Line:
    grad, x, w = op.args[:3]
    data = ["n", "(g i)", *names(x.shape[2:], "s", "!")]
    weight = _weight(w, op.args[7])
    left = [["n+", "(g o+)", *names(grad.shape[2:], "t", "!")], data, weight]
    right = [d if wanted else None for d, wanted in zip([data, weight, ["(g o)"]], op.args[10], strict=True)]
    # The mark goes where i stands first: it is missing from the bias gradient alone.
    left[1] = ["n", "(g i:all)", *data[2:]]
    return write(left, right, "0", "conv", {"g": op.args[9]})


_AVERAGES = ("avg_pool{}d", "_adaptive_avg_pool{}d")
_MAXIMA = ("max_pool{}d_with_indices", "adaptive_max_pool{}d")
_PADS = ("reflection_pad{}d", "replication_pad{}d")
RESAMPLINGS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip


def _planes(t: Tensor, whole: int, letter: str) -> list[str]:
    """Letters of a tensor whose last `whole` dims may not be split."""
    lead = len(t.shape) - whole
    return names(t.shape[:lead], "n") + names(t.shape[lead:], letter, "!")


def _dims(op: Op) -> int:
    """1, 2 or 3: the spatial dims, from a name such as aten.avg_pool2d_backward.default."""
    return next(n for n in (1, 2, 3) if f"{n}d" in op.target)


def _names(*groups: tuple[str, ...], dims: tuple[int, ...] = (2, 3), suffix: str = ".default") -> list[str]:
    return [f"aten.{name.format(n)}{suffix}" for group in groups for name in group for n in dims]


@rule(*_names(_AVERAGES), *_names(_PADS, dims=(1, 2, 3)), *(f"aten.{n}.{o}" for n in RESAMPLINGS for o in ("default", "vec")))
def _resample(op: Op) -> Line:
    k = _dims(op)
    return write([_planes(op.inputs[0], k, "s")], [_planes(op.out, k, "t")], linear="0")


@rule(*_names(_MAXIMA))
def _maximum(op: Op) -> Line:
    k = _dims(op)
    return write([_planes(op.inputs[0], k, "s")], [_planes(op.out, k, "t")] * 2)


@rule(
    *_names(_AVERAGES, _MAXIMA, suffix="_backward.default"), *_names(_PADS, dims=(1, 2, 3), suffix="_backward.default"),
    *(f"aten.{n}_backward.default" for n in RESAMPLINGS),
)  # fmt: skip
def _resample_backward(op: Op) -> Line:
    """Operands: the output's gradient, then (not for resampling) the input, then (for maxima) the output's indices."""
    k = _dims(op)
    grad, x = _planes(op.inputs[0], k, "t"), _planes(op.out, k, "s")
    return write([grad, x, grad][: len(op.inputs)], [x], linear="0")


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def _grid_sampler(op: Op) -> Line:
    x = op.args[0]
    out = names(op.out.shape[2:], "t", "!")
    return write([["n", "c", *names(x.shape[2:], "s", "!")], ["n", *out, "p!"]], [["n", "c", *out]], linear="0")


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def _grid_sampler_backward(op: Op) -> Line:
    """The grid's gradient is a sum over channels."""
    grad, x = op.args[:2]
    out, data = names(grad.shape[2:], "t", "!"), ["n", "c+", *names(x.shape[2:], "s", "!")]
    right = [d if t is not None else None for t, d in zip(op.outputs, [data, ["n", *out, "p!"]], strict=True)]
    return write([["n", "c+", *out], data, ["n", *out, "p!"]], right, linear="0")


@rule("aten.pixel_shuffle.default")
def _pixel_shuffle(op: Op) -> Line:
    lead = names(op.out.shape[:-3], "n")
    r = op.args[1]
    return write([[*lead, "(c u! v!)", "h", "w"]], [[*lead, "c", "(h u!)", "(w v!)"]], "0", "view", {"u": r, "v": r})


@rule("aten.pixel_unshuffle.default")
def _pixel_unshuffle(op: Op) -> Line:
    lead = names(op.out.shape[:-3], "n")
    r = op.args[1]
    return write([[*lead, "c", "(h u!)", "(w v!)"]], [[*lead, "(c u! v!)", "h", "w"]], "0", "view", {"u": r, "v": r})
