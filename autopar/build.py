"""Makes steps for a ParallelModule, and puts its parameters where the plan stores them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DPlacement

from autopar import _torch
from autopar.capture import Call, capture
from autopar.describe import describe
from autopar.errors import AutoparError, CaptureError
from autopar.graph import Tensor
from autopar.groups import Groups
from autopar.init import distribute, materialize
from autopar.layout import Layout
from autopar.lower import CompileOnce
from autopar.placement import Placement
from autopar.plan import ParamChoice, Plan
from autopar.propagate import propagate
from autopar.rules import targets
from autopar.shards import dtensor_placements
from autopar.step import Settings, Step
from autopar.storage import param_choice


@dataclass(frozen=True)
class Precision:
    """param: dtype float32 parameters are gathered and computed in; reduce: dtype gradients are reduced in."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @staticmethod
    def of(p: Precision | str | torch.dtype | None) -> Precision:
        if p is None or isinstance(p, Precision):
            return p or Precision()
        dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "float32": None}
        if isinstance(p, str):
            if p not in dtypes:
                raise AutoparError(
                    f"unknown precision {p!r}", fix=f"use one of {', '.join(dtypes)}, a torch dtype or autopar.Precision(...)"
                )
            found = dtypes[p]
        else:
            found = p
        return Precision(found, torch.float32) if found is not None else Precision()


@dataclass(frozen=True)
class Config:
    """The arguments of `autopar.compile`."""

    loss_fn: Callable[..., Any] | None
    inputs: str
    layout: str | Layout
    precision: Precision
    optimizer: Any
    grad_accumulation: int
    backend: str
    outputs: str


def refuse_unknown_random(gm: fx.GraphModule) -> None:
    """A random op without a rule would draw from torch's own generator: ranks would silently differ."""
    for n in gm.graph.nodes:
        if _torch.draws_random(n) and str(n.target) not in targets():
            raise CaptureError(
                f"{n.target} draws random numbers, and autopar has no counter-based form of it",
                where=(n.meta.get("stack_trace") or "").strip().splitlines()[-1] if n.meta.get("stack_trace") else n.name,
                fix="draw the numbers outside the model and pass them in, or use rand, randn, randint, bernoulli or dropout",
            )


