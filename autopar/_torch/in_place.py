"""What a program does in place, in dynamo's graph, before it is traced as functions. Dynamo has one value for one tensor: what writes in place has that of its operand."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree
from torch import fx

from autopar._torch.fakes import storage_of
from autopar._torch.nodes import value_of

VIEWS = frozenset({"transpose_", "t_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_"})
# A view or a copy, by how the tensor lies.
RESHAPES = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})
# Out of place these do something else.
OTHERS = frozenset({"bernoulli_", "resize_", "set_"})
_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def views_out_of_place(gm: fx.GraphModule) -> None:
    """Views made in place (`x.transpose_(0, 1)`) as views. torch loses the way back through one that is then written to, where `x` was a view already (a linear layer's result with more than
    two dims): "invalid gradient at index 0". Out of place it is the same: what a later line means by `x` is the new view. Those of the program's inputs, parameters and buffers stay, since
    the caller sees them."""
    _out_of_place(gm, lambda n: n.op == "call_method" and n.target in VIEWS)


def writes_out_of_place(gm: fx.GraphModule) -> None:
    """Writes to what nobody else sees, made operators that give something new, for where torch cannot trace them (a cumsum_ of a transposed view of a product: "Cannot view a tensor")."""
    at = {n: i for i, n in enumerate(gm.graph.nodes)}
    last: dict[fx.Node, int] = {n: max((at[u] for u in n.users), default=-1) for n in at}
    memory = _memory(at)
    given = {memory[n] for n in at if n.op in ("placeholder", "get_attr") and n in memory}
    sharing: dict[Any, list[fx.Node]] = {}
    for n, key in memory.items():
        sharing.setdefault(key, []).append(n)

    def may(n: fx.Node) -> bool:
        x = n.args[0]
        assert isinstance(x, fx.Node)
        key, mine = memory.get(x), value_of(x)
        if key is None or key in given or any(value_of(m) is not mine and at[m] < at[n] < last[m] for m in sharing[key]):
            return False
        return n.target not in OTHERS and _gives_the_same(n)

    _out_of_place(gm, may)


def _out_of_place(gm: fx.GraphModule, may: Callable[[fx.Node], bool]) -> None:
    first: dict[int, fx.Node] = {}  # by tensor, the node that made it
    now: dict[int, fx.Node] = {}  # and the one that stands for it, once something was rewritten

    def of(n: fx.Node) -> fx.Node:
        return now.get(id(value_of(n)), n)

    for n in gm.graph.nodes:
        tensor = id(value_of(n)) if isinstance(value_of(n), torch.Tensor) else 0
        rewrites = _has_other_form(n) and _writes(n) and first[tensor].op not in ("placeholder", "get_attr") and may(n)
        if now:
            n.args, n.kwargs = fx.map_arg(n.args, of), fx.map_arg(n.kwargs, of)
        first.setdefault(tensor, n)
        if rewrites:
            n.target = _OPERATORS[n.target] if n.op == "call_function" else str(n.target).removesuffix("_")
        if tensor in now or rewrites:
            now[tensor] = n
    gm.recompile()


def _memory(nodes: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """The storage of each tensor, where it has one of its own: not within vmap."""
    found: dict[fx.Node, Any] = {}
    for n in nodes:
        if isinstance(v := value_of(n), torch.Tensor):
            with contextlib.suppress(NotImplementedError):
                found[n] = storage_of(v)
    return found


def _has_other_form(n: fx.Node) -> bool:
    if n.op == "call_function":
        return n.target in _OPERATORS
    return n.op == "call_method" and str(n.target).endswith("_") and not str(n.target).endswith("__")


def _writes(n: fx.Node) -> bool:
    """Whether `n` writes to an operand in place: it is that tensor, and its name, or a flag, says so (what is contiguous is its own `contiguous`)."""
    if n.op not in ("call_method", "call_function") or n.target is operator.setitem:
        return n.target is operator.setitem
    value, name = value_of(n), str(n.target if n.op == "call_method" else getattr(n.target, "__name__", ""))
    if not isinstance(value, torch.Tensor) or not any(value_of(a) is value for a in n.all_input_nodes):
        return False
    flags = [*n.args, *n.kwargs.values()]
    return name.endswith("_") or "out" in n.kwargs or getattr(n.target, "__module__", "") == "_operator" or any(f is True for f in flags)


def _gives_the_same(n: fx.Node) -> bool:
    """Whether what stands for a write gives a tensor of the same shape and dtype."""
    args, kwargs = fx.map_arg((tuple(n.args), dict(n.kwargs)), value_of)
    x = args[0]
    work = _OPERATORS[n.target] if n.op == "call_function" else getattr(torch.Tensor, str(n.target).removesuffix("_"), None)
    if work is None or not isinstance(x, torch.Tensor) or _overlaps(x):
        return False
    try:
        with torch.no_grad():
            made = work(*args, **kwargs)
    except Exception:
        return False
    return isinstance(made, torch.Tensor) and (made.shape, made.dtype) == (x.shape, x.dtype)


def _overlaps(t: torch.Tensor) -> bool:
    """Whether several elements may be in one place, where each write would see the one before."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def written_by_layout(gm: fx.GraphModule) -> frozenset[int]:
    """The program's inputs, by position, of which something is a view or a copy by how they lie, and is then written to."""
    nodes = list(gm.graph.nodes)
    memory = _memory(nodes)
    places = {memory[n]: i for i, n in enumerate(n for n in nodes if n.op == "placeholder") if n in memory}
    of: dict[Any, int] = {}  # memory that is the input's under other strides -> the input
    for n in nodes:
        name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
        x = n.args[0] if n.args else None
        if n in memory and isinstance(x, fx.Node) and name in RESHAPES and memory.get(x) in {*places, *of}:
            of[memory[n]] = of[memory[x]] = places.get(memory[x], of.get(memory[x], -1))
    if not of:
        return frozenset()
    written = {memory.get(n.args[0] if n.target is operator.setitem else n) for n in nodes if _writes(n)}
    return frozenset(i for key, i in of.items() if key in written and i >= 0)
