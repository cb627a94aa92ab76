"""Sample calls for every op with a rule in pointwise, view, factory, reduction, matmul and index.

Sizes are multiples of 12 where they can be, so that axes of 2, 3 and 4 all split them. `SAMPLES[target]` is a list of
(args, kwargs); the first one has something to split.
"""

# ruff: noqa: SIM905  (names of ops are read more easily as words)

from __future__ import annotations

from typing import Any

import torch

Args = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, list[Args]] = {}
_G = torch.Generator().manual_seed(0)


def add(target: str, *args: Any, **kwargs: Any) -> None:
    SAMPLES.setdefault(target if target.count(".") == 2 else f"{target}.default", []).append((args, kwargs))


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_G)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_G) * 0.8 + 0.1


def ints(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_G)


def bools(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_G) > 0.5


def complexes(*shape: int) -> torch.Tensor:
    return torch.complex(f(*shape), f(*shape))


def permutation(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=_G)


# --- pointwise --------------------------------------------------------------------------------------------------

for name in """
    abs acos angle asin asinh atan ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu
    hardshrink hardsigmoid hardswish hardtanh i0 isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward
    logit mish nan_to_num rad2deg reciprocal relu relu6 round rsqrt sgn sigmoid sign signbit silu sin sinc sinh softplus
    softshrink special_entr special_ndtr sqrt square tan tanh trunc neg positive alias clone detach lift_fresh_copy
    atanh logical_not selu isfinite
""".split():
    add(f"aten.{name}", positive(12, 6))
add("aten.neg", f(12, 4, 3))
add("aten.acosh", positive(12) + 1)
add("aten.bitwise_not", bools(12, 6))
add("aten.bitwise_not", ints(9, 12))
add("aten.threshold", f(12, 6), 0.1, 2.0)
add("aten.clamp", f(12, 6), -0.5, 0.5)
add("aten.clamp.Tensor", f(12, 6), f(6), f(12, 1))
add("aten.clamp_min", f(12, 6), 0.0)
add("aten.clamp_max", f(12, 6), 0.0)
add("aten.clamp_min.Tensor", f(12, 6), f(6))
for name in "add sub mul div rsub maximum minimum atan2 fmax fmin logaddexp hypot copysign pow floor_divide fmod remainder xlogy".split():
    operator = getattr(torch.ops.aten, name)
    overload = next(o for o in ("Tensor", "Tensor_Tensor", "default") if o in operator.overloads())
    add(f"aten.{name}.{overload}", positive(12, 6), positive(12, 6))
    add(f"aten.{name}.{overload}", positive(6, 4), positive(12, 1, 4))
    add(f"aten.{name}.{overload}", positive(12), positive())
    add(f"aten.{name}.{overload}", positive(), positive())
add("aten.add.Tensor", f(12, 6), f(6), alpha=2.5)
add("aten.add.Tensor", f(12, 6), 3.0)
add("aten.sub.Tensor", f(12, 6), 3.0)
add("aten.add.Tensor", ints(9, 12), ints(9, 12))
add("aten.add.Tensor", bools(12), ints(9, 12))
add("aten.mul.Tensor", f(12, 6), 3.0)
add("aten.mul.Tensor", f(12, 6), bools(6))
add("aten.div.Tensor", ints(9, 12), 4)
for name in "eq ne lt le gt ge".split():
    add(f"aten.{name}.Tensor", ints(3, 12, 6), ints(3, 6))
    add(f"aten.{name}.Scalar", ints(3, 12, 6), 1)
for name in "add sub mul div rsub floor_divide pow fmod remainder".split():
    overload = "Tensor_Scalar" if name == "pow" else "Scalar"
    add(f"aten.{name}.{overload}", positive(12, 6), 2.0)
add("aten.pow.Scalar", 2.0, f(12, 6))
add("aten.div.Tensor_mode", f(12, 6), f(6), rounding_mode="floor")
for name in "and or xor".split():
    add(f"aten.bitwise_{name}.Tensor", bools(12, 6), bools(6))
    add(f"aten.bitwise_{name}.Tensor", ints(9, 12, 6), ints(9, 6))
    add(f"aten.bitwise_{name}.Scalar", ints(9, 12, 6), 3)
    add(f"aten.logical_{name}", bools(12, 6), bools(6))
