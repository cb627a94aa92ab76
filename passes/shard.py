"""The shard pass: a graph at global shapes + a plan -> the graph that every rank runs, at local shapes.

Walks the captured graph in order. Every tensor has versions, one per placement it has been brought to; an operand is
taken from the version that is cheapest to turn into what the op's strategy asks for, and the redistribution is inserted once
(later consumers find the version: this is the deduplication of collectives). Then the op's local form is emitted: the
same op on local operands, or its local lowering. Gradients are brought to their parameter's storage right
where their last contribution is computed, so that only one is whole at a time.

Rank-neutral: coordinates and random counters are graph inputs, groups have names that are the same on every rank.
Requires: plan for every op of the graph. Provides: local shapes, `meta["direction"]` and `meta["op"]` (the op it is emitted for) on every
node, `meta["kept"]` on those the plan keeps for backward. Bitwise per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _torch
from autopar.capture.capture import Captured, Role
from autopar.capture.describe import getattr_value, tensor_name
from autopar.graph.calls import OFFLOADED
from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import Step, redistribute
from autopar.passes import local
from autopar.passes.demands import ORDERS, captured_orders, is_foreign, orders
from autopar.passes.lay_out import COPIED, copying
from autopar.passes.local.context import Local
from autopar.passes.local.sizes import SIZE_ARG
from autopar.passes.redistribute import run_step
from autopar.plan.decisions import CollectiveUse, Decisions, ParamChoice
from autopar.rules import lookup
from autopar.rules.strategy import placements
from autopar.tensors.memory_format import FORMATS, Order, contiguous, lies_in, order_of, strides_of

HOLDS = "holds"  # meta of a node: (name, placement) of the captured values that it is


@dataclass(frozen=True)
class Sharded:
    """The local graph. inputs: roles of the placeholders (also "coordinate" and "seed"); outputs: roles of the outputs."""

    gm: fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    collectives: tuple[CollectiveUse, ...]
    fake_mode: Any


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


def group_name(prefix: str, axes: tuple[str, ...]) -> str:
    """The rank-neutral name of the process group over `axes`."""
    return f"{prefix}.{'+'.join(axes)}"


def group_names(gm: fx.GraphModule, prefix: str) -> list[tuple[str, ...]]:
    """The axes of every group that the graph's collectives name, sorted."""
    names = {a for n in gm.graph.nodes for a in n.args if isinstance(a, str) and a.startswith(prefix + ".")}
    return sorted(tuple(n[len(prefix) + 1 :].split("+")) for n in names)


def shard(captured: Captured, graph: Graph, plan: Decisions, options: Options) -> Sharded:
    return _Sharder(captured, graph, plan, options).run()


