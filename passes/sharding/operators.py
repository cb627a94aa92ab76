"""An operator's local form: the same one on local operands, or its local lowering."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.micro_batches import Samples
from autopar.graph.graph import Op, Tensor
from autopar.passes import local
from autopar.passes.demands import ORDERS, captured_orders, is_foreign, unmet
from autopar.passes.lay_out import COPIED, copying
from autopar.passes.local.context import Local, Part
from autopar.passes.local.sizes import SIZE_ARG
from autopar.passes.sharding.emit import Emitter
from autopar.passes.sharding.groups import group_name
from autopar.passes.sharding.versions import Versions
from autopar.plan.decisions import Decisions
from autopar.rules import lookup
from autopar.rules.strategy import placements

DRAW = "draw"  # meta of a captured random operator: its number, where that is not its place among them
HOLDS = "holds"  # meta of a node: (name, placement) of the captured values that it is


class Operators:
    """seed: the placeholder of the step's random seed; samples: which part of a batch this is a program of, None for the whole: then the seed's third element is the
    first sample's number."""

    def __init__(self, emit: Emitter, versions: Versions, plan: Decisions, seed: fx.Node, samples: Samples | None = None) -> None:
        self.samples = samples
        self.emit, self.versions, self.plan, self.mesh, self.seed = emit, versions, plan, plan.mesh, seed
        self.random_ops = 0

    def op(self, node: fx.Node, op: Op) -> None:
        choice = self.plan.ops[op.name]
        rule = lookup(op)
        in_shapes = tuple(t.shape for t in op.inputs)
        out_shapes = tuple(None if t is None else t.shape for t in op.outputs)
        want, made = placements(rule, choice.strategy, in_shapes, out_shapes, choice.partial)
        operands = [self.versions.get(t.name, p) for t, p in zip(op.inputs, want, strict=True)]
        try:
            result = self.emitted(node, op, rule, choice.strategy, want, made, operands)
        except (RuntimeError, ValueError):
            # Some operators cannot even say what they give when operands lie otherwise than they demand.
            laid = self.laid_out(node.target, operands, self.arguments(node, operands)[0])
            if laid == operands:
                raise
            result = self.emitted(node, op, rule, choice.strategy, want, made, laid)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if (len(op.outputs) > 1 or isinstance(node.meta["val"], (list, tuple))) and isinstance(result, fx.Node):
            results = [self.emit.call(_torch.getitem, (result, i), {}) if v is not None else None for i, v in enumerate(result.meta["val"])]
        for t, p, r in zip(op.outputs, made, results, strict=True):
            if t is not None and p is not None and r is not None:
                r.meta.setdefault(HOLDS, []).append((t.name, p))
                expected = p.local_shape(self.mesh)
                got = tuple(r.meta["val"].shape)
                assert got == expected, f"{op.target} ({op.name}): local output {got}, placement {p} says {expected}"
                self.versions.put(t.name, p, r)

    def arguments(self, node: fx.Node, operands: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of a captured call, with `operands` where it has tensors."""
        nodes, device = iter(operands), self.emit.options.device

        def operand(x: Any) -> Any:
            if isinstance(x, fx.Node):
                return next(nodes)
            if isinstance(x, (list, tuple)):
                return (
                    type(x)(operand(y) for y in x)
                    if not isinstance(x, fx.immutable_collections.immutable_list)
                    else [operand(y) for y in x]
                )
            if isinstance(x, dict):
                return {k: operand(v) for k, v in x.items()}
            return device if isinstance(x, torch.device) else x

        return operand(tuple(node.args)), {k: operand(v) for k, v in node.kwargs.items()}

    def emitted(self, node: fx.Node, op: Op, rule: Any, strategy: Any, want: Any, made: Any, operands: list[fx.Node]) -> Any:
        """What `op` gives on local operands."""
        args, kwargs = self.arguments(node, operands)
        if local.lookup(op.target) is not None or op.target in SIZE_ARG:
            self.emit.is_random = rule.kind == "random"
            try:
                return self.lowered(node, op, rule, strategy, want, made, operands, args, kwargs, self.emit.is_random)
            finally:
                self.emit.is_random = False
        result = self.emit.call(node.target, args, kwargs)
        if is_foreign(node.target):
            result.meta[ORDERS] = captured_orders(node)
        return result

    def laid_out(self, target: Any, operands: list[fx.Node], args: tuple[Any, ...]) -> list[fx.Node]:
        """`operands`, with copies of those that do not lie as `target` demands."""
        values = fx.map_arg(args, lambda a: a.meta["val"])
        made: dict[fx.Node, fx.Node] = {}
        for i, order in unmet(target, values):
            copy = args[i]
            for call, rest, named in copying(order):
                copy = self.emit.call(call, (copy, *rest), named)
                copy.meta[COPIED] = call is torch.ops.aten.clone.default
            made[args[i]] = copy
        return [made.get(n, n) for n in operands]

    def lowered(
        self,
        node: fx.Node,
        op: Op,
        rule: Any,
        strategy: Any,
        want: Any,
        made: Any,
        operands: list[fx.Node],
        args: Any,
        kwargs: Any,
        is_random: bool,
    ) -> Any:
        axes = list(self.versions.coordinates)
        index = node.meta.get(DRAW, self.random_ops)
        if is_random and op.direction == "forward":
            self.random_ops += 1
        part = None
        if is_random and self.samples is not None and op.name in self.samples.random:
            part = Part(*self.samples.random[op.name], self.samples.samples, self.samples.of, self.samples.parts)
        target = node.target
        assert callable(target)
        extra = [*self.versions.coordinates.values(), self.seed]
        n = len(operands)

        def fn(*tensors: torch.Tensor) -> Any:
            mine = iter(tensors[:n])
            coords = dict(zip(axes, tensors[n : n + len(axes)], strict=True))
            seed = tensors[-1]
            ctx = Local(
                op, rule, self.mesh, strategy, want, made, coords.__getitem__,
                lambda a: group_name(self.emit.options.group_prefix, a), lambda: seed, index, part,
            )  # fmt: skip
            a, k = fx.map_arg((args, kwargs), lambda _: next(mine))
            return local.apply(ctx, target, tuple(a), dict(k))

        key = (op.target, _constants(op), tuple(sorted(strategy.items())), want, made, index if is_random else -1)
        return self.emit.trace(fn, [*operands, *extra], key)


def _constants(op: Op) -> str:
    """The non-tensor arguments, for a cache key (tensors by position)."""

    def text(x: Any) -> str:
        if isinstance(x, Tensor):
            return f"T{x.shape}{x.dtype}"
        if isinstance(x, (tuple, list)):
            return "(" + ",".join(text(y) for y in x) + ")"
        if isinstance(x, dict):
            return "{" + ",".join(f"{k}:{text(v)}" for k, v in x.items()) + "}"
        return repr(x)

    return text(op.args) + text(op.kwargs)