add("aten.where.self", bools(12, 6), f(12, 6), f(12, 1))
add("aten.where.self", bools(12, 1), f(6), f())
add("aten.masked_fill.Scalar", f(12, 6), bools(6), 0)
add("aten.masked_fill.Scalar", f(12, 6), bools(12, 1), -float("inf"))
add("aten.masked_fill.Tensor", f(12, 6), bools(6), f())
add("aten.lerp.Scalar", f(12, 6), f(12, 6), 0.3)
add("aten.lerp.Tensor", f(12, 6), f(12, 6), f(6))
add("aten.addcmul", f(12, 6), f(12, 6), f(6), value=2.0)
add("aten.addcdiv", f(12, 6), f(12, 6), positive(6), value=2.0)
add("aten.fill.Tensor", f(12, 6), f())
add("aten.fill.Scalar", f(12, 6), 2.0)
add("aten.copy", f(12, 6), f(6))
add("aten.copy", f(12, 6), f(12, 6))
add("aten.clone", f(12, 6, 4), memory_format=torch.contiguous_format)
add("aten._to_copy", f(12, 6), dtype=torch.float32)
add("aten._to_copy", f(12, 6), dtype=torch.int64)
add("aten._to_copy", ints(9, 12), dtype=torch.float64)
add("aten._to_copy", bools(12), dtype=torch.float64)
add("prims.convert_element_type", f(12, 6), torch.float32)
add("aten.view.dtype", f(12, 6), torch.int64)
add("aten.polar", positive(12, 6), f(12, 6))
add("aten.complex", f(12, 6), f(12, 6))
add("aten._conj", complexes(12, 6))
add("aten.conj_physical", complexes(12, 6))
add("aten.real", complexes(12, 6))
add("aten.imag", complexes(12, 6))
add("aten.mul.Tensor", complexes(12, 6), complexes(6))
add("aten.gelu", f(12, 6), approximate="tanh")
add("aten.gelu_backward", f(12, 6), f(12, 6), approximate="tanh")
add("aten.gelu_backward", f(12, 6), f(12, 6))
add("aten.silu_backward", f(12, 6), f(12, 6))
add("aten.sigmoid_backward", f(12, 6), f(12, 6))
add("aten.tanh_backward", f(12, 6), f(12, 6))
add("aten.threshold_backward", f(12, 6), f(12, 6), 0)
add("aten.softplus_backward", f(12, 6), f(12, 6), 1.0, 20.0)
add("aten.hardtanh_backward", f(12, 6), f(12, 6), -0.5, 0.5)
add("aten.hardswish_backward", f(12, 6), f(12, 6))
add("aten.hardsigmoid_backward", f(12, 6), f(12, 6))
add("aten.leaky_relu_backward", f(12, 6), f(12, 6), 0.1, False)
add("aten.elu_backward", f(12, 6), 1.0, 1.0, 1.0, False, f(12, 6))
add("aten.mish_backward", f(12, 6), f(12, 6))
add("aten.log_sigmoid_backward", f(12, 6), f(12, 6), positive(12, 6))
add("aten.glu", f(6, 24), -1)
add("aten.glu", f(24, 6), 0)
add("aten.glu_backward", f(6, 12), f(6, 24), -1)
add("aten._weight_norm_interface", f(12, 6, 4), positive(12, 1, 1), 0)
add("aten._weight_norm_interface", f(6, 4, 12), positive(1, 1, 12), 2)
add("aten._weight_norm_interface_backward", f(12, 6, 4), f(12, 6, 4), positive(12, 1, 1), positive(12, 1, 1), 0)

for name in "left right".split():
    add(f"aten.bitwise_{name}_shift.Tensor", ints(9, 12, 6), ints(3, 6))
    add(f"aten.bitwise_{name}_shift.Tensor_Scalar", ints(9, 12, 6), 2)
for name in "gcd lcm".split():
    add(f"aten.{name}", ints(9, 12, 6, low=1), ints(9, 6, low=1))
for name in "heaviside igamma igammac logaddexp2 nextafter special_xlog1py special_zeta".split():
    add(f"aten.{name}", positive(12, 6) + 1, positive(6) + 1)
for name in "lift lift_fresh isneginf isposinf special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri".split():
    add(f"aten.{name}", positive(12, 6))
