"""Operations on a rank's rows alone, which give the rows of what they would give of the whole, or its sum over rows.

    elementwise, with plain operands beside      of as many rows: cut; of one row, or fewer dims: as they are
    along other dims than the rows'              softmax, gather, argmax, ...
    views that leave the rows' order             slices, reshapes, transposes of other dims
    products with a plain matrix on the right
    sums, means, losses                          a rank's part of the sum, added up

`by_rows` raises NotByRows for all else, and has then done nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.runtime import rows as moved
from autopar.runtime.rows import Rows

Found = tuple[Any, Rows | None, bool]  # results of a rank's rows; how they lie (None: whole already); whether they are views


class NotByRows(Exception):
    """The operation needs the whole."""


_ELEMENTWISE = frozenset(
    [
        "float",
        "half",
        "bfloat16",
        "double",
        "to",
        "type_as",
        "clone",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "tanh",
        "sigmoid",
        "logsigmoid",
        "relu",
        "relu6",
        "gelu",
        "silu",
        "mish",
        "elu",
        "leaky_relu",
        "softplus",
        "hardtanh",
        "softsign",
        "abs",
        "absolute",
        "neg",
        "negative",
        "positive",
        "square",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "pow",
        "float_power",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "add",
        "sub",
        "subtract",
        "rsub",
        "mul",
        "multiply",
        "div",
        "divide",
        "true_divide",
        "floor_divide",
        "remainder",
        "fmod",
        "where",
        "masked_fill",
        "lerp",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "nan_to_num",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "sign",
        "erf",
        "erfc",
        "sin",
        "cos",
        "tan",
        "atan",
        "atan2",
        "round",
        "floor",
        "ceil",
        "trunc",
        "frac",
        "xlogy",
        "addcmul",
        "addcdiv",
        "logaddexp",
        "logaddexp2",
        "logit",
        "sinh",
        "cosh",
        "long",
        "int",
        "bool",
        "zeros_like",
        "ones_like",
        "threshold",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__rtruediv__",
        "__div__",
        "__rdiv__",
        "__floordiv__",
        "__rfloordiv__",
        "__mod__",
        "__pow__",
        "__rpow__",
        "__neg__",
        "__pos__",
        "__abs__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__and__",
        "__or__",
        "__xor__",
        "__invert__",
    ]
)
# Which argument is the dim, and what it is if not given; None: all of them.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        [
            "softmax",
            "log_softmax",
            "softmin",
            "logsumexp",
            "argmax",
            "argmin",
            "max",
            "min",
            "amax",
            "amin",
            "sum",
            "mean",
            "cumsum",
            "any",
            "all",
            "gather",
            "prod",
        ],
        (1, None),
    ),
    **dict.fromkeys(["sort", "argsort"], (1, -1)),
    **dict.fromkeys(["topk"], (2, -1)),
    **dict.fromkeys(["normalize"], (2, 1)),
    **dict.fromkeys(["take_along_dim"], (2, None)),
}
_BY_ELEMENT = {
    f.__name__: f
    for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.kl_div)
}
_REORDERING = frozenset(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"])
_VIEWS = (
    frozenset(
        ["__getitem__", "transpose", "swapaxes", "permute", "select", "narrow", "split", "chunk", "contiguous", "detach", "data", "mT"]
    )
    | _REORDERING
)


def by_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    handler = next((h for names, h in _HANDLERS if name in names), None)
    first = next((x for x in pytree.tree_leaves((args, kwargs)) if _is_sharded(x)), None)
    if handler is None or first is None or any(isinstance(x, DTensor) for x in pytree.tree_leaves((args, kwargs))):
        raise NotByRows
    return handler(func, name, args, kwargs, first._rows)


def _is_sharded(x: Any) -> Any:
    return hasattr(x, "_rows") and isinstance(x, torch.Tensor)


# ---- operands ----------------------------------------------------------------------------------------------------


def _operand(x: Any, rows: Rows, dims: int, n: int) -> Any:
    """Of an operand that broadcasts to `dims` dims, of which the first is `n` rows."""
    if _is_sharded(x):
        if x._rows != rows or x.dim() != dims or x.shape[0] != n:
            raise NotByRows
        return x.local()
    if not isinstance(x, torch.Tensor):
        return x
    if x.dim() > dims or (x.dim() == dims and x.shape[0] not in (1, n)):
        raise NotByRows
    if x.dim() == dims and x.shape[0] == n:
        return cut(x, rows)
    return copy(x, rows)


def cut(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return moved.cut(x, rows) if x.requires_grad and torch.is_grad_enabled() else rows.mine(x)


def copy(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return moved.copy(x, rows) if x.requires_grad and torch.is_grad_enabled() else x


def _local(args: Any, kwargs: Any, rows: Rows) -> tuple[Any, Any]:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    dims = max(x.dim() for x in tensors)
    n = next(x.shape[0] for x in tensors if _is_sharded(x))
    found: tuple[Any, Any] = pytree.tree_map(lambda x: _operand(x, rows, dims, n), (args, kwargs))
    return found


def _dim(x: torch.Tensor, d: int) -> int:
    return d + x.dim() if d < 0 else d


# ---- operations --------------------------------------------------------------------------------------------------


def _elementwise(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if _is_sharded(x))
    (args, kwargs) = _local(args, kwargs, rows)
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.device != first.device:
        raise NotByRows
    return result, rows, result is first.local()


def _along(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    at, default = _ALONG[name]
    x: Any = args[0] if args else None
    if not _is_sharded(x):
        raise NotByRows
    dim = kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else default
    if isinstance(dim, torch.Tensor) or (len(args) > at + 1 and name in ("sum", "mean") and not isinstance(args[at + 1], bool)):
        raise NotByRows  # max(x, other); sum(0, 1)
    dims = tuple(range(x.dim())) if dim is None or dim == () or dim == [] else (dim,) if isinstance(dim, int) else tuple(dim)
    others = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor)]
    if others and any(t.dim() != x.dim() or t.shape[0] != x.shape[0] for t in others):
        raise NotByRows
    if 0 not in {_dim(x, d) for d in dims}:
        args, kwargs = pytree.tree_map(lambda t: _operand(t, rows, x.dim(), x.shape[0]), (args, kwargs))
        return func(*args, **kwargs), rows, False
    if name not in ("sum", "mean") or "out" in kwargs or kwargs.get("dtype") is not None:
        raise NotByRows
    part = x.local()
    if name == "mean" and not part.dtype.is_floating_point:
        raise NotByRows  # of integers: torch says why not
    low = part.dtype in (torch.float16, torch.bfloat16)
    part = func(part.float() if low else part, *args[1:], **kwargs)
    total = moved.total(part, rows)
    total = total / rows.parts if name == "mean" else total
    return total.to(x.dtype) if low else total, None, False


def _reordered(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    """Elements stay in their order: a rank's rows are its part of the new rows too, where these divide."""
    x = args[0]
    if (
        not _is_sharded(x)
        or any(_is_sharded(t) for t in pytree.tree_leaves((args[1:], kwargs)))
        or (name == "view" and isinstance(args[1], torch.dtype))
    ):
        raise NotByRows
    shape = func(torch.empty_strided(x.shape, x.local().stride(), device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[0] % rows.parts or not shape[0]:
        raise NotByRows
    like = (shape[0] // rows.parts, *shape[1:])
    return x.local().view(like) if name == "view" else x.local().reshape(like), rows, True


def _viewed(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    x = args[0]
    if not _is_sharded(x) or len([t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]) > 1:
        raise NotByRows
    if name in ("contiguous", "detach", "data", "mT"):
        if name == "mT" and x.dim() < 3:
            raise NotByRows
        return func(x.local(), *args[1:], **kwargs), rows, True
    if name == "__getitem__":
        return x.local()[_index(x, args[1])], rows, True
    if name in ("transpose", "swapaxes"):
        dims = [*args[1:], *kwargs.values()]
    elif name == "permute":
        dims = list(args[1] if len(args) > 1 and not isinstance(args[1], int) else args[1:] or kwargs["dims"])
        if len(dims) != x.dim() or _dim(x, dims[0]) != 0:
            raise NotByRows
        dims = dims[1:]
    elif name in ("select", "narrow"):
        dims = [kwargs["dim"] if "dim" in kwargs else args[1]]
    else:  # split, chunk
        dims = [kwargs["dim"] if "dim" in kwargs else args[2] if len(args) > 2 else 0]
    if not all(isinstance(d, int) for d in dims) or 0 in {_dim(x, d) for d in dims}:
        raise NotByRows
    return func(x.local(), *args[1:], **kwargs), rows, True


def _index(x: torch.Tensor, index: Any) -> Any:
    """The same for a rank's rows: all of them are taken, and of other dims numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if not parts or any(not (p is None or p is Ellipsis or isinstance(p, slice) or type(p) is int) for p in parts):
        raise NotByRows
    if parts[0] is Ellipsis:
        if sum(p is not None for p in parts[1:]) >= x.dim():
            raise NotByRows
    elif not isinstance(parts[0], slice) or parts[0] != slice(None):
        raise NotByRows
    return index


def _product(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    x, matrix = args[0], args[1] if len(args) > 1 else None
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    plain = isinstance(matrix, torch.Tensor) and not _is_sharded(matrix) and matrix.dim() <= 2 and not _is_sharded(bias)
    if not _is_sharded(x) or x.dim() < 2 or not plain or set(kwargs) - {"bias"}:
        raise NotByRows
    assert isinstance(matrix, torch.Tensor)
    extra = [copy(bias, rows)] if bias is not None else []
    return func(x.local(), copy(matrix, rows), *extra), rows, False


# ---- losses ------------------------------------------------------------------------------------------------------


def _loss(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    """Of elements: each by itself, then their sum or mean."""
    given = _given(func, args, kwargs)
    how = given.pop("reduction")
    x, target = given["input"], given["target"]
    local = {k: _operand(v, rows, x.dim(), x.shape[0]) for k, v in given.items()}
    if (
        x.dim() != target.dim()
        or (not _is_sharded(x) and not _is_sharded(target))
        or x.shape != target.shape
        or how not in ("none", "sum", "mean", "batchmean")
    ):
        raise NotByRows
    if how == "none":
        return func(**local, reduction="none"), rows, False
    total = _total(func(**{k: _wide(v) for k, v in local.items()}, reduction="none"), rows)
    number = {"sum": 1, "mean": math.prod(x.shape), "batchmean": x.shape[0]}[how]
    return (total / number).to(torch.promote_types(x.dtype, target.dtype)), None, False


def _entropy(func: Any, name: str, args: Any, kwargs: Any, rows: Rows) -> Found:
    """Of classes along dim 1: a cross entropy, or what is left of it after a log-softmax. A mean is over what is not ignored, by weight."""
    given = _given(func, args, kwargs)
    how = given.pop("reduction")
    x, target, weight = given["input"], given["target"], given["weight"]
    classes = target.dtype.is_floating_point
    fits = _is_sharded(x) and x.dim() >= 2 and target.dim() == x.dim() - (not classes) and target.shape[0] == x.shape[0]
    if not fits or _is_sharded(weight) or how not in ("none", "sum", "mean"):
        raise NotByRows
    mine = _operand(target, rows, target.dim(), x.shape[0])
    of = None if weight is None else copy(weight, rows)
    if how == "none":
        return func(**{**given, "input": x.local(), "target": mine, "weight": of}, reduction="none"), rows, False
    entropies = func(**{**given, "input": _wide(x.local()), "target": mine, "weight": _wide(of)}, reduction="none")
    total = _total(entropies, rows)
    if how == "sum":
        return total.to(x.dtype), None, False
    if classes:
        return (total / (math.prod(x.shape) // x.shape[1])).to(x.dtype), None, False
    counted = mine != given["ignore_index"]
    if weight is None:
        number = moved.total(counted.sum(), rows)
    else:
        number = _total(torch.where(counted, _wide(of)[mine.clamp(min=0)], 0), rows)
    return (total / number).to(x.dtype), None, False


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise NotByRows
    return given


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def _total(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return moved.total(x.sum(), rows)


Handler = Callable[[Any, str, Any, Any, Rows], Found]
_HANDLERS: tuple[tuple[Any, Handler], ...] = (
    (_ELEMENTWISE, _elementwise),
    (_ALONG, _along),
    (_REORDERING, _reordered),
    (_VIEWS, _viewed),
    (frozenset({"linear", "matmul", "__matmul__"}), _product),
    (_BY_ELEMENT, _loss),
    (frozenset({"cross_entropy", "nll_loss"}), _entropy),
)
