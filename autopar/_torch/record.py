"""A function of tensors as the operators that it calls: `make_fx` for plain functions of known sizes, in a third of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar._torch.nodes import drop_dead_code, getitem
from autopar._torch.regions import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    """Appends a node for every operator that reaches the dispatcher below autograd, where composite ones have been taken apart."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.known: dict[int, tuple[torch.Tensor, fx.Node]] = {}  # by identity; the tensor is held, so that no other gets its
        for i, t in enumerate(inputs):
            self.name(t, self.graph.placeholder(f"input_{i}"))

    def name(self, value: torch.Tensor, node: fx.Node) -> None:
        node.meta.setdefault("val", value)
        self.known[id(value)] = value, node

    def node(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self.known:  # made outside: a constant
            name = f"constant_{len(self.root._buffers)}"
            self.root.register_buffer(name, x)
            self.name(x, self.graph.create_node("get_attr", name))
        return self.known[id(x)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        nodes, rest = torch.utils._pytree.tree_map(self.node, (tuple(args), dict(named)))
        value = func(*args, **named)
        if func is torch.ops.aten.detach.default:  # nothing requires a gradient here
            self.name(value, self.node(args[0]))
            return value
        call = self.graph.call_function(func, nodes, rest)
        if isinstance(value, torch.Tensor):
            self.name(value, call)
        elif isinstance(value, (tuple, list)):
            call.meta["val"] = value
            for i, v in enumerate(value):
                if isinstance(v, torch.Tensor):
                    self.name(v, self.graph.call_function(getitem, (call, i)))
        return value


def recorded(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """`fn(*inputs)` as a graph, without dead code; each node's value is in its meta["val"]. The inputs are told apart by identity."""
    recorder = _Recorder(inputs)
    with torch.no_grad(), recorder:
        out = fn(*inputs)
    recorder.graph.output(torch.utils._pytree.tree_map(recorder.node, out))
    gm = fx.GraphModule(recorder.root, recorder.graph)
    drop_dead_code(gm)
    return gm
