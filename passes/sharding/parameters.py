"""Parameters from their storage to what is computed with, and gradients back to it."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph.graph import Tensor
from autopar.graph.placement import Placement
from autopar.passes.sharding.emit import Emitter
from autopar.passes.sharding.versions import Versions
from autopar.plan.decisions import Decisions, ParamChoice
from autopar.tensors.memory_format import FORMATS, Order, lies_in


class Parameters:
    """formats: how each lies in memory. accumulated: the placeholders of earlier gradients. done_grads: what gradients became."""

    def __init__(self, emit: Emitter, versions: Versions, plan: Decisions) -> None:
        self.emit, self.versions, self.plan = emit, versions, plan
        self.formats: dict[str, Order] = {}
        self.accumulated: dict[str, fx.Node] = {}
        self.done_grads: dict[str, fx.Node | None] = {}

    def enter(self, name: str, tensor: Tensor, choice: ParamChoice, node: fx.Node) -> None:
        dtype = getattr(torch, tensor.dtype)
        if node.meta["val"].dtype != dtype:
            node = self.emit.call(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        if choice.padded == choice.shape:
            self.versions.put(tensor.name, choice.storage, node)
            return
        whole, axes = choice.storage, _padded_axes(choice)
        for a in axes:
            whole = whole.with_axis(a, None)
        self.versions.put("padded." + tensor.name, choice.storage, node)
        node = self.versions.get("padded." + tensor.name, whole)
        for dim, (n, m) in enumerate(zip(choice.shape, choice.padded, strict=True)):
            if n != m:
                node = self.emit.call(torch.ops.aten.slice.Tensor, (node, dim, 0, n), {})
        self.versions.put(tensor.name, Placement(choice.shape, whole.splits, whole.partial), node)

    def finish(self, param: str, name: str) -> None:
        """Brings a gradient to its parameter's storage placement and dtype, summed over ranks."""
        choice, options = self.plan.params[param], self.emit.options
        at = self.versions.primary[name]
        node = self.versions.versions[name][at]
        reduce_dtype = options.reduce or node.meta["val"].dtype
        key = self.emit.current = f"grad.{param}"
        if node.meta["val"].dtype != reduce_dtype:
            node = self.emit.call(torch.ops.aten._to_copy.default, (node,), {"dtype": reduce_dtype})
        if choice.accumulated == choice.storage:
            node = self.stored(key, choice, at, node, options.storage[param])
            node = self.with_earlier(param, node)
        else:
            if choice.accumulated is not None:
                self.versions.put(key, at, node)
                at = choice.accumulated
                node = self.versions.get(key, at)
            node = self.with_earlier(param, node)
            if options.sync:
                node = self.stored(key, choice, at, node, options.storage[param])
        format = FORMATS.get(self.formats[param])
        is_stored = options.sync or choice.accumulated == choice.storage
        if is_stored and format is not None and not lies_in(node.meta["val"], self.formats[param]):
            node = self.emit.call(
                torch.ops.aten.clone.default, (node,), {"memory_format": format}
            )  # as autograd leaves it for an optimizer
        self.done_grads[param] = node

    def with_earlier(self, param: str, node: fx.Node) -> fx.Node:
        """With the gradients of earlier micro-batches, if there are any."""
        if not self.emit.options.accumulated:
            return node
        return self.emit.call(torch.ops.aten.add.Tensor, (node, self.accumulated[param]), {})

    def stored(self, key: str, choice: ParamChoice, at: Placement, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A gradient that lies at `at`, as its parameter is stored."""
        self.versions.put(key, at, node)
        storage = choice.storage
        if choice.padded != choice.shape:
            middle = Placement(choice.shape, storage.splits)
            for a in _padded_axes(choice):
                middle = middle.with_axis(a, "sum" if at.reductions.get(a) else None)
            node = self.versions.get(key, middle)
            pad: list[int] = []
            for n, m in reversed(list(zip(choice.shape, choice.padded, strict=True))):
                pad += [0, m - n]
            node = self.emit.call(torch.ops.aten.constant_pad_nd.default, (node, pad, 0.0), {})
            self.versions.put(key, Placement(choice.padded, middle.splits, middle.partial), node)
        node = self.versions.get(key, storage)
        if node.meta["val"].dtype != dtype:
            node = self.emit.call(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        return node


def _padded_axes(choice: ParamChoice) -> list[str]:
    dims = [d for d, (n, m) in enumerate(zip(choice.shape, choice.padded, strict=True)) if n != m]
    return [s.axis for s in choice.storage.splits if s.dim in dims]