class Builder:
    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, config: Config) -> None:
        self.model, self.device_mesh, self.config = model, device_mesh, config
        self.groups = Groups(device_mesh)
        self.mesh = self.groups.mesh
        self.layout = Layout.of(config.layout, self.mesh)
        self.plan: Plan | None = None
        kind = device_mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.once = CompileOnce() if config.backend == "inductor" else None
        self.coordinates: dict[str, torch.Tensor] = {}

    # ---- parameters ------------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """Every parameter becomes a DTensor, in the placement that is right for all layouts that do not split tensors."""
        layout = self.layout
        if layout.tensor:
            every = tuple(a.name for a in self.mesh.axes if a.size > 1)
            layout = Layout(data=every, shard=every)

        def placements(name: str, shape: tuple[int, ...]) -> tuple[DPlacement, ...]:
            choice = param_choice(Tensor(name, tuple(shape), "float32"), Placement.of(tuple(shape)), layout, self.mesh, True)
            return dtensor_placements(choice.storage, self.mesh)

        # No list of them: it would keep every whole parameter alive while they are cut one by one.
        if any(t.is_meta for t in itertools.chain(self.model.parameters(), self.model.buffers())):
            materialize(self.model, self.device_mesh, placements, torch.initial_seed(), self.device)
        else:
            distribute(self.model, self.device_mesh, placements)
        if self.device.type != "cpu":
            for m in self.model.modules():
                for n, b in m._buffers.items():
                    if b is not None:
                        m._buffers[n] = b.to(self.device)

    def settle(self, choices: dict[str, ParamChoice]) -> None:
        """Moves parameters (and gradients) to the plan's storage, in place: optimizers keep their references."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        for name, choice in choices.items():
            p = params[name]
            want = dtensor_placements(choice.storage, self.mesh)
            assert isinstance(p, DTensor)
            if p.placements == want:
                continue
            grad = p.grad
            p.grad = None
            with torch.no_grad():
                moved = nn.Parameter(p.detach().redistribute(self.device_mesh, want), requires_grad=p.requires_grad)
            _torch.swap_parameter(p, moved)
            if isinstance(grad, DTensor):
                p.grad = grad.redistribute(self.device_mesh, want)

    # ---- steps -----------------------------------------------------------------------------------------------

    def build(
        self,
        call: Call,
        shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...],
        grad: bool,
        autocast: torch.dtype | None,
    ) -> Step:
        """Captures and lowers one kind of call; the first one makes the plan that the others follow."""
        config = self.config
        captured = capture(
            self.model, call, shapes,
            loss_fn=config.loss_fn, loss_only=config.outputs == "loss" and self.model.training, grad=grad,
            cast=config.precision.param, autocast=autocast,
        )  # fmt: skip
        graph = describe(captured)
        refuse_unknown_random(captured.gm)
        params = dict(self.model.named_parameters(remove_duplicate=False))
        trainable = frozenset(n for n in graph.params if params[n].requires_grad)
        fixed = self.plan.params if self.plan else {}
        plan = propagate(graph, self.layout, self.groups.axes, trainable, fixed)
        self.settle({n: c for n, c in plan.params.items() if n not in fixed})
        storage = {n: params[n].dtype for n in graph.params}
        settings = Settings(self.device, storage, config.precision.reduce, config.backend, self.once)
        step = Step(captured, graph, plan, self.groups, settings)
        if self.plan is None or (grad and not self.plan.collectives):
            self.plan = step.plan
        else:
            self.plan = Plan(**{**self.plan.__dict__, "params": {**plan.params, **self.plan.params}})
        return step

    # ---- data ------------------------------------------------------------------------------------------------

    @property
    def data_world(self) -> int:
        return self.mesh.sizes_product(self.layout.data)

    @property
    def data_rank(self) -> int:
        rank = 0
        for a in self.layout.data:
            rank = rank * self.mesh.axis_size(a) + self.groups.coordinates[a]
        return rank

    def coordinate(self, axis: str) -> torch.Tensor:
        if axis not in self.coordinates:
            self.coordinates[axis] = torch.tensor(self.groups.coordinates[axis], dtype=torch.int64, device=self.device)
        return self.coordinates[axis]

    def dtensor(self, local: torch.Tensor, p: Placement) -> DTensor:
        return _torch.dtensor(local, self.device_mesh, dtensor_placements(p, self.mesh), p.shape)

    def tangent(self, grad: torch.Tensor | None, step: Step, index: int) -> torch.Tensor:
        """The gradient of output `index`, local in the output's placement."""
        p = step.plan.outputs[index]
        like = step.tangent_like(index)
        if grad is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        if isinstance(grad, DTensor):
            grad = grad.redistribute(self.device_mesh, dtensor_placements(p, self.mesh)).to_local()
        return grad.to(like.dtype).contiguous()

    def gradient(self, name: str, local: torch.Tensor, plan: Plan) -> DTensor:
        """A gradient as the DTensor its parameter wants: without padding."""
        choice = plan.params[name]
        if choice.padded != choice.shape:
            for s in choice.storage.splits:
                if choice.padded[s.dim] != choice.shape[s.dim]:
                    chunk = local.shape[s.dim]
                    start = self._chunk(choice.storage, s.dim) * chunk
                    local = local.narrow(s.dim, 0, max(0, min(chunk, choice.shape[s.dim] - start)))
        return _torch.dtensor(local, self.device_mesh, dtensor_placements(choice.storage, self.mesh), choice.shape)

    def input_grad(self, t: torch.Tensor, local: torch.Tensor, p: Placement) -> torch.Tensor:
        """The gradient of a user's input, in the form the input came in."""
        if isinstance(t, DTensor):
            return self.dtensor(local, p).redistribute(t.device_mesh, t.placements).to(t.dtype)
        if self.config.inputs == "local":
            return local.to(device=t.device, dtype=t.dtype)
        return self.dtensor(local, p).full_tensor().to(device=t.device, dtype=t.dtype)

    def _chunk(self, p: Placement, dim: int) -> int:
        """Which chunk of `dim` this rank holds."""
        index = 0
        for s in sorted((s for s in p.splits if s.dim == dim), reverse=True):
            index = index * self.mesh.axis_size(s.axis) + self.groups.coordinates[s.axis]
        return index
