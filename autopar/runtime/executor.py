"""A call on the stages of a pipeline: each rank works off its list of actions.

A call in training runs its whole schedule in forward, backwards as well, since what the loss does with it is known but for a factor: backward is linear in the gradient that arrives at
the loss. It runs with what arrived the last time (a GradScaler's scale keeps small gradients of float16 from vanishing), and `loss.backward()` hands gradients out, multiplied by the
ratio. Each stage adds gradients up unreduced; its last backward reduces the sum. Then parameters that several stages hold have theirs added up, and all ranks get the loss.

Evaluation runs the forward of the whole batch on each stage in turn, and gives its results to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.capture.capture import Call, Role
from autopar.distributed.failures import begin, shared
from autopar.errors import AutoparError
from autopar.passes.stages.cut import Crossing
from autopar.passes.stages.separate import owner
from autopar.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from autopar.runtime.channels import Channels, Key
from autopar.runtime.own_memory import OwnMemory
from autopar.runtime.run import Caller
from autopar.runtime.stages import Pipeline, StagedStep

Values = dict[Role, torch.Tensor]


@dataclass
class Flight:
    """A micro-batch: its step, and for each of this rank's stages what that takes besides what it receives; what forward saved, once it has run."""

    step: StagedStep
    values: Mapping[int, Values]
    call: Call
    saved: dict[int, tuple[list[torch.Tensor], Values]] = field(default_factory=dict)


