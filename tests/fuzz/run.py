"""Runs a program's step: plain eager PyTorch, `autopar.compile` on one process, a rewritten graph on simulated ranks."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.capture import Call, Captured, Role
from autopar.cost import Cost
from autopar.distributed.shards import cut, join
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.kernels.random import EagerRandom
from autopar.offload import OffloadSettings, close_store, open_store
from autopar.passes.manager import overlap
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.propagate import propagate
from autopar.runtime.lower import lower
from autopar.solver.solve import Limits
from tests.fuzz.dense import Dense
from tests.fuzz.names import randn
from tests.fuzz.program import Loaded, load
from tests.fuzz.settings import Setting, accumulating, randomly, size_of, with_policies
from tests.spmd.exchange import exchanges
from tests.spmd.simulate import STORE, Prepared, Simulated, fake_world, simulated
from tests.spmd.test_planned import cluster

SEED = (7, 0)


@dataclass
class Result:
    """What a step leaves: results leaf by leaf, gradients (of inputs by position), buffers and inputs as they are afterwards."""

    leaves: list[Any]
    spec: str | None = None  # None: not known
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[torch.Tensor] | None = None
    requires: list[bool] | None = None


def weight(i: int, like: torch.Tensor) -> torch.Tensor:
    """The gradient that comes in at output `i`."""
    return randn(900 + i, *like.shape, dtype=like.dtype if like.is_floating_point() else torch.float64)


def _whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _stepped(model: nn.Module, out: Any, tensors: list[torch.Tensor]) -> Result:
    leaves, spec = pytree.tree_flatten(out)
    loss = None
    for i, o in enumerate(leaves):
        if isinstance(o, torch.Tensor) and o.requires_grad and (o.is_floating_point()):
            term = (_whole(o).double() * weight(i, o).double()).sum()
            loss = term if loss is None else loss + term
    plain = [_whole(o).detach().clone() if isinstance(o, torch.Tensor) else o for o in leaves]
    requires = [isinstance(o, torch.Tensor) and o.requires_grad and not _claims(o) for o in leaves]
    if loss is not None:
        loss.backward()

    def held(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else _whole(t).detach().clone()

    result = Result(
        plain, str(spec), {n: held(p.grad) for n, p in model.named_parameters()}, [held(t.grad) if t.is_leaf else None for t in tensors],
        {n: _whole(b).detach().clone() for n, b in model.named_buffers()}, [t.detach().clone() for t in tensors], requires,
    )  # fmt: skip
    _changed_one_by_one(model, tensors)
    return result


def _changed_one_by_one(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Clipping, scaling and a second backward change gradients in place: none may lie where another does, nor where a parameter, a buffer or an input is."""
    owners = {f"parameter {n}": p for n, p in model.named_parameters()} | {f"input {i}": t for i, t in enumerate(tensors) if t.is_leaf}
    # Of a tensor that is expanded, eager's gradient may be, too.
    owners = {n: t for n, t in owners.items() if t.grad is not None and _is_dense(t)}
    others = {f"the value of {n}": t for n, t in (*owners.items(), *model.named_buffers())}
    once = {id(t): (n, t.grad) for n, t in reversed(owners.items())}
    want = {n: _whole(g).detach().clone() + 1 for n, g in once.values() if g is not None}
    before = {n: _whole(t).detach().clone() for n, t in others.items()}
    with torch.no_grad():
        for n, g in once.values():
            assert g is not None
            try:
                g.add_(1)
            except RuntimeError as e:
                # Zeros that eager's autograd never wrote down lie nowhere.
                if isinstance(g, DTensor) or "ZeroTensors are immutable" not in str(e):
                    raise
                del want[n]
    for now, then in (({n: g for n, g in once.values() if n in want}, want), (others, before)):
        for n, t in now.items():
            assert t is not None and torch.equal(_whole(t.detach()).nan_to_num(), then[n].nan_to_num()), (
                f"the gradient of {n} changed with another's"
            )


def _is_dense(t: torch.Tensor) -> bool:
    at = 1
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda x: x[1]):
        if size != 1 and stride != at:
            return False
        at *= size
    return True


def _claims(t: torch.Tensor) -> bool:
    """Whether it says that it requires a gradient and has no way back: a view made under no_grad of what requires one."""
    return t._is_view() and t.grad_fn is None and t._base is not None and t._base.requires_grad


