"""ParallelModule: the user's model with DTensor parameters, whose call runs the compiled step.

It shares the model's submodules, parameters and buffers under their own names. The first call of each kind captures and compiles;
the first with a backward plans, and settles where parameters live and moves them there, DTensor for DTensor, so that an
optimizer built earlier keeps working.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.build import Builder, Config, no_plan
from autopar.capture import LOSS, Call, Role, off_cache
from autopar.errors import AutoparError
from autopar.failures import begin, shared
from autopar.gradients import GradSync
from autopar.memory_format import order_of
from autopar.optimizers import watch
from autopar.outputs import LossOutput
from autopar.plan import Plan
from autopar.step import Step


class ParallelModule(nn.Module):
    """A model that trains on a mesh as it would on one device. Made by `autopar.compile`."""

    # Hugging Face's Trainer and accelerate: this is a distributed model already, and it does not take their loss arguments.
    _is_accelerate_prepared = True
    accepts_loss_kwargs = False

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, config: Config) -> None:
        super().__init__()
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_modules"] = model._modules
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.training = model.training
        self.__dict__["_wrapped"] = model
        self._builder = Builder(model, device_mesh, config)
        self._builder.distribute()
        self._config = config
        self._steps: dict[Any, Step] = {}
        self._reader = self._builder.reader
        self._sync = GradSync(config.grad_accumulation)
        self._seed: int | None = None
        self._calls = 0
        watch(self, config.optimizer)

    # ---- the call --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_hooks()
        kwargs = off_cache(self.__dict__["_wrapped"], kwargs)
        call = Call.of(args, kwargs)
        grad = self._needs_grad(call)
        step = self._step_for(call, grad)
        values = self._values(step, call)
        diff = [p for p in self.parameters() if p.requires_grad] if grad and step.has_backward else []
        extra = [t for t in call.tensors if t.requires_grad] if grad else []
        run = _Run(self, step, values, [n for n, p in self.named_parameters() if p.requires_grad], call)
        if diff or extra:
            outputs = _Apply.apply(run, len(diff), *diff, *extra)
        else:
            with torch.no_grad():
                outputs = run.forward()
        return self._pack(step, outputs)

    def _step_for(self, call: Call, grad: bool) -> Step:
        autocast = torch.get_autocast_dtype(self._builder.device.type) if torch.is_autocast_enabled(self._builder.device.type) else None
        shapes = self._reader.global_shapes(call)
        key = (
            self.training,
            grad,
            autocast,
            call.spec,
            _hashable(call.constants),
            shapes,
            tuple((t.requires_grad, order_of(t)) for t in call.tensors),
        )
        if key not in self._steps:
            self._reader.check_same(call, force=True)
            was_planned = self._builder.planned
            step = self._builder.build(call, shapes, grad, autocast)
            if self._builder.planned and not was_planned:
                self._steps.clear()  # made for parameters that lay elsewhere
            self._steps[key] = step
        else:
            self._reader.check_same(call)
        return self._steps[key]

    def _values(self, step: Step, call: Call) -> dict[Role, torch.Tensor]:
        """A local tensor for every role of the step's graph inputs but tangents."""
        values: dict[Role, torch.Tensor] = {}
        params = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        for role in {*step.base.forward_inputs, *step.base.backward_inputs}:
            if role.kind == "param":
                values[role] = padded_local(params[role.name], step.plan.params[role.name].storage.local_shape(step.plan.mesh))
            elif role.kind == "buffer":
                values[role] = buffers[role.name]
            elif role.kind == "coordinate":
                values[role] = self._builder.coordinate(role.name)
            elif role.kind == "seed":
                values[role] = self._counters()
        for a in self._builder.mesh.axes:
            values.setdefault(Role("coordinate", a.name), self._builder.coordinate(a.name))
        for i, (t, p) in enumerate(zip(call.tensors, step.plan.inputs, strict=True)):
            role = Role("input", "", i)
            if role in step.dtypes:
                values[role] = self._reader.local(t, p, self._builder.device, step.dtypes[role])
        return values

    def _counters(self) -> torch.Tensor:
        """(seed, step): torch.manual_seed starts the count again."""
        seed = torch.initial_seed()
        if seed != self._seed:
            self._seed, self._calls = seed, 0
        counters = torch.tensor([seed % (1 << 62), self._calls], dtype=torch.int64, device=self._builder.device)
        self._calls += 1
        return counters

    def _pack(self, step: Step, outputs: tuple[torch.Tensor | None, ...]) -> Any:
        leaves = [step.captured.constants.get(i, o) for i, o in enumerate(outputs)]
        result = _torch.pytree.tree_unflatten(leaves, step.captured.out_spec)
        if step.captured.loss_only:
            return result[LOSS] if self._config.loss_fn is not None else LossOutput(result[LOSS])
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> Step:
        """Captures and compiles the step for a call with these arguments, without running it."""
        call = Call.of(args, off_cache(self.__dict__["_wrapped"], kwargs))
        return self._step_for(call, self._needs_grad(call))

    def _needs_grad(self, call: Call) -> bool:
        """Also where only inputs want gradients: a frozen or parameterless model."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in itertools.chain(self.parameters(), call.tensors))

    # ---- what the user may ask -------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in use. Before the first call there is none yet."""
        plan = self._builder.plan
        if plan is None:
            raise no_plan()
        return plan

    @property
    def data_world(self) -> int:
        """Over how many ranks the batch is split: as local inputs must be, as the plan does for global ones."""
        return self._builder.data_world

    @property
    def data_rank(self) -> int:
        """Which part of the batch is this rank's (for a DistributedSampler)."""
        return self._builder.data_rank

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forwards run in here leave gradients unreduced; the next one outside adds them in."""
        before, self._sync.enabled = self._sync.enabled, False
        try:
            yield
        finally:
            self._sync.enabled = before

    def rng_state(self) -> dict[str, int]:
        """The counters of random ops, for a checkpoint."""
        return {"seed": torch.initial_seed() if self._seed is None else self._seed, "step": self._calls}

    def load_rng_state(self, state: Mapping[str, int]) -> None:
        torch.manual_seed(state["seed"])
        self._seed, self._calls = int(torch.initial_seed()), int(state["step"])

    @property
    def stats(self) -> dict[str, Any]:
        """Counts of what compilation did: distinct layers lowered, cache hits."""
        return {
            str(i): {"forward": s.lowered.stats, "backward": {k: v[1].stats for k, v in s.backwards.items()}}
            for i, s in enumerate(self._steps.values())
        }

    def train(self, mode: bool = True) -> ParallelModule:
        super().train(mode)
        self.__dict__["_wrapped"].training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_wrapped"].state_dict(*args, **kwargs)

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int = 5 * 1000**3) -> None:
        """Config and weights in Hugging Face layout. Collective: every rank calls it, rank 0 writes."""
        from autopar.safetensors_io import save_safetensors

        save_safetensors(self, folder, max_shard_size)
        config = getattr(self.__dict__["_wrapped"], "config", None)
        if config is not None and self._builder.groups.rank == 0:
            config.save_pretrained(folder)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_wrapped"].load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_wrapped"], name)

    def _check_hooks(self) -> None:
        for name, m in self.named_modules():
            if m._backward_hooks or m._backward_pre_hooks:
                raise AutoparError(
                    "module backward hooks cannot run: the backward pass is one compiled graph",
                    where=f"module {name or type(m).__name__!r}",
                    fix="use a hook on the parameters (register_post_accumulate_grad_hook), or remove it before training",
                )


def padded_local(param: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The local shard in the graph's (padded) shape: the storage behind an uneven DTensor shard has room for it."""
    local = _torch.local_tensor(param).detach() if isinstance(param, DTensor) else param.detach()
    if tuple(local.shape) == shape:
        return local
    pad: list[int] = []
    for have, want in reversed(list(zip(local.shape, shape, strict=True))):
        pad += [0, want - have]
    return torch.nn.functional.pad(local, pad)


