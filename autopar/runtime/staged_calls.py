"""Calls of a module whose stages are on several ranks, and what such a module does not do."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.capture import Call, Role
from autopar.distributed.failures import during
from autopar.errors import AutoparError, InputError
from autopar.pipeline import Lists, scheduled
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE as AXIS
from autopar.runtime.executor import EvaluationRun, Executor, Flight, Handed, TrainingRun
from autopar.runtime.micro_batches import Counters, Part, Parted, PartedCall, whole_values
from autopar.runtime.run import Tensors
from autopar.runtime.stages import Pipeline, StagedStep
from autopar.runtime.step import Step


def mesh_of(plan: Plan) -> dict[str, int]:
    """The whole mesh of a plan: that of a pipeline is of one stage."""
    return plan.mesh_axes if plan.pipeline is None else {AXIS: plan.pipeline.ranks, **plan.mesh_axes}


def schedule_of(
    mesh: DeviceMesh,
    schedule: str | os.PathLike[str] | Lists | None,
    virtual_stages: int | None,
    micro_batches: int | str | None,
    outputs: str,
    plan: Plan | None = None,
) -> Lists | None:
    """Of a mesh with an axis `pp`; None without one. plan: what is not said is as it has it. Raises AutoparError."""
    names = mesh.mesh_dim_names or ()
    given = None if plan is None else plan.pipeline
    if AXIS not in names:
        if schedule is not None or virtual_stages is not None or given is not None:
            what = "a schedule is of a pipeline" if given is None else f"the plan is of a pipeline of {given.ranks} ranks"
            raise AutoparError(
                f"{what}, and the mesh of {' x '.join(names) or 'no named axes'} has no axis {AXIS!r}",
                fix='pass a mesh such as {"pp": 2, "dp": 4}, or leave schedule=, virtual_stages= and such a plan out',
            )
        return None
    if micro_batches == "auto":
        raise AutoparError(
            'micro_batches="auto" of a pipeline is planned with its schedule, and that is a list of actions here',
            fix="pass a number of micro-batches: that of the list, or leave the schedule out",
        )
    if outputs == "all":
        raise AutoparError(
            'outputs="all" asks for all that the model returns, and a pipeline\'s micro-batches give their loss alone',
            fix="leave it out, and ask for outputs under torch.no_grad()",
        )
    ranks = mesh.size(names.index(AXIS))
    number = micro_batches if isinstance(micro_batches, int) else 2 * ranks
    if given is not None:
        number = micro_batches if isinstance(micro_batches, int) else plan.micro_batches if plan is not None else number
        if schedule is None:
            schedule = given.lists(number)
    return scheduled("1f1b" if schedule is None else schedule, ranks, number, virtual_stages)


def refuse_away(pipeline: Pipeline | None, what: str) -> None:
    """For what needs the whole model on a rank."""
    if pipeline is not None and pipeline.placed:
        raise AutoparError(
            f"{what} needs all of the model, and this rank has the layers of stage {', '.join(map(str, pipeline.mine))} alone",
            where="pipeline",
            fix="save with autopar.checkpoint.save, and load that into a model on a mesh without an axis pp, or uncompiled",
        )


def refusing_away(pipeline: Pipeline, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, as long as the whole model is here."""

    @functools.wraps(method)
    def called(*args: object, **kwargs: object) -> object:
        refuse_away(pipeline, what)
        return method(*args, **kwargs)

    return called


class StagedCalls:
    """Those of one module."""

    def __init__(self, pipeline: Pipeline, device: torch.device) -> None:
        self.pipeline, self.executor, self.device = pipeline, Executor(pipeline, device), device
        self.anchor = torch.zeros((), requires_grad=True)

    def run(
        self,
        module: Parted,
        call: Call,
        step: Step | PartedCall,
        counters: Counters | None = None,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[TrainingRun | EvaluationRun, tuple[torch.Tensor | None, ...]]:
        """before: of a call without gradients that ran before and runs again, buffers as they were."""
        tensors, groups = Tensors.of(module), module._builder.groups  # type: ignore[arg-type]
        trains = isinstance(step, PartedCall) or step.has_backward
        if isinstance(step, PartedCall):
            parts, steps = step.parts, step.steps
        else:
            parts, steps = [Part(call, 0)], [step]
            if trains:
                self.refuse_without_loss(step, call)
        with during("forward: local inputs", groups.ranks):
            given = whole_values(module, steps[0], call, step.batch, tensors) if isinstance(step, PartedCall) else {}
            drawn = functools.cache(counters or module._counters)
            flights = []
            for part, one in zip(parts, steps, strict=True):
                assert isinstance(one, StagedStep)
                values = self.values(module, one, part, tensors, drawn, given, numbered=isinstance(step, PartedCall))
                flights.append(Flight(one, values, part.call))
        if not trains:
            (flight,) = flights
            for taken in flight.values.values():
                taken |= {r: before[r.name] for r in taken if before and r.kind == "buffer" and r.name in before}
            run = EvaluationRun(module, self.executor, flight.step, flight.values, call, before is not None)
            return run, run.forward()
        trained = tensors.trained
        training = TrainingRun(module, self.executor, flights, list(trained))
        loss: torch.Tensor = Handed.apply(training, self.anchor, *trained.values())  # type: ignore[no-untyped-call]
        return training, (loss,)

    def values(
        self,
        module: Parted,
        step: StagedStep,
        part: Part,
        tensors: Tensors,
        counters: Counters,
        given: Mapping[Role, torch.Tensor],
        numbered: bool,
    ) -> dict[int, dict[Role, torch.Tensor]]:
        """What each stage takes of a micro-batch, besides what it receives."""

        def drawn() -> torch.Tensor:
            return torch.cat([counters(), torch.tensor([part.first], dtype=torch.int64, device=self.device)]) if numbered else counters()

        return {s: module._values(step.steps[s], part.call, tensors, drawn, given) for s in self.pipeline.mine}

    def refuse_without_loss(self, step: Step, call: Call) -> None:
        roles = [r for r in step.captured.outputs if r.kind == "output"]
        if len(roles) != 1 or step.plan.outputs[0].shape != ():
            raise InputError(
                "a pipeline runs backward within the call, from the model's loss, and this call returns none, or more than a loss",
                fix="let forward return an output with a field `loss` of no dims (pass labels), or pass loss_fn= to autopar.compile; evaluate under torch.no_grad()",
            )
        if any(t.requires_grad for t in call.tensors):
            raise InputError("an input wants a gradient, which a pipeline does not give", fix="detach it, or train without an axis pp")

    def load(self, model: nn.Module, state: Mapping[str, object], strict: Any = True, assign: Any = False) -> Any:
        """`load_state_dict` of what is here: what `state` has of other stages is left out, and not missed."""
        away = self.pipeline.away
        if not away:
            return model.load_state_dict(state, strict, assign)
        mine = {n: t for n, t in state.items() if n not in away}
        found = model.load_state_dict(mine, strict=False, assign=assign)
        missing = [n for n in found.missing_keys if n not in away]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(f"state_dict does not fit the model: missing {missing}, unexpected {list(found.unexpected_keys)}")
        return type(found)(missing, found.unexpected_keys)