def _made(loaded: Loaded) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    torch.manual_seed(SEED[0])
    model = loaded.make().train(loaded.train)
    args, kwargs = loaded.make_inputs()
    return model, args, kwargs, list(Call.of(args, kwargs).tensors)


def eager(source: str, dtype: str | None = None, dense: bool = False) -> Result:
    """dense: with operands that lie dense, whatever made them."""
    loaded = load(source, dtype)
    model, args, kwargs, tensors = _made(loaded)
    with Dense() if dense else contextlib.nullcontext():
        with EagerRandom(*SEED):
            out = model(*args, **kwargs)
        return _stepped(model, out, tensors)


class Trial:
    """A program under test: captured once, by `autopar.compile` on one process, for all settings."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.loaded = load(source)
        self.captured: tuple[Captured, Graph] | None = None

    def run(self, setting: Setting) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.on_ranks(setting) if setting.mesh else self.on_one(setting)

    def on_one(self, setting: Setting) -> Result:
        with fake_world(1):
            model, args, kwargs, tensors = _made(self.loaded)
            ours = autopar.compile(model, (1,), layout=setting.layout, backend=setting.backend, outputs="all")
            out = ours(*args, **kwargs)
            step = next(iter(ours._programs.steps()))
            self.captured = step.captured, step.graph
            return _stepped(ours, out, tensors)

    def capture(self) -> tuple[Captured, Graph]:
        if self.captured is None:
            with fake_world(1):
                model, args, kwargs, _ = _made(self.loaded)
                step = autopar.compile(model, (1,), layout="fsdp", backend="aot_eager", outputs="all").prepare(*args, **kwargs)
                self.captured = step.captured, step.graph
        return self.captured

    def on_ranks(self, setting: Setting) -> Result:
        captured, graph = self.capture()
        model, _, _, tensors = _made(self.loaded)
        # Ranks run what was captured: a model whose state a call has not changed yet.
        prepared = Prepared(model, captured, graph, tuple(tensors))
        plan = plan_of(prepared, setting)
        with fake_world(size_of(setting.mesh)), _store(plan):
            if setting.accumulated < 0:
                return _ranks(simulated(prepared, setting.mesh, plan, fuses=False), model, tensors)
            earlier = simulated(prepared, setting.mesh, plan, fuses=False, accumulates=(False, False))
            return _ranks(simulated(prepared, setting.mesh, plan, fuses=False, accumulates=(True, True)), model, tensors, earlier)


def plan_of(p: Prepared, s: Setting) -> Plan:
    plan = _plan_of(p, s)
    return plan if s.accumulated < 0 else accumulating(p.graph, plan, s.accumulated)


def _plan_of(p: Prepared, s: Setting) -> Plan:
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    if s.layout == "plan":
        setting = TrainingConfig(trainable, least_bytes=1.0, fuses=False)
        cluster_ = cluster(size_of(s.mesh))
        limits = Limits(gap=0.05, seconds=10)
        plan = plan_graph(p.graph, s.mesh, cluster_, setting, limits).plan
        if s.memory == "least":
            try:
                plan_graph(p.graph, s.mesh, cluster_, replace(setting, budget_bytes=10.0), limits)
            except InfeasibleError as e:
                with contextlib.suppress(InfeasibleError):
                    budget = 1.02 * (10.0 + e.shortfall_bytes)
                    plan = plan_graph(p.graph, s.mesh, cluster_, replace(setting, budget_bytes=budget), limits).plan
        return plan
    mesh = Mesh.of(s.mesh)
    layout = s.layout if s.layout != "random" else "fsdp+tp" if len(s.mesh) > 1 else "fsdp"
    plan = propagate(p.graph, Layout.of(layout, mesh), s.mesh, trainable)
    if s.layout == "random":
        plan = randomly(p.graph, plan, s.seed)
    return with_policies(p.graph, plan, s.recompute, s.offloaded)


@contextlib.contextmanager
def _store(plan: Plan) -> Iterator[None]:
    if not plan.offload:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        open_store(STORE, OffloadSettings(10**9, folder, 10**9))
        try:
            yield
        finally:
            close_store(STORE)


def _ranks(sim: Simulated, model: nn.Module, tensors: list[torch.Tensor], earlier: Simulated | None = None) -> Result:
    """The step on all ranks, put together. earlier: the same step, whose gradients the step adds to its own; then these are half of that."""
    mesh, n, captured = sim.mesh, sim.mesh.size, sim.captured
    at = [mesh.coordinates(r) for r in range(n)]
    # Links so slow that all there is to join is joined.
    sim.parts = overlap(sim.parts, "sim", Cost(Cluster.of(f"cpu:1x{n}"), mesh))
    params, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers(remove_duplicate=False))
    values = sim.values(params, buffers, tuple(t.detach() for t in tensors), SEED)
    for x, r in zip(captured.gm.graph.nodes, captured.inputs, strict=False):
        if r.kind == "tangent":
            p = sim.plan.outputs[r.index]
            whole = weight(r.index, torch.empty(p.shape, dtype=x.meta["val"].dtype))
            values[r] = LocalTensor({k: cut(whole, p, mesh, at[k]).clone() for k in range(n)})
    if earlier is not None:
        earlier.parts = overlap(earlier.parts, "sim", Cost(Cluster.of(f"cpu:1x{n}"), mesh))
        waiting = zip(earlier.parts.backward_outputs, _halves(earlier, values)[1], strict=False)
        values |= {Role("accumulated", r.name): t for r, t in waiting if r.kind == "grad" and t is not None}
    results, grads = _halves(sim, values)

    def ranks(t: Any) -> dict[int, torch.Tensor]:
        return {r: t._local_tensors[r] if isinstance(t, LocalTensor) else t for r in range(n)}

    outputs = sim.parts.forward_outputs
    count = 1 + max([*captured.constants, *(r.index for r in outputs if r.kind == "output")], default=-1)
    leaves: list[Any] = [captured.constants.get(i) for i in range(count)]
    updated = {name: b.detach().clone() for name, b in model.named_buffers()}
    for role, t in zip(outputs, results, strict=True):
        if role.kind == "output" and t is not None:
            leaves[role.index] = _joined(ranks(t), sim.plan.outputs[role.index], mesh)
        elif role.kind == "buffer_update":
            each = ranks(t)
            assert all(torch.equal(each[r], each[0]) for r in range(n)), f"replicas of buffer {role.name} differ"
            updated[role.name] = each[0]
    found: dict[str, torch.Tensor | None] = {name: None for name in dict(model.named_parameters())}
    input_grads: list[torch.Tensor | None] = [None] * len(tensors)
    for role, t in zip(sim.parts.backward_outputs, grads, strict=True):
        if t is None:
            continue
        if role.kind == "grad":
            c = sim.plan.params[role.name]
            whole = _joined(ranks(t), c.storage, mesh)
            found[role.name] = whole[tuple(slice(0, m) for m in c.shape)] / (1 if earlier is None else 2)
        elif role.kind == "input_grad":
            input_grads[role.index] = _joined(ranks(t), sim.plan.inputs[role.index], mesh)
    return Result(leaves, None, found, _handed_back(input_grads, tensors), updated)


def _halves(sim: Simulated, values: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """What forward and backward give, on all ranks."""
    parts = sim.parts
    forward = lower(parts.forward, backend="aot_eager", fake_mode=None).fn
    with torch.no_grad(), LocalTensorMode(sim.mesh.size), exchanges(sim.mesh):
        out = forward([values[r] for r in parts.forward_inputs])
        k = len(parts.forward_outputs)
        if parts.backward is None:
            return out[:k], []
        backward = lower(parts.backward, backend="aot_eager", fake_mode=None).fn
        return out[:k], backward([*out[k:], *(values[r] for r in parts.backward_inputs)])


def _handed_back(grads: list[torch.Tensor | None], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What the caller's tensors get: one that is passed twice the sum, one that is a view gives its gradient on."""
    for t, g in zip(tensors, grads, strict=True):
        if g is not None:
            t.backward(g, retain_graph=True)
    return [None if not t.is_leaf or t.grad is None else t.grad.clone() for t in tensors]


def _joined(each: dict[int, torch.Tensor], placement: Any, mesh: Mesh) -> torch.Tensor:
    local = tuple(placement.local_shape(mesh))
    assert all(tuple(t.shape) == local for t in each.values()), f"a rank has {tuple(each[0].shape)}, not {local}"
    return join(each, placement, mesh)