class _Run:
    """One call in flight: its local values, and after forward the saved tensors."""

    def __init__(self, module: ParallelModule, step: Step, values: dict[Role, torch.Tensor], diff: list[str], call: Call) -> None:
        self.module, self.step, self.values, self.diff, self.call = module, step, values, diff, call
        self.sync = module._sync.enabled
        self.number = begin(module._builder.groups)

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        with shared(self.module._builder.groups, self.number):
            results, self.saved = self.step.forward(self.values)
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        outputs: list[torch.Tensor | None] = []
        for role, t in results:
            if role.kind == "buffer_update" and t is not None:
                b = buffers[role.name]
                # Backward reads the value that forward saw.
                self.saved = [s.clone() if s.data_ptr() == b.data_ptr() else s for s in self.saved]
                b.copy_(t)
            elif role.kind == "output":
                outputs.append(self.wrap(t, role.index))
        return tuple(outputs)

    def wrap(self, t: torch.Tensor | None, index: int) -> torch.Tensor | None:
        if t is None or t.dim() == 0:
            return t
        b = self.module._builder
        p = self.step.plan.outputs[index]
        return b.dtensor(t, p)


class _Apply(torch.autograd.Function):
    """The step as one node of autograd: DTensor parameters in, losses and DTensor outputs out, DTensor gradients back."""

    @staticmethod
    def forward(ctx: Any, run: _Run, n_params: int, *tensors: torch.Tensor) -> Any:
        outputs = run.forward()
        keep = {r: v for r, v in run.values.items() if r in run.step.base.backward_inputs or r.kind == "coordinate"}
        ctx.roles = list(keep)
        ctx.n_saved = len(run.saved)
        ctx.save_for_backward(*run.saved, *keep.values())
        run.saved, run.values = [], {}
        ctx.run, ctx.n_params, ctx.n = run, n_params, len(tensors)
        tangents = {r.index for r in run.step.captured.inputs if r.kind == "tangent"}  # of outputs that have a gradient
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if o is not None and i not in tangents])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run: _Run = ctx.run
        step, module = run.step, run.module
        tensors = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # so that each can be freed at its last use
        saved, values = tensors[: ctx.n_saved], dict(zip(ctx.roles, tensors[ctx.n_saved :], strict=True))
        del tensors
        for role in step.base.backward_inputs:
            if role.kind == "tangent":
                values[role] = module._builder.tangent(grads[role.index], step, role.index)
        with shared(module._builder.groups, run.number):
            params = module._sync.reduce(step, saved, values, run.sync)
        out: list[torch.Tensor | None] = []
        for name in run.diff[: ctx.n_params]:
            local = params.get(Role("grad", name))
            out.append(None if local is None else module._builder.gradient(name, local, step.plan))
        for i, t in enumerate(run.call.tensors):
            if t.requires_grad:
                local = params.get(Role("input_grad", "", i))
                out.append(None if local is None else module._reader.returned(t, local, step.plan.inputs[i]))
        return None, None, *out


def _hashable(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    out = []
    for c in constants:
        try:
            hash(c)
            out.append(c)
        except TypeError:
            out.append(repr(c))
    return tuple(out)
