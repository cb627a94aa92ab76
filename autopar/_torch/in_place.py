"""What a program does in place, in dynamo's graph, before it is traced as functions."""

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


def writes_out_of_place(gm: fx.GraphModule) -> bool:
    """Writes to what nobody else sees, made operators that give something new, for where torch cannot trace them (a cumsum_ of a transposed view of a product: "Cannot view a tensor").
    Whether there were any."""
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
        key = memory.get(x)
        if key is None or key in given or any(m is not x and m is not n and at[m] < at[n] < last[m] for m in sharing[key]):
            return False
        return _gives_the_same(n)

    return _out_of_place(gm, may)


def _out_of_place(gm: fx.GraphModule, may: Callable[[fx.Node], bool]) -> bool:
    root: dict[fx.Node, fx.Node] = {}  # of nodes that are one tensor, the first
    now: dict[fx.Node, fx.Node] = {}  # by root, the node that has the tensor's value
    changed = False

    def of(n: fx.Node) -> fx.Node:
        return now.get(root.get(n, n), n)

    for n in gm.graph.nodes:
        x = n.args[0] if n.args else None
        rewrites = isinstance(x, fx.Node) and _in_place(n) and root.get(x, x).op not in ("placeholder", "get_attr") and may(n)
        if now:
            n.args, n.kwargs = fx.map_arg(n.args, of), fx.map_arg(n.kwargs, of)
        if not isinstance(x, fx.Node) or not _in_place(n):
            continue
        root[n] = first = root.get(x, x)
        if rewrites:
            n.target = _OPERATORS[n.target] if n.op == "call_function" else str(n.target).removesuffix("_")
            now[first] = n
            changed = True
    gm.recompile()
    return changed


def _memory(nodes: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """The storage of each tensor, where it has one of its own: not within vmap."""
    found: dict[fx.Node, Any] = {}
    for n in nodes:
        if isinstance(v := value_of(n), torch.Tensor):
            with contextlib.suppress(NotImplementedError):
                found[n] = storage_of(v)
    return found


def _in_place(n: fx.Node) -> bool:
    if n.op == "call_function":
        return n.target in _OPERATORS
    return n.op == "call_method" and str(n.target).endswith("_") and not str(n.target).endswith("__")


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
    written = {
        memory.get(n.args[0]) for n in nodes if n.args and isinstance(n.args[0], fx.Node) and (_in_place(n) or n.target is operator.setitem)
    }
    written |= {memory.get(out) for n in nodes if isinstance(out := n.kwargs.get("out"), fx.Node)}
    return frozenset(i for key, i in of.items() if key in written and i >= 0)
