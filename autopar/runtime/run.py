"""One call in flight, and the node of autograd that it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.capture.capture import Call, Role
from autopar.distributed.failures import begin, during, shared
from autopar.errors import AutoparError
from autopar.runtime.build import Builder
from autopar.runtime.check import FirstStep
from autopar.runtime.gradients import GradSync
from autopar.runtime.inputs import InputReader
from autopar.runtime.outputs import OutputGiver
from autopar.runtime.own_memory import OwnMemory
from autopar.runtime.step import Step


class Caller(Protocol):
    """What a call needs of the module that is called."""

    _builder: Builder
    _outputs: OutputGiver
    _reader: InputReader
    _sync: GradSync

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, torch.Tensor]]: ...
    def _attribute(self, name: str) -> torch.Tensor: ...
    def _first_step(self, step: Step) -> FirstStep | None: ...


@dataclass(frozen=True)
class Tensors:
    """A module's parameters and buffers by all their names. trained: those that want a gradient, each once. lie: where modules have them."""

    params: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    trained: dict[str, nn.Parameter]
    lie: list[tuple[dict[str, Any], str, torch.Tensor]]

    @staticmethod
    def of(module: nn.Module) -> Tensors:
        params = dict(module.named_parameters(remove_duplicate=False))
        once = {id(p): n for n, p in reversed(params.items())}  # the first of several names
        trained = {n: p for n, p in params.items() if p.requires_grad and once[id(p)] == n}
        lie = [(d, name, t) for m in module.modules() for d in (m._parameters, m._buffers) for name, t in d.items() if t is not None]
        return Tensors(params, dict(module.named_buffers(remove_duplicate=False)), trained, lie)

    def hold(self) -> bool:
        """Whether they are still the module's, if its submodules are the same, and the names of what they have."""
        return all(d.get(name) is t for d, name, t in self.lie) and all(p.requires_grad for p in self.trained.values())