class Executor:
    """Runs calls of one module."""

    def __init__(self, pipeline: Pipeline, device: torch.device) -> None:
        self.pipeline, self.device = pipeline, device
        self.channels: Channels | None = None
        self.tangent: torch.Tensor | None = None  # what arrived at the loss the last time

    def opened(self, crossings: Mapping[int, StagedStep], orders: Any = None) -> Channels:
        """crossings: the step of each micro-batch."""
        if self.channels is None:
            p = self.pipeline
            self.channels = Channels(p.groups, p.ranks, p.rank, p.lists)

        def shapes(key: Key) -> Sequence[Crossing]:
            kind, stage, micro_batch = key
            found = crossings[micro_batch].crossing
            return (found.forward if kind == "F" else found.backward)[stage]

        self.channels.open(shapes, self.device, orders)
        return self.channels

    def shared_out(self, t: torch.Tensor | None, like: tuple[tuple[int, ...], torch.dtype], stage: int) -> torch.Tensor:
        """What a stage has, on all ranks of the pipeline. Collective."""
        t = torch.empty(*like[:1], dtype=like[1], device=self.device) if t is None else t.contiguous()
        dist.broadcast(t, self.pipeline.rank_of(stage), group=self.pipeline.axis)
        return t

    def change_buffers(
        self, module: Caller, step: StagedStep, found: Mapping[Role, torch.Tensor | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that forward changes become, on every rank, what their stage made of them; before each does, it is told. Collective."""
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for role in step.captured.outputs:
            if role.kind == "buffer_update":
                b = buffers[role.name] if role.name in buffers else module._attribute(role.name)
                yield role.name, b
                b.copy_(self.shared_out(found.get(role), (tuple(b.shape), b.dtype), step.crossing.outputs[role]))


class TrainingRun:
    """One call in flight, in training. sync: whether gradients are handed out at its backward."""

    def __init__(self, module: Caller, executor: Executor, flights: Sequence[Flight], params: Sequence[str]) -> None:
        self.module, self.executor, self.flights, self.params = module, executor, list(flights), list(params)
        self.step, self.call = flights[0].step, flights[0].call
        self.sync = module._sync.enabled
        self.assumed = torch.ones(())
        self.is_spent = False
        self.sums: dict[str, torch.Tensor] = {}  # unreduced gradients, by the stage's own names of parameters
        self.reduced: dict[str, torch.Tensor] = {}
        self.left = {s: len(flights) for s in executor.pipeline.mine}  # backwards that are to come
        self.stays: dict[int, list[torch.Tensor]] = {}  # by stage, what the first micro-batch gathered
        self.loss: torch.Tensor | None = None
        self.buffers: Values = {}  # as forward leaves them; what is in the batch changes none, so every micro-batch does so alike

    def forward(self) -> tuple[torch.Tensor]:
        groups, pipeline = self.module._builder.groups, self.executor.pipeline
        self.assumed = self.guess()
        number = begin(groups)
        channels = self.executor.opened({i: f.step for i, f in enumerate(self.flights)})
        for a in pipeline.lists.ranks[pipeline.rank]:
            with shared(groups, number, a.said()), torch.no_grad():
                self.act(a, channels)
        with shared(groups, number, "the end of a pipeline's step"), torch.no_grad():
            channels.close()
            self.add_up()
            role = next(r for r in self.step.captured.outputs if r.kind == "output")
            at, like = self.step.crossing.outputs[role], self.step.output_like(role)
            assert like is not None
            loss = self.executor.shared_out(self.loss, like, at)
            for _ in self.executor.change_buffers(self.module, self.step, self.buffers):
                pass
        self.flights.clear()
        self.stays.clear()
        return (loss,)

    def act(self, a: Action, channels: Channels) -> None:
        flight, s = self.flights[a.micro_batch], a.stage
        step, crossing, last = flight.step.steps[s], flight.step.crossing, self.executor.pipeline.lists.stages - 1
        if a.kind == FORWARD:
            values = dict(flight.values[s])
            if s > 0:
                values |= placed("received", channels.receive(("F", s, a.micro_batch)))
            stays = self.stays.get(s)
            results, saved = step.forward_later(values, stays) if stays else step.forward(values)
            if step.is_gathered_once and stays is None:
                self.stays[s] = step.staying(saved)
            given = dict(results)
            if s < last:
                channels.send(("F", s + 1, a.micro_batch), taken(given, "sent", len(crossing.forward[s + 1])))
            for role, t in results:
                if role.kind == "output" and t is not None:
                    self.loss = t if self.loss is None else self.loss + t
                elif role.kind == "buffer_update" and t is not None:
                    self.buffers[role] = t
            kept = {r: t for r, t in values.items() if r in step.read_by_backward or r.kind == "coordinate"}
            flight.saved[s] = (saved, kept)
            return
        if step.base.backward is None:  # nothing is trained here, nor on stages before
            if a.kind != WEIGHT and s < last:
                channels.receive(("B", s, a.micro_batch))
            if a.kind != WEIGHT and s > 0:
                channels.send(("B", s - 1, a.micro_batch), [])
            if a.kind != INPUT:
                del flight.saved[s]
            return
        saved, values = flight.saved.pop(s)
        if a.kind != WEIGHT:
            if s < last:
                values |= placed("received_grad", channels.receive(("B", s, a.micro_batch)))
            for role in step.base.backward_inputs:
                if role.kind == "tangent":
                    values[role] = self.assumed.to(step.tangent_like(role.index).dtype)
        if a.kind == INPUT:
            sent = flight.step.halves(s).input(saved, values)
            flight.saved[s] = (saved, values)
            if s > 0:
                channels.send(("B", s - 1, a.micro_batch), taken(sent, "sent_grad", len(crossing.backward[s - 1])))
            return
        self.left[s] -= 1
        sync = not self.left[s]
        mine = [r.name for r in step.base.backward_outputs if r.kind == "grad"]
        sums = {Role("accumulated", n): self.sums.pop(n) for n in mine if n in self.sums}
        run = flight.step.halves(s).weight if a.kind == WEIGHT else step.backward
        given = dict(run(saved, values | sums, sync, bool(sums)))
        if s > 0 and a.kind == BACKWARD:
            channels.send(("B", s - 1, a.micro_batch), taken(given, "sent_grad", len(crossing.backward[s - 1])))
        found = {r.name: t for r, t in given.items() if r.kind == "grad" and t is not None}
        (self.reduced if sync else self.sums).update(found)

    def add_up(self) -> None:
        """Gradients of parameters that several stages hold: those of this rank's, then of all ranks that have it. Collective over these."""
        pipeline, builder = self.executor.pipeline, self.module._builder
        total: dict[str, torch.Tensor] = {}
        for name, t in self.reduced.items():
            total[owner(name)] = total[owner(name)] + t if owner(name) in total else t
        params = dict(self.module.named_parameters())
        for name in dict.fromkeys(map(owner, self.step.gradients)):
            ranks = pipeline.sharers(name)
            if len(ranks) > 1 and pipeline.ranks[pipeline.rank] in ranks:
                if name not in total:
                    choice = self.step.plan.params[name]
                    total[name] = torch.zeros(choice.storage.local_shape(builder.mesh), dtype=params[name].dtype, device=builder.device)
                mine = total[name].contiguous()
                dist.all_reduce(mine, group=builder.groups.between(ranks, f"pipeline.shared.{'.'.join(map(str, ranks))}"))
                total[name] = mine
        self.reduced = total

    def guess(self) -> torch.Tensor:
        """A gradient of the loss that is likely to arrive, 0-d: never zero or infinite."""
        last, one = self.executor.tangent, torch.ones((), device=self.executor.device)
        return one if last is None else torch.where(torch.isfinite(last) & (last != 0), last, torch.ones_like(last))

    def gradients(self, tangent: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What is handed out, by parameter: nothing under `no_sync`."""
        if self.is_spent:
            raise AutoparError(
                "backward runs twice through one call of a pipeline (retain_graph=True), whose gradients have been handed out",
                fix="add up what the loss is used for and call backward once",
            )
        self.is_spent = True
        tangent = tangent.detach().to(self.executor.device)
        self.executor.tangent = tangent.clone()
        ratio = tangent / self.assumed.to(tangent.dtype)
        if ratio.device.type != "cpu" or float(ratio) != 1.0:  # reading it elsewhere would wait for the device
            for t in {id(t): t for t in self.reduced.values()}.values():
                t.mul_(ratio)
        found, self.reduced = self.reduced, {}
        return self.module._sync.handed(found, self.sync)


class Handed(torch.autograd.Function):
    """The call as one node of autograd. anchor: wants a gradient on every rank, also on one whose parameters do not."""

    @staticmethod
    def forward(ctx: Any, run: TrainingRun, anchor: torch.Tensor, *params: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return run.forward()[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run: TrainingRun = ctx.run
        (tangent,) = grads
        with torch.no_grad():
            found = {} if tangent is None else run.gradients(tangent)
            builder = run.module._builder
            own = OwnMemory(())
            out = [None if n not in found else builder.gradient(n, own.of(found[n]), run.step.plan) for n in run.params]
        for name, p in run.module.named_parameters():
            if name not in found:
                _torch.quiet_without_gradient(p)
        if torch.is_grad_enabled():
            raise AutoparError(
                "a gradient of gradients through a pipeline (create_graph=True): its backward has run, and has none of its own",
                fix="compute a gradient penalty on the uncompiled model, or leave that term out",
            )
        return None, None, *out


class EvaluationRun:
    """A call without gradients. again: of one that ran before, so buffers stay as they are."""

    def __init__(
        self, module: Caller, executor: Executor, step: StagedStep, values: Mapping[int, Values], call: Call, again: bool = False
    ) -> None:
        self.module, self.executor, self.step, self.values, self.call, self.again = module, executor, step, values, call, again
        self.before: dict[str, torch.Tensor] = {}

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        groups, pipeline = self.module._builder.groups, self.executor.pipeline
        last, crossing = pipeline.lists.stages - 1, self.step.crossing
        order = [Action(s, FORWARD, 0) for s in range(last + 1)]
        mine = [[a for a in order if pipeline.lists.where[a.stage] == r] for r in range(len(pipeline.ranks))]
        channels = self.executor.opened({0: self.step}, mine)
        number, found = begin(groups), dict[Role, torch.Tensor | None]()
        for a in mine[pipeline.rank]:
            with shared(groups, number, a.said()), torch.no_grad():
                s, values = a.stage, dict(self.values[a.stage])
                if s > 0:
                    values |= placed("received", channels.receive(("F", s, 0)))
                given = dict(self.step.steps[s].forward(values)[0])
                if s < last:
                    channels.send(("F", s + 1, 0), taken(given, "sent", len(crossing.forward[s + 1])))
                found |= {r: t for r, t in given.items() if r.kind in ("output", "buffer_update")}
        outputs: list[torch.Tensor | None] = []
        with shared(groups, number, "results of a pipeline"), torch.no_grad():
            channels.close()
            for role in self.step.captured.outputs:
                if role.kind == "output":
                    like = self.step.output_like(role)
                    there = None if like is None else self.executor.shared_out(found.get(role), like, crossing.outputs[role])
                    outputs.append(None if there is None else self.wrap(there, role.index))
            if not self.again:
                self.before = {name: b.clone() for name, b in self.executor.change_buffers(self.module, self.step, found)}
        return tuple(outputs)

    def wrap(self, t: torch.Tensor, index: int) -> torch.Tensor:
        return self.module._outputs.given(t, self.step.plan.outputs[index], self.step.captured.input_shapes)


def placed(kind: str, message: Sequence[torch.Tensor]) -> Values:
    """What a stage received, by role."""
    return {Role(kind, "", i): t for i, t in enumerate(message)}


def taken(results: Mapping[Role, torch.Tensor | None], kind: str, number: int) -> list[torch.Tensor]:
    """What a stage sends of its results."""
    found = [results[Role(kind, "", i)] for i in range(number)]
    assert all(t is not None for t in found)
    return [t for t in found if t is not None]