add("aten.clamp_max.Tensor", f(12, 6), f(6))
add("aten.copysign.Scalar", f(12, 6), -1.0)
add("aten.div.Scalar_mode", f(12, 6), 0.3, rounding_mode="trunc")
add("aten.frexp.Tensor", f(12, 6))
add("aten.hardshrink_backward", f(12, 6), f(12, 6), 0.5)
add("aten.softshrink_backward", f(12, 6), f(12, 6), 0.5)
add("aten.logit_backward", f(12, 6), positive(12, 6))
add("aten.polygamma", 2, positive(12, 6))
add("aten.remainder.Scalar_Tensor", 3.0, positive(12, 6))
add("aten.round.decimals", f(12, 6), decimals=1)
add("aten.xlogy.Scalar_Other", positive(12, 6), 2.0)
add("aten.xlogy.Scalar_Self", 2.0, positive(12, 6))

# --- views ------------------------------------------------------------------------------------------------------

for target in ("aten.view", "aten.reshape", "aten._unsafe_view"):
    add(target, f(12, 4, 6), [48, 6])
    add(target, f(48, 6), [12, 4, 6])
    add(target, f(2, 12, 24), [2, 12, 4, 6])
add("aten.view", f(2, 12, 4, 6), [2, 12, 24])
add("aten.view", f(6, 4), [4, 6])
add("aten.view", f(12, 2), [8, 3])
add("aten.view", f(12, 1, 6), [1, 72])
add("aten.view", f(12, 6), [-1])
add("aten.view", f(1, 1), [])
add("aten.view", f(), [1, 1])
add("aten.view", f(0, 12), [12, 0])
add("aten.view", bools(12, 4), [48])
add("aten.t", f(12, 6))
add("aten.t", f(12))
add("aten.transpose.int", f(12, 4, 6), 1, -1)
add("aten.permute", f(12, 4, 6), [2, 0, -2])
add("aten.unsqueeze", f(12, 6), 1)
add("aten.unsqueeze", f(12, 6), -1)
add("aten.squeeze", f(12, 1, 2, 1))
add("aten.squeeze.dim", f(12, 1, 2), 1)
add("aten.squeeze.dim", f(12, 1, 2), -1)
add("aten.squeeze.dims", f(12, 1, 2, 1), [1, 2, 3])
add("aten.expand", f(12, 1, 6), [12, 4, 6])
add("aten.expand", f(1, 6), [4, 12, -1])
add("aten.expand", f(), [12, 6])
add("aten.slice.Tensor", f(12, 24), 1, 0, 12)
add("aten.slice.Tensor", f(12, 24), -1, 12, 9223372036854775807)
add("aten.slice.Tensor", f(12, 24), 1, -12, -6)
add("aten.slice.Tensor", f(12, 24), 0, 0, 9223372036854775807)
add("aten.slice.Tensor", f(12, 24), 1, 1, 24, 2)
add("aten.slice.Tensor", f(12, 24), 1, 0, 24, 2)
add("aten.slice.Tensor", f(12, 24), 1, 3, 21, 5)
add("aten.slice.Tensor", f(12, 24), 1, 5, 5)
add("aten.slice.Tensor", f(12, 24), 0, 3, 4)
add("aten.slice.Tensor", bools(12, 24), 1, 8, 16)
add("aten.slice_backward", f(12, 12), [12, 24], 1, 0, 12, 1)
add("aten.slice_backward", f(12, 12), [12, 24], 1, 12, 9223372036854775807, 1)
add("aten.slice_backward", f(12, 12), [12, 24], 1, 1, 24, 2)
add("aten.slice_backward", f(12, 5), [12, 24], 1, 3, 8, 1)
add("aten.slice_scatter", f(12, 24), f(12, 12), 1, 12, 24)
add("aten.slice_scatter", f(12, 24), f(12, 12), 1, 0, 24, 2)
add("aten.slice_scatter", f(12, 24), f(2, 24), 0, 1, 3)
add("aten.split.Tensor", f(6, 36), 12, 1)
add("aten.split.Tensor", f(6, 36), 24, -1)
add("aten.split.Tensor", f(6, 7), 3, 1)
add("aten.split_with_sizes", f(36, 6), [12, 24])
add("aten.split_with_sizes", f(6, 48), [24, 12, 12], -1)
add("aten.cat", [f(12, 6), f(12, 6)], -1)
add("aten.cat", [f(12, 6), f(24, 6)])
add("aten.cat", [f(12, 5), f(12, 1), f(12, 2)], 1)
add("aten.cat", [f(0), f(12, 6), f(12, 6)], 1)
add("aten.cat", [ints(9, 12), f(12)])
add("aten.stack", [f(12, 6), f(12, 6), f(12, 6)], 1)
add("aten.stack", [f(12, 6), f(12, 6)], -1)
add("aten._reshape_alias", f(12, 4, 6), [48, 6], [6, 1])
add("aten.split_with_sizes_copy", f(12, 6), [3, 9])
add("aten.unbind.int", f(3, 12, 6))
add("aten.unbind.int", f(12, 2), 1)
add("aten.select.int", f(12, 6, 4), 0, 5)
add("aten.select.int", f(12, 6, 4), 1, -1)
add("aten.select.int", bools(12, 6), 0, 1)
add("aten.select_backward", f(6, 4), [12, 6, 4], 0, 7)
add("aten.select_backward", f(12, 4), [12, 6, 4], 1, -2)
add("aten.select_scatter", f(12, 6, 4), f(6, 4), 0, 7)
add("aten.select_scatter", f(12, 6, 4), f(12, 6), -1, 1)
add("aten.constant_pad_nd", f(12, 6, 12), [0, 12])
add("aten.constant_pad_nd", f(12, 6, 12), [6, -6, 0, 1], 0)
add("aten.constant_pad_nd", f(12, 24), [-12, 12, 3, 0], 1.5)
add("aten.flip", f(12, 6, 4), [1, -1])
add("aten.roll", f(12, 24), [12], [1])
add("aten.roll", f(12, 24, 6), [6, -4], [0, 1])
add("aten.roll", f(12, 24), [5])
add("aten.repeat", f(12, 6), [2, 3])
add("aten.repeat", f(12, 1), [12, 2, 6])
add("aten.repeat", f(6), [4])
add("aten.unfold", f(12, 24), 1, 4, 4)
add("aten.unfold", f(12, 24), 1, 4, 2)
add("aten.unfold_backward", f(12, 6, 4), [12, 24], 1, 4, 4)
add("aten.unfold_backward", f(12, 11, 4), [12, 24], 1, 4, 2)
add("aten.diagonal", f(12, 6, 6), 0, 1, 2)
add("aten.diagonal", f(6, 12, 5), 1, 0, -1)
add("aten.diagonal_backward", f(12, 6), [12, 6, 6], 0, 1, 2)
add("aten.diagonal_scatter", f(12, 6, 6), f(12, 6), 0, 1, 2)
add("aten.diagonal_scatter", f(6, 12, 4), f(12, 3), 1, 0, -1)
add("aten.view_as_real", complexes(12, 6))
add("aten.view_as_complex", f(12, 6, 2))
add("aten.im2col", f(12, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2])
add("aten.im2col", f(4, 6, 6), [3, 3], [1, 1], [1, 1], [1, 1])
add("aten.col2im", f(12, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])
add("aten.as_strided", f(12, 6, 4), [12, 11, 4], [24, 2, 1])
add("aten.as_strided", f(12, 6, 4), [12, 6, 2, 2], [24, 4, 2, 1])
add("aten.as_strided", f(12, 6), [4, 3], [6, 1], 2)
add("aten.as_strided_scatter", f(12, 6, 4), f(12, 3, 4), [12, 3, 4], [24, 8, 1])
add("aten.as_strided_scatter", f(12, 6), f(4, 3), [4, 3], [6, 1], 2)

