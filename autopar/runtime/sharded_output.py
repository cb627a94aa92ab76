"""Outputs too large to lie whole on every rank: a tensor of the whole's shape, of which each rank has its rows.

To the caller it is the whole: every operation gives what it would of the whole, and so do gradients. What a loss does with logits (slices, views, casts, a softmax, picking
out, a cross entropy) is done with a rank's rows, by `autopar.runtime.by_rows`; any other operation gathers the whole first. What is small is handed on as a plain tensor.

    _local     this rank's rows, in autograd's graph
    _rows      how rows are dealt out
    _view      what it is a view of, and how it is made of that; the first of them has all in `_views`

The tensor itself is in autograd's graph too, behind `_local`: so what does not ask `__torch_function__` (`autograd.Function.apply`) sends its gradient the same way.

Written in place, it becomes whole for good, and so does all that shares its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autopar._torch import plainly, pytree, storage_of, without_memory
from autopar.errors import AutoparError
from autopar.runtime import rows as moved
from autopar.runtime.by_rows import NotByRows, by_rows
from autopar.runtime.rows import Rows

LARGE = 1 << 22  # elements, from which an output stays where it is
_T: Any = torch.Tensor
# What is asked of the tensor as it stands, not of its values.
_NATIVE = {
    getattr(_T, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "is_cuda", "is_sparse", "is_meta", "output_nr", "is_nested", "is_quantized", "itemsize", "nbytes")
} | {_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.is_floating_point, _T.is_complex, _T.get_device, _T.element_size, _T.__len__, _T.__hash__, torch.is_tensor, torch.is_floating_point, torch.numel}  # fmt: skip
_IN_PLACE = {f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")} | {
    "__setitem__"
}
_MEMORY = frozenset(["numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"])
_PERHAPS = frozenset(["relu", "relu6", "elu", "silu", "mish", "leaky_relu", "hardtanh", "threshold"])  # with a True among their arguments


class ShardedOutput(torch.Tensor):
    _local: torch.Tensor
    _rows: Rows
    _view: tuple[ShardedOutput, Callable[[Any], Any]] | None
    _views: list[weakref.ref[ShardedOutput]]
    _whole: torch.Tensor | None
    _settled: bool

    @staticmethod
    def worn(local: torch.Tensor, rows: Rows) -> ShardedOutput:
        """The tensor of which this rank has `local`."""
        made = _worn_of(local, rows)
        made._local, made._rows, made._view, made._views, made._whole, made._settled = local, rows, None, [], None, False
        return made

    def whole(self) -> torch.Tensor:
        """A plain tensor. Collective on first use."""
        if self._settled and self._whole is not None:
            return self._whole
        if self._whole is not None and (self._whole.requires_grad or not (torch.is_grad_enabled() and self._local.requires_grad)):
            return self._whole if torch.is_grad_enabled() else self._whole.detach()
        found = moved.whole(self.local(), self._rows)
        self._whole = found
        return found

    def local(self) -> torch.Tensor:
        """This rank's rows, in autograd's graph: behind this tensor where a Function has returned it, which has made `_local` out of autograd's sight."""
        if self.requires_grad and not self._local.requires_grad and torch.is_grad_enabled():
            self._local, self._whole = _local_of(self), None
        return self._local

    def root(self) -> ShardedOutput:
        """What it is a view of, in the end."""
        x = self
        while x._view is not None:
            x = x._view[0]
        return x

    def settle(self) -> torch.Tensor:
        """The whole, which it is from here on, and so are all that share memory with it, as views of one another."""
        root = self.root()
        with torch.enable_grad():
            for x in (root, *(v() for v in root._views)):
                if x is not None and not x._settled:
                    x._whole, x._settled = (x.whole() if x._view is None else x._view[1](x._view[0]._whole)), True
        root._views.clear()
        assert self._whole is not None
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plainly():
            if func in _NATIVE:
                settled = args and isinstance(args[0], cls) and args[0]._settled
                return func(args[0]._whole, *args[1:], **kwargs) if settled else func(*args, **kwargs)
            if func in _SPECIAL:
                return _SPECIAL[func](func, args, kwargs)
            name = getattr(func, "__name__", "")
            if name == "__set__":
                raise _refused(f".{func.__self__.__name__} = ...")
            written = _written(name, args, kwargs)
            if written is not None:
                return _in_place(func, written, args, kwargs)
            if not any(isinstance(x, cls) and x._settled for x in pytree.tree_leaves((args, kwargs))):
                try:
                    return _worn(by_rows(func, args, kwargs), func, args, kwargs)
                except NotByRows:
                    pass
            found = func(*whole(args), **whole(kwargs))
            _settle_shared(name, found, args, kwargs)
            return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """From where `__torch_function__` was not asked: autograd's own sums of gradients, C++."""
        return func(*whole(args), **whole(kwargs or {}))