class _Sharder:
    def __init__(self, captured: Captured, graph: Graph, plan: Decisions, options: Options) -> None:
        self.captured, self.graph, self.plan, self.options = captured, graph, plan, options
        self.mesh: Mesh = plan.mesh
        self.offloaded = plan.offload
        self.mode = captured.fake_mode
        self.out = fx.Graph()
        self.root = torch.nn.Module()
        self.versions: dict[str, dict[Placement, fx.Node]] = {}
        self.primary: dict[str, Placement] = {}
        self.made_in: dict[tuple[str, Placement], str] = {}  # versions that a redistribution made -> direction
        self.direction = "forward"
        self.current = ""  # the op being emitted, or "grad.<parameter>": `meta["op"]` of every node
        self.collectives: list[CollectiveUse] = []
        self.traces: dict[Any, fx.GraphModule] = {}
        self.random_ops = 0
        self.is_random = False  # whether the op being emitted draws random numbers
        self.in_roles: list[Role] = []
        self.coordinates: dict[str, fx.Node] = {}
        self.done_grads: dict[str, fx.Node | None] = {}
        self.formats: dict[str, Order] = {}  # of parameters

    # ---- nodes -----------------------------------------------------------------------------------------------

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

    def trace(self, fn: Callable[..., Any], nodes: Sequence[fx.Node], key: Any) -> Any:
        """Inlines `fn(*nodes)`, written in torch ops; equal keys and operand layouts are traced once."""
        vals = [n.meta["val"] for n in nodes]
        full_key = (key, tuple((tuple(v.shape), v.stride(), v.dtype) for v in vals))
        gm = self.traces.get(full_key)
        if gm is None:
            # make_fx tells its inputs apart by identity, and equal traces share their recorded values: give it fresh ones.
            vals = [_torch.fresh_fake(v, self.mode) for v in vals]
            with self.mode, torch.device(self.options.device), torch.no_grad(), _torch.compiled_when_called():
                gm = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*vals)
            _torch.drop_dead_code(gm)
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

    # ---- versions --------------------------------------------------------------------------------------------

    def put(self, name: str, placement: Placement, node: fx.Node) -> None:
        self.versions[name] = {placement: node}
        self.primary[name] = placement
        self.keep(name, placement, node)

    def keep(self, name: str, placement: Placement, node: fx.Node) -> None:
        """Marks the version that the plan keeps, so that backward does not make it again with an operator that is."""
        if self.direction == "forward" and self.plan.kept.get(name) == placement:
            node.meta["kept"] = True
            if name in self.offloaded:
                node.meta[OFFLOADED] = self.offloaded[name]

    def get(self, name: str, want: Placement) -> fx.Node:
        """The version of `name` in placement `want`, made from the cheapest there is."""
        have = self.versions[name]
        if want in self.sources(name, have):
            return have[want]
        itemsize = next(iter(have.values())).meta["val"].element_size()

        def price(p: Placement) -> float:
            if any(p.reductions.get(a) != r for a, r in want.partial):
                return float("inf")
            return sum(s.wire_bytes(self.mesh, itemsize) + 1e-3 for s in redistribute(p, want, self.mesh))

        source = min(self.sources(name, have), key=price)
        node = have[source]
        for step in redistribute(source, want, self.mesh):
            node = self.step(node, step, name)
            if step.kind == "slice" and self.direction == "forward" and self.plan.kept.get(name) == step.dst:
                node = self.call(torch.ops.aten.clone.default, (node,), {})  # a view of it would keep all of what it was cut from
            have[step.dst] = node
            self.keep(name, step.dst, node)
            self.made_in[name, step.dst] = self.direction
        return node

    def sources(self, name: str, have: dict[Placement, fx.Node]) -> list[Placement]:
        """The versions that may be drawn on: in forward (results are brought to their places last) those made in forward; in backward those the plan keeps,
        those made again, and those made in backward."""
        kept = self.plan.kept.get(name)
        if self.direction == "forward":
            return [p for p in have if self.made_in.get((name, p)) != "backward"]
        if kept is None and name.split(".")[0] not in self.plan.recompute:
            return list(have)
        rerun = self.primary[name] if name.split(".")[0] in self.plan.recompute else None
        return [p for p in have if p in (kept, rerun) or self.made_in.get((name, p)) == "backward"]

    def step(self, node: fx.Node, step: Step, name: str) -> fx.Node:
        self.collectives.append(
            CollectiveUse(step.kind, step.axes, step.wire_bytes(self.mesh, node.meta["val"].element_size()), name, self.direction)
        )
        coords = [self.coordinates[a] for a in step.axes] if step.kind == "slice" else []

        def fn(x: torch.Tensor, *cs: torch.Tensor) -> torch.Tensor:
            at = dict(zip(step.axes, cs, strict=False))
            return run_step(x, step, self.mesh, at.__getitem__, lambda axes: group_name(self.options.group_prefix, axes))

        made = self.trace(fn, [node, *coords], ("step", step))
        assert isinstance(made, fx.Node)
        return made

    # ---- ops -------------------------------------------------------------------------------------------------

    def op(self, node: fx.Node, op: Op) -> None:
        choice = self.plan.ops[op.name]
        rule = lookup(op)
        in_shapes = tuple(t.shape for t in op.inputs)
        out_shapes = tuple(None if t is None else t.shape for t in op.outputs)
        want, made = placements(rule, choice.strategy, in_shapes, out_shapes, choice.partial)
        operands = [self.get(t.name, p) for t, p in zip(op.inputs, want, strict=True)]
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
            results = [self.call(_torch.getitem, (result, i), {}) if v is not None else None for i, v in enumerate(result.meta["val"])]
        for t, p, r in zip(op.outputs, made, results, strict=True):
            if t is not None and p is not None and r is not None:
                r.meta.setdefault(HOLDS, []).append((t.name, p))
                expected = p.local_shape(self.mesh)
                got = tuple(r.meta["val"].shape)
                assert got == expected, f"{op.target} ({op.name}): local output {got}, placement {p} says {expected}"
                self.put(t.name, p, r)

    def arguments(self, node: fx.Node, operands: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of a captured call, with `operands` where it has tensors."""
        nodes, device = iter(operands), self.options.device

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
            self.is_random = rule.kind == "random"
            try:
                return self.lowered(node, op, rule, strategy, want, made, operands, args, kwargs, self.is_random)
            finally:
                self.is_random = False
        result = self.call(node.target, args, kwargs)
        if is_foreign(node.target):
            result.meta[ORDERS] = captured_orders(node)
        return result

    def laid_out(self, target: Any, operands: list[fx.Node], args: tuple[Any, ...]) -> list[fx.Node]:
        """`operands`, with copies of those that do not lie as `target` demands."""
        values = fx.map_arg(args, lambda a: a.meta["val"])
        made: dict[fx.Node, fx.Node] = {}
        for i, order in orders(target, values):
            if not lies_in(values[i], order):
                copy = args[i]
                for call, rest, named in copying(order):
                    copy = self.call(call, (copy, *rest), named)
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
        axes = list(self.coordinates)
        index = self.random_ops
        if is_random and op.direction == "forward":
            self.random_ops += 1
        target = node.target
        assert callable(target)
        extra = [*self.coordinates.values(), self.seed]
        n = len(operands)

        def fn(*tensors: torch.Tensor) -> Any:
            mine = iter(tensors[:n])
            coords = dict(zip(axes, tensors[n : n + len(axes)], strict=True))
            seed = tensors[-1]
            ctx = Local(
                op, rule, self.mesh, strategy, want, made, coords.__getitem__,
                lambda a: group_name(self.options.group_prefix, a), lambda: seed, index,
            )  # fmt: skip
            a, k = fx.map_arg((args, kwargs), lambda _: next(mine))
            return local.apply(ctx, target, tuple(a), dict(k))

        key = (op.target, _constants(op), tuple(sorted(strategy.items())), want, made, index if is_random else -1)
        return self.trace(fn, [*operands, *extra], key)

    # ---- parameters ------------------------------------------------------------------------------------------

    def param_entry(self, name: str, tensor: Tensor, choice: ParamChoice, node: fx.Node) -> None:
        dtype = getattr(torch, tensor.dtype)
        if node.meta["val"].dtype != dtype:
            node = self.call(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        if choice.padded == choice.shape:
            self.put(tensor.name, choice.storage, node)
            return
        whole, axes = choice.storage, _padded_axes(choice)
        for a in axes:
            whole = whole.with_axis(a, None)
        self.put("padded." + tensor.name, choice.storage, node)
        node = self.get("padded." + tensor.name, whole)
        for dim, (n, m) in enumerate(zip(choice.shape, choice.padded, strict=True)):
            if n != m:
                node = self.call(torch.ops.aten.slice.Tensor, (node, dim, 0, n), {})
        self.put(tensor.name, Placement(choice.shape, whole.splits, whole.partial), node)

    def finish_grad(self, param: str, name: str) -> None:
        """Brings a gradient to its parameter's storage placement and dtype, summed over ranks."""
        choice = self.plan.params[param]
        primary = self.primary[name]
        node = self.versions[name][primary]
        storage_dtype = self.options.storage[param]
        reduce_dtype = self.options.reduce or node.meta["val"].dtype
        key = self.current = f"grad.{param}"
        if node.meta["val"].dtype != reduce_dtype:
            node = self.call(torch.ops.aten._to_copy.default, (node,), {"dtype": reduce_dtype})
        if self.options.accumulated:
            node = self.call(torch.ops.aten.add.Tensor, (node, self.accumulated[param]), {})
        if not self.options.sync:
            self.done_grads[param] = node
            return
        self.put(key, primary, node)
        storage = choice.storage
        if choice.padded != choice.shape:
            middle = Placement(choice.shape, storage.splits)
            for a in _padded_axes(choice):
                middle = middle.with_axis(a, "sum" if primary.reductions.get(a) else None)
            node = self.get(key, middle)
            pad: list[int] = []
            for n, m in reversed(list(zip(choice.shape, choice.padded, strict=True))):
                pad += [0, m - n]
            node = self.call(torch.ops.aten.constant_pad_nd.default, (node, pad, 0.0), {})
            self.put(key, Placement(choice.padded, middle.splits, middle.partial), node)
        node = self.get(key, storage)
        if node.meta["val"].dtype != storage_dtype:
            node = self.call(torch.ops.aten._to_copy.default, (node,), {"dtype": storage_dtype})
        format = FORMATS.get(self.formats[param])
        if format is not None and not lies_in(node.meta["val"], self.formats[param]):
            node = self.call(torch.ops.aten.clone.default, (node,), {"memory_format": format})  # as autograd leaves it for an optimizer
        self.done_grads[param] = node

    # ---- the walk --------------------------------------------------------------------------------------------

    def run(self) -> Sharded:
        graph, plan, options = self.graph, self.plan, self.options
        nodes = list(self.captured.gm.graph.nodes)
        by_name = {o.name: o for o in graph.ops}
        # As `graph.ops`: what forward would find first among versions could have been made in backward else.
        nodes.sort(key=lambda n: n.name in by_name and by_name[n.name].direction == "backward")
        entries = []
        places = iter(self.captured.inputs)
        for node in (n for n in nodes if n.op == "placeholder"):
            role = next(places)
            val = node.meta["val"]
            if role.kind == "param":
                choice = plan.params[role.name]
                shape = choice.storage.local_shape(self.mesh)
                new = self.placeholder(node.name, shape, options.storage[role.name], role, order_of(val))
                self.formats[role.name] = order_of(val)
                entries.append((role.name, graph.params[role.name], choice, new))
                continue
            placement = Placement.of(tuple(val.shape))
            if role.kind == "input":
                placement = plan.inputs[role.index]
            elif role.kind == "tangent" and role.index >= 0:
                placement = plan.outputs[role.index]
            local_shape = placement.local_shape(self.mesh)
            self.put(node.name, placement, self.placeholder(node.name, local_shape, val.dtype, role, order_of(val)))
        self.accumulated: dict[str, fx.Node] = {}
        for a in self.mesh.axes:
            if a.size > 1:
                name = "coordinate_" + a.name.replace(".", "_")
                self.coordinates[a.name] = self.placeholder(name, (), torch.int64, Role("coordinate", a.name))
        self.seed = self.placeholder("seed", (2,), torch.int64, Role("seed"))
        pending = {t.name: (p, t, c, n) for p, t, c, n in entries}
        grad_of: dict[str, list[str]] = {}
        for p, name in graph.grads.items():
            grad_of.setdefault(name, []).append(p)
        given = {
            tensor_name(n): self.given_at(r, n)
            for r, n in self.results()
            if r.kind in ("output", "buffer_update") and isinstance(n, fx.Node)
        }
        if options.accumulated:
            for p, (shape, dtype) in unreduced_grads(self.captured, graph, plan, options).items():
                self.accumulated[p] = self.placeholder("accumulated_" + p.replace(".", "_"), shape, dtype, Role("accumulated", p))
        for node in nodes:
            if node.op == "get_attr":
                value = getattr_value(self.captured.gm, node)
                self.put(node.name, Placement.of(tuple(value.shape)), self.constant(value))
            if node.op != "call_function" or _torch.is_getitem(node):
                continue
            op = by_name[node.name]
            self.direction, self.current = op.direction, op.name
            for t in op.inputs:
                if t.name in pending:
                    self.param_entry(*pending.pop(t.name))
            self.op(node, op)
            self.current = "output"
            made = [t.name for t in op.outputs if t is not None]
            for name in made if op.direction == "forward" else ():
                if name in given:
                    self.get(name, given[name])  # here and not at the end: made for backward first, it would be no result of forward
            for name in made:
                for p in grad_of.get(name, ()):
                    self.finish_grad(p, name)
        return self.outputs()

    def results(self) -> list[tuple[Role, Any]]:
        """What the captured graph gives, by role."""
        return list(zip(self.captured.outputs, _torch.results_of(self.captured.gm.graph), strict=True))

    def given_at(self, role: Role, node: fx.Node) -> Placement:
        if role.kind == "output":
            return self.plan.outputs[role.index]
        if role.kind == "input_grad":
            return self.plan.inputs[role.index]
        return Placement.of(self.graph.tensors[tensor_name(node)].shape)

    def outputs(self) -> Sharded:
        results: list[fx.Node | None] = []
        roles: list[Role] = []
        for role, n in self.results():
            if role.kind == "grad":
                if n is None:
                    results.append(None)
                else:
                    if role.name not in self.done_grads:
                        self.direction = "backward"
                        self.finish_grad(role.name, tensor_name(n))
                    results.append(self.done_grads[role.name])
            elif not isinstance(n, fx.Node):
                results.append(None)
            else:
                self.direction, self.current = "backward" if role.kind == "input_grad" else "forward", "output"
                results.append(self.get(tensor_name(n), self.given_at(role, n)))
            roles.append(role)
        self.out.output(tuple(results))
        gm = fx.GraphModule(self.root, self.out)
        _torch.drop_dead_code(gm)
        gm.graph.lint()
        return Sharded(gm, tuple(self.in_roles), tuple(roles), tuple(self.collectives), self.mode)


def unreduced_grads(captured: Captured, graph: Graph, plan: Decisions, options: Options) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Local shape and dtype of every gradient before its reduction: what `no_sync` accumulates."""
    out = {}
    by_name = {o.name: o for o in graph.ops}
    for p, name in graph.grads.items():
        op = by_name[name.split(".")[0]]
        choice = plan.ops[op.name]
        _, made = placements(
            lookup(op),
            choice.strategy,
            tuple(t.shape for t in op.inputs),
            tuple(None if t is None else t.shape for t in op.outputs),
            choice.partial,
        )
        i = next(i for i, t in enumerate(op.outputs) if t is not None and t.name == name)
        placement = made[i]
        assert placement is not None
        dtype = options.reduce or getattr(torch, graph.tensors[name].dtype)
        out[p] = (placement.local_shape(plan.mesh), dtype)
    return out


def _padded_axes(choice: ParamChoice) -> list[str]:
    dims = [d for d, (n, m) in enumerate(zip(choice.shape, choice.padded, strict=True)) if n != m]
    return [s.axis for s in choice.storage.splits if s.dim in dims]


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