# --- factories --------------------------------------------------------------------------------------------------

CPU = {"device": torch.device("cpu")}
F64 = {"dtype": torch.float64, **CPU}
add("aten.arange", 12, **CPU)
add("aten.arange", 12, **F64)
add("aten.arange.start", 3, 27, **CPU)
add("aten.arange.start_step", 3, 51, 4, **CPU)
add("aten.arange.start_step", 0.5, 6.5, 0.5, **F64)
add("aten.arange.start_step", 24, 0, -2, dtype=torch.int32, **CPU)
add("aten.linspace", -1.0, 2.0, 12, **F64)
add("aten.logspace", 0.0, 2.0, 12, **F64)
add("aten.range.step", 1, 12, **F64)
add("aten.fft_fftfreq", 12, **F64)
add("aten.fft_rfftfreq", 22, 0.5, **F64)
for name in "hann hamming blackman bartlett kaiser".split():
    add(f"aten.{name}_window", 12, **F64)
    add(f"aten.{name}_window.periodic", 12, False, **F64)
add("aten.hamming_window.periodic_alpha", 12, True, 0.5, **F64)
add("aten.hamming_window.periodic_alpha_beta", 12, False, 0.5, 0.4, **F64)
add("aten.kaiser_window.beta", 12, True, 8.0, **F64)
for name in "tril triu".split():
    add(f"aten.{name}_indices", 8, 4, 0 if name == "triu" else -1, **CPU)
    add(f"aten.{name}_indices", 1, 1, **CPU)