def padded_local(param: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The local shard in the graph's (padded) shape: the storage behind an uneven DTensor shard has room for it."""
    local = _torch.local_tensor(param) if isinstance(param, DTensor) else param
    local = local.detach() if local.requires_grad else local
    if local.shape == shape:
        return local
    pad: list[int] = []
    for have, want in reversed(list(zip(local.shape, shape, strict=True))):
        pad += [0, want - have]
    return torch.nn.functional.pad(local, pad)


class Run:
    """One call in flight: its local values, and after forward the saved tensors. again: of a call that ran before, so buffers stay as they are."""

    def __init__(
        self,
        module: Caller,
        step: Step,
        values: dict[Role, torch.Tensor],
        diff: list[str],
        call: Call,
        buffers: Mapping[str, torch.Tensor],
        again: bool = False,
    ) -> None:
        self.module, self.step, self.values, self.diff, self.call, self.again = module, step, values, diff, call, again
        self.buffers = buffers
        self.before: dict[str, torch.Tensor] = {}  # buffers that forward changes, as they were
        self.sync = module._sync.enabled
        self.number = begin(module._builder.groups)
        self.check = module._first_step(step)
        self.stays: list[torch.Tensor] = []  # what an earlier micro-batch of the call gathered

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        with shared(self.module._builder.groups, self.number, "forward"):
            if self.check is not None:
                self.check.forward(self.values, self.wholes)
            stays, self.stays = self.stays, []
            results, self.saved = self.step.forward_later(self.values, stays) if stays else self.step.forward(self.values)
            if self.check is not None:
                self.check.ran(results, self.saved)
        buffers = self.buffers
        saved: dict[int, list[int]] = {}  # which of the saved tensors start at an address
        for i, s in enumerate(self.saved if self.step.updates else ()):
            saved.setdefault(s.data_ptr(), []).append(i)
        outputs: list[torch.Tensor | None] = []
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for role, t in results:
            if role.kind == "buffer_update" and t is not None:
                if self.again:
                    continue
                b = buffers[role.name] if role.name in buffers else self.module._attribute(role.name)
                for i in saved.get(b.data_ptr(), ()):  # backward reads the value that forward saw
                    self.saved[i] = self.saved[i].clone()
                if self.step.captured.loss_only:
                    self.before[role.name] = b.clone()
                old.append(b)
                new.append(t)
            elif role.kind == "output":
                outputs.append(self.wrap(t, role.index))
        _torch.copy_each(old, new)
        return tuple(outputs)

    def reduce(self, saved: list[torch.Tensor], values: dict[Role, torch.Tensor]) -> dict[Role, torch.Tensor | None]:
        """Runs backward. values: also the outputs' tangents."""
        return self.module._sync.reduce(self.step, saved, values, self.sync)

    def wholes(self) -> dict[Role, torch.Tensor]:
        """What the captured graph takes, at global shapes; collective."""
        b, plan = self.module._builder, self.step.plan
        params = dict(self.module.named_parameters(remove_duplicate=False))
        out = {}
        for role in self.step.captured.inputs:
            if role.kind == "param":
                p = params[role.name].detach()
                out[role] = p.full_tensor() if isinstance(p, DTensor) else p
            elif role.kind == "input" and role in self.values:
                out[role] = b.dtensor(self.values[role], plan.inputs[role.index]).full_tensor()
            elif role in self.values and role.kind != "tangent":
                out[role] = self.values[role]
        return out

    def tangents(self, values: Mapping[Role, torch.Tensor]) -> dict[Role, torch.Tensor]:
        """Those of the outputs, at global shapes; collective."""
        b, places = self.module._builder, self.step.plan.outputs
        given = [(r, values[r]) for r in self.step.captured.inputs if r.kind == "tangent" and r in values]
        return {r: t if t.dim() == 0 else b.dtensor(t, places[r.index]).full_tensor() for r, t in given}

    def wrap(self, t: torch.Tensor | None, index: int) -> torch.Tensor | None:
        return None if t is None else self.module._outputs.given(t, self.step.plan.outputs[index], self.step.captured.input_shapes)


class Apply(torch.autograd.Function):
    """The step as one node of autograd: DTensor parameters in, losses and DTensor outputs out, DTensor gradients back."""

    @staticmethod
    def forward(ctx: Any, run: Run, n_params: int, *tensors: torch.Tensor) -> Any:
        outputs = run.forward()
        keep = {r: v for r, v in run.values.items() if r in run.step.read_by_backward or r.kind == "coordinate"}
        ctx.roles = list(keep)
        ctx.n_saved = len(run.saved)
        ctx.save_for_backward(*run.saved, *keep.values())
        run.saved, run.values = [], {}
        ctx.run, ctx.n_params, ctx.n = run, n_params, len(tensors)
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if o is not None and i not in run.step.differentiable])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run: Run = ctx.run
        step, module = run.step, run.module
        tensors = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # so that each can be freed at its last use
        saved, values = tensors[: ctx.n_saved], dict(zip(ctx.roles, tensors[ctx.n_saved :], strict=True))
        del tensors
        groups = module._builder.groups
        with during("backward: gradients of outputs", groups.ranks):
            for role in step.base.backward_inputs:
                if role.kind == "tangent":
                    values[role] = module._outputs.tangent(grads[role.index], step, role.index)
        reduces = lambda c: "gradient reduction" if step.reduces_gradients(c) else ""  # noqa: E731
        check = run.check if module._sync.variant(run.sync) == (True, False) else None
        with shared(groups, run.number, "backward", reduces), torch.no_grad():
            if check is not None:
                check.backward(saved, values, lambda: run.tangents(values))
            own = OwnMemory(t for r, t in values.items() if r.kind in ("param", "tangent"))
            params = run.reduce(saved, values)
            if check is not None:
                check.ran_backward([(r, params.get(r)) for r in step.base.backward_outputs])
        out: list[torch.Tensor | None] = []
        without = set[str]()  # not reduced yet, or of what forward does not use
        given = {r.name: t for r, t in params.items() if r.kind == "grad"}
        as_stored, choices = module._builder.as_stored.gradient, step.plan.params
        for name in run.diff[: ctx.n_params]:
            local = given.get(name)
            if local is None:
                without.add(name)
                out.append(None)
            else:
                out.append(as_stored(name, own.of(local), choices.get(name) or module._builder.choice(name)))
        for name, p in module.named_parameters() if without else ():
            if name in without:
                _torch.quiet_without_gradient(p)
        with during("backward: gradients of inputs", groups.ranks):
            for i, t in enumerate(run.call.tensors):
                if t.requires_grad:
                    local = params.get(Role("input_grad", "", i))
                    out.append(None if local is None else module._reader.returned(t, own.of(local), step.plan.inputs[i]))
        if torch.is_grad_enabled():  # create_graph=True
            found = [g.detach().requires_grad_() for g in out if g is not None]
            made = iter(_Once.apply(*found) if found else ())
            out = [None if g is None else next(made) for g in out]
        return None, None, *out


class _Once(torch.autograd.Function):
    """Gradients that have no gradient themselves: says so where one is asked for."""

    @staticmethod
    def forward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise AutoparError(
            "a gradient of gradients through a compiled step (create_graph=True): its backward pass is one graph without a backward of its own",
            fix="compute a gradient penalty or a Hessian's product on the uncompiled model, or leave that term out of the compiled one",
        )
