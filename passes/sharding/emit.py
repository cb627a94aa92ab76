"""The graph that is being made: nodes with their values on fake tensors, stamped with the operator they are made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.capture.describe import getattr_value
from autopar.graph.calls import MOVES
from autopar.tensors.memory_format import Order, contiguous, strides_of


@dataclass(frozen=True)
class Options:
    """device of the target; storage: dtype of a stored parameter by name; reduce: dtype gradients are reduced in (None: as computed);
    sync: reduce gradients (False: leave them unreduced, as `no_sync`); accumulated: add the buffers of earlier unreduced gradients.
    """

    device: torch.device
    storage: dict[str, torch.dtype]
    group_prefix: str
    reduce: torch.dtype | None = None
    sync: bool = True
    accumulated: bool = False


class Emitter:
    """direction, current: of what is emitted now, an operator's name or "grad.<parameter>". in_roles: of the placeholders so far."""

    def __init__(self, mode: Any, options: Options) -> None:
        self.mode, self.options = mode, options
        self.out = fx.Graph()
        self.root = torch.nn.Module()
        self.direction, self.current = "forward", ""
        self.is_random = False  # whether the op being emitted draws random numbers
        self.is_moving = False  # whether what is emitted brings a tensor to another placement
        self.in_roles: list[Role] = []
        self.traces: dict[Any, fx.GraphModule] = {}

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype, role: Role, order: Order | None = None) -> fx.Node:
        """order: the format of the whole (contiguous where not given), which is that of every shard."""
        node = self.out.placeholder(name)
        strides = strides_of(shape, order or contiguous(len(shape)))
        with self.mode:
            node.meta["val"] = torch.empty_strided(tuple(shape), strides, dtype=dtype, device=self.options.device)
        node.meta["direction"] = "backward" if role.kind in ("tangent", "accumulated") else "forward"
        self.in_roles.append(role)
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        vals = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            val = target(*vals[0], **vals[1])
        node = self.out.call_function(target, args, kwargs)
        node.meta["val"] = val
        self.stamp(node)
        return node

    def stamp(self, node: fx.Node) -> None:
        node.meta["direction"], node.meta["op"] = self.direction, self.current
        if self.is_random:
            node.meta["random"] = True
        if self.is_moving:
            node.meta[MOVES] = True

    def trace(self, fn: Callable[..., Any], nodes: Sequence[fx.Node], key: Any) -> Any:
        """Inlines `fn(*nodes)`, written in torch ops; equal keys and operand layouts are traced once."""
        vals = [n.meta["val"] for n in nodes]
        full_key = (key, tuple((tuple(v.shape), v.stride(), v.dtype) for v in vals))
        gm = self.traces.get(full_key)
        if gm is None:
            # Inputs are told apart by identity, and equal traces share their recorded values: give it fresh ones.
            vals = [_torch.fresh_fake(v, self.mode) for v in vals]
            with self.mode, torch.device(self.options.device), _torch.compiled_when_called():
                gm = _torch.recorded(fn, vals)
            self.traces[full_key] = gm
        env: dict[fx.Node, Any] = {}
        inputs = iter(nodes)
        for n in gm.graph.nodes:
            if n.op == "placeholder":
                env[n] = next(inputs)
            elif n.op == "output":
                return fx.map_arg(n.args[0], lambda m: env[m])
            elif n.op == "get_attr":
                env[n] = self.constant(getattr_value(gm, n))
            else:
                args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: env[m])
                new = self.out.call_function(n.target, tuple(args), dict(kwargs))
                new.meta["val"] = n.meta["val"]
                self.stamp(new)
                env[n] = new
        raise AssertionError("no output")

    def constant(self, value: torch.Tensor) -> fx.Node:
        name = f"constant_{len(list(self.root.named_buffers()))}"
        self.root.register_buffer(name, value.to(self.options.device) if not _torch.is_fake(value) else value)
        node = self.out.get_attr(name)
        with self.mode:
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.options.device)
        node.meta["direction"] = "forward"
        return node