add("aten.full", [12, 6], 1.5, **F64)
add("aten.full", [], 1.5, **F64)
add("aten.zeros", [12, 6], **F64)
add("aten.ones", [12, 6], **F64)
add("aten.scalar_tensor", 2.0, **F64)
add("aten.eye", 12, **F64)
add("aten.eye.m", 6, 12, **F64)
for name in "zeros_like ones_like".split():
    add(f"aten.{name}", f(12, 6))
add("aten.full_like", f(12, 6), 2.0)
add("aten.zeros_like", bools(12))
add("aten.new_zeros", f(12, 6), [12, 6])
add("aten.new_zeros", f(12, 6), [24, 6, 2], dtype=torch.int64)
add("aten.new_zeros", f(12, 6), [6])
add("aten.new_ones", f(12, 6), [12, 24])
add("aten.new_full", f(12, 6), [24], 3.0)
add("aten.tril", f(12, 12))
add("aten.tril", f(4, 12, 6), -2)
add("aten.triu", f(12, 12), 1)
add("aten.triu", bools(4, 6, 12), 2)
EMPTY: dict[str, list[Args]] = {
    "aten.empty.memory_format": [(([12, 6],), F64)],
    "aten.empty_permuted.default": [(([12, 6], [1, 0]), F64)],
    "aten.empty_strided.default": [(([12, 6], [1, 12]), F64)],
    "aten.empty_like.default": [((f(12, 6),), {})],
    "aten.new_empty.default": [((f(12, 6), [12, 24]), {})],
    "aten.new_empty_strided.default": [((f(12, 6), [12, 6, 4], [4, 48, 1]), {})],
}

# --- reductions -------------------------------------------------------------------------------------------------

add("aten.sum", f(12, 6))
add("aten.sum", ints(9, 12))
add("aten.sum.dim_IntList", f(12, 6, 4), [0])
add("aten.sum.dim_IntList", f(12, 6, 4), [0, -1], True)
add("aten.sum.dim_IntList", f(12, 6), None)
add("aten.sum.dim_IntList", f(12, 1), [1])
add("aten.sum.dim_IntList", bools(12, 6), [1])
add("aten.sum.dim_IntList", f(12, 6), [1], dtype=torch.float32)
add("aten.mean", f(12, 6))
add("aten.mean.dim", f(12, 6, 4), [1])
add("aten.mean.dim", f(12, 6, 4), [0, -1], True)
add("aten.mean.dim", f(12, 6, 4), None)
for name in "amax amin".split():
    add(f"aten.{name}", f(12, 6, 4), [1])
    add(f"aten.{name}", f(12, 6), [-1], True)
    add(f"aten.{name}", f(12, 6))
for name in "max min".split():
    add(f"aten.{name}", f(12, 6))
    add(f"aten.{name}.dim", f(12, 6), 1)
    add(f"aten.{name}.dim", f(12, 6), 0, True)
for name in "any all".split():
    add(f"aten.{name}", bools(12, 6))
    add(f"aten.{name}.dim", bools(12, 6), 1)
    add(f"aten.{name}.dims", bools(12, 6, 4), [0, 2], True)
add("aten.count_nonzero.dim_IntList", ints(2, 12, 6), [1])
for name in "argmax argmin".split():
    add(f"aten.{name}", f(12, 6), 1)
    add(f"aten.{name}", f(12, 6), 0, True)
    add(f"aten.{name}", f(12, 6))