class _Worn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        shape = (local.shape[0] * rows.parts, *local.shape[1:])  # strides: as if the whole lay as the rows do
        found: torch.Tensor = without_memory(ShardedOutput, shape, local)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.mine(whole(grad)).contiguous(), None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedOutput) -> torch.Tensor:
        ctx.rows = x._rows
        return x._local.view_as(x._local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.gathered(grad)


_worn_of: Callable[[torch.Tensor, Rows], ShardedOutput] = _Worn.apply
_local_of: Callable[[ShardedOutput], torch.Tensor] = _Local.apply


def whole(x: Any) -> Any:
    """`x` with its sharded outputs as plain tensors, in lists, dicts and the like. Collective."""
    return pytree.tree_map(lambda t: t.whole() if isinstance(t, ShardedOutput) else t, x)


def _refused(what: str) -> AutoparError:
    return AutoparError(f"{what} of an output of which each rank holds its own samples", fix="take a tensor of your own first: .clone()")


def _written(name: str, args: Any, kwargs: Any) -> ShardedOutput | None:
    """What an operation writes in place."""
    out = kwargs.get("out")
    if isinstance(out, ShardedOutput):
        return out
    is_in_place = (
        (name.endswith("_") and not name.endswith("__"))
        or name in _IN_PLACE
        or kwargs.get("inplace") is True
        or (name in _PERHAPS and any(a is True for a in args))
    )
    return args[0] if is_in_place and args and isinstance(args[0], ShardedOutput) else None


def _in_place(func: Any, written: ShardedOutput, args: Any, kwargs: Any) -> Any:
    settled = written.settle()
    args, kwargs = pytree.tree_map(lambda t: settled if t is written else t, (args, kwargs))
    found = func(*whole(args), **whole(kwargs))
    return written if found is settled else found


def _settle_shared(name: str, found: Any, args: Any, kwargs: Any) -> None:
    """What was handed out may be written: then what it is memory of has to see that."""
    memory = {storage_of(t) for t in pytree.tree_leaves(found) if type(t) in (torch.Tensor, torch.nn.Parameter)}
    for x in pytree.tree_leaves((args, kwargs)):
        is_whole = isinstance(x, ShardedOutput) and not x._settled and x._whole is not None
        if is_whole and (name in _MEMORY or storage_of(x._whole) in memory):
            x.settle()


def _worn(found: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Of what an operation made of a rank's rows: large results as they lie, small ones whole, views as views of what they look at."""
    result, rows, view = found
    base = next(x for x in pytree.tree_leaves(args) if isinstance(x, ShardedOutput)) if view else None
    flat, spec = pytree.tree_flatten(result)

    def one(i: int, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or rows is None:
            return t
        if base is not None and t is base._local:
            return base
        if base is None and t.numel() * rows.parts < LARGE:
            return moved.whole(t, rows)
        made = ShardedOutput.worn(t, rows)
        if base is not None:
            made._view = base, lambda whole: pytree.tree_leaves(func(whole, *args[1:], **kwargs))[i]
            root = base.root()
            root._views = [v for v in root._views if v() is not None] + [weakref.ref(made)]
        return made

    return pytree.tree_unflatten([one(i, t) for i, t in enumerate(flat)], spec)


# ---- of gradients ------------------------------------------------------------------------------------------------


def _grad(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if x._settled:
        return x._whole.grad
    return None if x._local.grad is None else x._rows.gathered(x._local.grad)


def _retain(func: Any, args: Any, kwargs: Any) -> None:
    x = args[0]
    (x._whole if x._settled else x.local()).retain_grad()


def _hook(func: Any, args: Any, kwargs: Any) -> Any:
    if args[0]._settled:
        return func(*whole(args), **kwargs)
    x, hook = args[0], (args[1] if len(args) > 1 else kwargs["hook"])

    def of_rows(grad: torch.Tensor) -> torch.Tensor | None:
        found = hook(x._rows.gathered(grad))
        return None if found is None else x._rows.mine(found).contiguous()

    return x.local().register_hook(of_rows)


def _wants(func: Any, args: Any, kwargs: Any) -> Any:
    x, value = args[0], (args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    x._local.requires_grad_(value)
    return func(*args, **kwargs)


def _set_grad(func: Any, args: Any, kwargs: Any) -> None:
    x, grad = args[0], whole(args[1])
    x._local.grad = None if grad is None else x._rows.mine(grad).clone()


def _autograd_grad(func: Any, args: Any, kwargs: Any) -> Any:
    import inspect

    given = inspect.signature(func).bind(*args, **kwargs).arguments
    inputs = given.pop("inputs")
    one = isinstance(inputs, torch.Tensor)
    wanted = (inputs,) if one else tuple(inputs)
    rest = {k: whole(v) for k, v in given.items()}
    split = [isinstance(t, ShardedOutput) and not t._settled for t in wanted]
    found = func(inputs=tuple(t.local() if s else whole(t) for t, s in zip(wanted, split, strict=True)), **rest)
    return tuple(t._rows.gathered(g) if s and g is not None else g for t, g, s in zip(wanted, found, split, strict=True))


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _T.grad.__get__: _grad,
    _T.grad.__set__: _set_grad,
    _T.requires_grad.__set__: _wants,
    _T.requires_grad_: _wants,
    _T.retain_grad: _retain,
    _T.is_contiguous: lambda func, args, kwargs: func(args[0]._local, *args[1:], **kwargs),
    _T.stride: lambda func, args, kwargs: func(args[0]._local, *args[1:], **kwargs),
    _T.register_hook: _hook,
    torch.autograd.grad: _autograd_grad,
}
