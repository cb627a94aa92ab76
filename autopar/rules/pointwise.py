"""Pointwise ops: every dim of the output is a loop, and a broadcast operand has `1` where it has one element.

An op is linear in a set of inputs if op(sum of x_r) = sum of op(x_r) with the other inputs held fixed; then a
Partial(sum) may pass through and be reduced later, or never.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, is_float, linear_in, names, write


def broadcast(op: Op, linear: str = "", kind: str = "cheap") -> Line:
    """All tensors broadcast together to the shape of the first output."""
    shape = op.out.shape
    dims = names(shape)
    inputs = [aligned(t.shape, shape, dims) for t in op.inputs]
    # A second output is an auxiliary buffer; log_sigmoid's is empty on a GPU.
    outputs = [None if o is None else dims if o.shape == shape else ["1"] * len(o.shape) for o in op.outputs]
    return write(inputs, outputs, linear_in(op, linear), kind)


_UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2
    expm1 fill.Scalar floor frac frexp.Tensor gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan
    isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logical_not logit mish
    nan_to_num polygamma rad2deg reciprocal relu relu6 round round.decimals rsqrt selu sgn sigmoid sign signbit silu sin
    sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_ndtr special_ndtri sqrt square tan tanh threshold trunc
"""
_BINARY = """
    atan2 bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_or.Scalar bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
    bitwise_xor.Scalar bitwise_xor.Tensor clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor
    copysign.Scalar copysign.Tensor div.Scalar_mode div.Tensor_mode eq.Scalar eq.Tensor
    floor_divide floor_divide.Scalar fmax fmin fmod.Scalar fmod.Tensor gcd ge.Scalar ge.Tensor gt.Scalar gt.Tensor
    heaviside hypot igamma igammac lcm le.Scalar le.Tensor logaddexp logaddexp2 logical_and logical_or
    logical_xor lt.Scalar lt.Tensor maximum minimum ne.Scalar ne.Tensor nextafter pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor rsub.Scalar special_xlog1py
    special_zeta xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor add.Scalar sub.Scalar
"""
# Which inputs are linear. A backward formula is linear in the gradient that comes in.
_LINEAR = {
    "neg": "0", "positive": "0", "conj_physical": "0", "_conj": "0",
    "real": "0", "imag": "0", "mul.Scalar": "0", "div.Scalar": "0", "mul.Tensor": "0|1",
    "add.Tensor": "0&1", "sub.Tensor": "0&1", "rsub.Tensor": "0&1", "lerp.Scalar": "0&1", "lerp.Tensor": "0&1",
    "addcmul": "0&1|0&2", "addcdiv": "0&1", "complex": "0&1", "polar": "0", "fill.Tensor": "1",
    "masked_fill.Tensor": "0&2",
    "elu_backward": "0", "gelu_backward": "0", "hardsigmoid_backward": "0", "hardswish_backward": "0",
    "hardtanh_backward": "0", "hardshrink_backward": "0", "softshrink_backward": "0", "leaky_relu_backward": "0",
    "log_sigmoid_backward": "0", "logit_backward": "0", "mish_backward": "0", "sigmoid_backward": "0",
    "silu_backward": "0", "softplus_backward": "0", "tanh_backward": "0", "threshold_backward": "0",
}  # fmt: skip
# Copies: nothing is computed.
_COPY = {
    "alias": "0", "clone": "0", "detach": "0", "lift": "0", "lift_fresh": "0", "lift_fresh_copy": "0",
    "copy": "1",
}  # fmt: skip


def _broadcast(linear: str, kind: str = "cheap") -> Callable[[Op], Line]:
    return lambda op: broadcast(op, linear, kind)


def _target(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


rule(*map(_target, (_UNARY + _BINARY).split()))(broadcast)
for _name, _sets in _LINEAR.items():
    rule(_target(_name))(_broadcast(_sets))
for _name, _sets in _COPY.items():
    rule(_target(_name))(_broadcast(_sets, "view"))


@rule("aten._to_copy.default", "prims.convert_element_type.default")
def _cast(op: Op) -> Line:
    """Rounding to an integer is not linear; rounding to fewer bits is taken as such, as in any lazy reduction."""
    return broadcast(op, "0" if is_float(op.out) else "")


@rule("aten.div.Tensor")
def _div(op: Op) -> Line:
    return broadcast(op, "0" if isinstance(op.args[0], Tensor) else "")


@rule("aten.where.self")
def _where(op: Op) -> Line:
    return broadcast(op, "1&2" if len(op.inputs) == 3 else "")


@rule("aten.masked_fill.Scalar")
def _masked_fill(op: Op) -> Line:
    return broadcast(op, "0" if op.arg(2, "value") == 0 else "")


@rule("aten.view.dtype")
def _view_dtype(op: Op) -> Line | None:
    """Reading the bits as another type, if that has as many."""
    return broadcast(op, "", "view") if op.out.shape == op.inputs[0].shape else None


@rule("aten.glu.default", "aten.glu_backward.default")
def _glu(op: Op) -> Line:
    """Two halves of the dim, multiplied: `(2 n) -> n`; backward the other way."""
    whole = op.inputs[-1]
    dim = op.arg(len(op.inputs), "dim", -1) % len(whole.shape)
    dims = names(whole.shape)
    dims[dim] = f"n{dim}"
    halves = [*dims[:dim], f"(two! n{dim})", *dims[dim + 1 :]]
    sizes = {"two": 2, f"n{dim}": whole.shape[dim] // 2}
    if len(op.inputs) == 1:
        return write([halves], [dims], "", "cheap", sizes)
    return write([dims, halves], [halves], "0", "cheap", sizes)


@rule("aten._weight_norm_interface.default", "aten._weight_norm_interface_backward.default")
def _weight_norm(op: Op) -> Line:
    """w = v g / |v|, the norm over all dims but one."""
    forward = op.target == "aten._weight_norm_interface.default"
    whole = op.inputs[0].shape
    dim = op.arg(2 if forward else 4, "dim", 0) % len(whole)
    v = ["1" if n == 1 else f"d{i}" if i == dim else f"d{i}!" for i, n in enumerate(whole)]
    g = [v[i] if n == whole[i] and i == dim else "1" for i, n in enumerate(op.inputs[1 if forward else 2].shape)]
    return write([v, g], [v, g]) if forward else write([v, v, g, g], [v, g], "0")