add("aten.prod.dim_int", f(12, 6), 1)
add("aten.prod", f(12, 6))
for name in "var std var_mean".split():
    add(f"aten.{name}.correction", f(12, 6, 4), [1], correction=1)
    add(f"aten.{name}.correction", f(12, 6), [-1], correction=0, keepdim=True)
add("aten.logsumexp", f(12, 6), [1])
for order in (2, 1, float("inf"), -float("inf"), 0, 3):
    add("aten.linalg_vector_norm", f(12, 6, 4), order, [1])
    add("aten.linalg_vector_norm", f(12, 6), order)
for name in "cumsum cumprod logcumsumexp cummax cummin".split():
    add(f"aten.{name}", f(12, 6), 0)
    add(f"aten.{name}", f(12, 6), -1)
add("aten.cumsum", bools(12, 6), -1)
add("aten.sort", f(12, 6))
add("aten.sort", f(12, 6), 0, True)
add("aten.sort.stable", f(12, 6), stable=True, dim=0)
add("aten.argsort", f(12, 6), 0)
add("aten.topk", f(12, 6), 2)
add("aten.topk", f(12, 6, 4), 3, 1, False)
add("aten.histc", positive(24), 6, 0, 1)
add("aten.histc", positive(12, 6), 6, 0, 1)
add("aten.histc", positive(24), 6)
for name in "_softmax _log_softmax".split():
    add(f"aten.{name}", f(12, 6), -1, False)
    add(f"aten.{name}", f(12, 6, 4), 0, False)
    add(f"aten.{name}", f(12), 0, False)
    add(f"aten.{name}_backward_data", f(12, 6), positive(12, 6), -1, torch.float64)
    add(f"aten.{name}_backward_data", f(12, 6), positive(12, 6), 0, torch.float64)
add("aten._softmax", f(12, 6).masked_fill(bools(12, 6), -float("inf")), 0, False)
add("aten._safe_softmax", f(12, 6), -1)
add("aten._safe_softmax", f(12, 6).masked_fill(torch.arange(12).unsqueeze(1) < 4, -float("inf")), -1)
add("aten._safe_softmax", f(12, 6).masked_fill(torch.arange(12).unsqueeze(1) < 4, -float("inf")), 0)
add("aten.nansum", f(12, 6).masked_fill(bools(12, 6), float("nan")), [1])
add("aten.argsort.stable", f(12, 6), stable=True, dim=0)
add("aten.mode", f(12, 6))
add("aten.nanmedian.dim", f(12, 6), 0)
add("aten._fft_c2c", complexes(12, 6, 4), [1], 0, True)
add("aten._fft_r2c", f(12, 6, 4), [0, 2], 0, True)
add("aten._fft_c2r", complexes(12, 6, 4), [1], 0, 6)
add("aten.kthvalue", f(12, 6), 2)
add("aten.median.dim", f(12, 6), 1)

# --- matmul -----------------------------------------------------------------------------------------------------

add("aten.mm", f(12, 6), f(6, 24))
add("aten.bmm", f(12, 4, 6), f(12, 6, 3))
add("aten.mv", f(12, 6), f(6))
add("aten.dot", f(12), f(12))
add("aten.vdot", f(12), f(12))
add("aten.vdot", complexes(12), complexes(12))
add("aten.addmm", f(6), f(12, 4), f(4, 6))
add("aten.addmm", f(12, 6), f(12, 12), f(12, 6), beta=0.5, alpha=2)
add("aten.addmm", f(), f(12, 4), f(4, 6))
add("aten.addmm", f(12, 1), f(12, 4), f(4, 6))
add("aten.baddbmm", f(12, 4, 6), f(12, 4, 3), f(12, 3, 6), beta=2)
add("aten.baddbmm", f(4, 1), f(6, 4, 12), f(6, 12, 6))
add("aten.addmv", f(12), f(12, 6), f(6))
add("aten.addbmm", f(12, 1), f(6, 12, 4), f(6, 4, 3), beta=2)
add("aten.linear", f(4, 12, 6), f(12, 6), f(12))
add("aten.linear", f(12, 6), f(24, 6))

# --- index ------------------------------------------------------------------------------------------------------

add("aten.embedding", f(24, 6), ints(24, 4, 12))
add("aten.embedding", f(24, 6), ints(24, 12), 3)
_OFFSETS = torch.tensor([0, 2, 2, 7, 11, 20])
for mode, weights in ((0, None), (0, positive(24)), (1, None), (2, None)):
    bags = (ints(24, 24), _OFFSETS)
    made = torch.ops.aten._embedding_bag(f(24, 6), *bags, False, mode, False, weights, False, 3)
    add("aten._embedding_bag", f(24, 6), *bags, False, mode, False, weights, False, 3)
    add("aten._embedding_bag_backward", f(6, 6), *bags, *made[1:], 24, False, mode, False, weights, 3)
add("aten._embedding_bag", f(24, 6), ints(24, 24), _OFFSETS, True, 1, False, None, True)
add("aten.embedding_dense_backward", f(4, 12, 6), ints(24, 4, 12), 24, -1, False)
add("aten.embedding_dense_backward", f(48, 6), ints(24, 48), 24, 3, False)
add("aten.embedding_dense_backward", f(48, 6), ints(24, 48), 24, 3, True)
add("aten.gather", f(12, 6), 1, ints(6, 12, 1))
add("aten.gather", f(12, 6), -1, ints(6, 12, 4))
add("aten.gather", f(24, 6), 0, ints(24, 12, 6))
add("aten.gather", f(12, 6), 1, ints(6, 4, 3))
add("aten.gather", bools(12, 6), 1, ints(6, 12, 4))
for name in "scatter.src scatter_add".split():
    add(f"aten.{name}", f(12, 6), 1, torch.stack([permutation(6)[:4] for _ in range(12)]), f(12, 4))
    add(f"aten.{name}", f(24, 6), 0, torch.stack([permutation(24)[:12] for _ in range(6)], 1), f(12, 6))
    add(f"aten.{name}", f(12, 6), 1, torch.stack([permutation(6)[:4] for _ in range(4)]), f(12, 6))
add("aten.scatter.value", f(12, 6), 1, ints(6, 12, 4), 2.0)
add("aten.scatter.value", f(12, 6), -1, ints(6, 12, 1), 0)
add("aten.scatter_add", f(12, 6), 0, ints(12, 24, 6), f(24, 6))
add("aten.index_select", f(12, 6), 0, ints(12, 24))
add("aten.index_select", f(12, 6, 4), -1, ints(4, 12))
add("aten.index_add", f(12, 6), 0, ints(12, 24), f(24, 6), alpha=2.0)
add("aten.index_add", f(12, 6, 4), 1, ints(6, 12), f(12, 12, 4))
for target in ("aten.index.Tensor", "aten._unsafe_index.Tensor"):
    add(target, f(24, 6), [ints(24, 12)])
    add(target, f(12, 6, 4), [None, ints(6, 12, low=-6)])
    add(target, f(12, 6, 4), [ints(12, 4, 6), ints(6, 6)])
    add(target, f(12, 6, 4), [ints(12, 12), None, ints(4, 12)])
    add(target, f(12, 6, 4), [None, ints(6, 12, 1), ints(4, 3)])
    add(target, ints(9, 24), [ints(24, 12)])
    add(target, bools(24, 6), [ints(24, 12)])
add("aten.index.Tensor", f(12, 6), [torch.arange(12), ints(6, 12)])
add("aten.index.Tensor", f(12, 6), [ints(12)])
for target in ("aten.index_put", "aten._unsafe_index_put"):
    add(target, f(24, 6), [permutation(24)[:12]], f(12, 6))
    add(target, f(24, 6), [ints(24, 12)], f(12, 6), True)
    add(target, f(12, 6, 4), [None, permutation(6)[:4]], f(12, 4, 4))
    add(target, f(12, 6, 4), [None, ints(6, 12, low=-6)], f(4), True)
    add(target, f(12, 6, 4), [ints(12, 12), None, ints(4, 12)], f(12, 6), True)
    add(target, f(12, 6, 4), [permutation(12), None, ints(4, 12)], f(12, 6))
    add(target, f(12, 6), [torch.arange(12), ints(6, 12)], f())
add("aten.index_put", f(12, 6), [bools(12, 6)], f())
add("aten.index_put", f(12, 6, 4), [None, bools(6)], f())
add("aten.bucketize.Tensor", f(12, 6), torch.linspace(-1, 1, 5, dtype=torch.float64))
add("aten.searchsorted.Tensor", f(12, 6).sort().values, f(12, 4))
