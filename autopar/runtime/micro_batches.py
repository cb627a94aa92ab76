"""One call with a batch, run as micro-batches one after the other, so that the activations of one live at a time.

Forward runs forward and backward of each but the last, and forward of that: their losses add up (`autopar.capture.samples`), their gradients are added up unreduced.
`loss.backward()` then runs the last one's backward, which reduces the sum. Backward is linear in the gradient that arrives at the loss, so those that ran before it was known
are multiplied by it. They run with what arrived the last time (a GradScaler's scale keeps small gradients of float16 from vanishing), and are multiplied by the ratio.

Micro-batches of two sizes are two programs, whose unreduced gradients may lie otherwise: those of the first are reduced where the second begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.capture import Call, Role, Shapes
from autopar.capture.micro_batches import WHOLE, Samples, WholeBatch, samples_of
from autopar.distributed.failures import begin, shared
from autopar.errors import AutoparError, InputError
from autopar.graph.graph import Tensor
from autopar.planner.micro_batches import AUTO, candidates
from autopar.planner.micro_batches import checked as checked_number
from autopar.planner.storage import batch_size
from autopar.runtime.calls import autocast_dtype
from autopar.runtime.outputs import NotComputedError
from autopar.runtime.pipeline import Seen
from autopar.runtime.run import Caller, Run, Tensors
from autopar.runtime.step import Step

Counters = Callable[[], torch.Tensor]


class Parted(Caller, Protocol):
    """What is asked of the module that is called."""

    _micro: MicroBatches

    def _step_for(self, call: Call, grad: bool, batch: WholeBatch | None = None, whole: Call | None = None) -> Step: ...
    def _values(
        self,
        step: Step,
        call: Call,
        tensors: Tensors | None = None,
        counters: Counters | None = None,
        given: Mapping[Role, torch.Tensor] = ...,
    ) -> dict[Role, torch.Tensor]: ...
    def _counters(self, of: int | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Part:
    """A micro-batch: a call of its samples. first: the number of the first one, in the batch as it came to this rank."""

    call: Call
    first: int


class MicroBatches:
    """tangent: what arrived at the loss the last time."""

    def __init__(self) -> None:
        self.tangent: torch.Tensor | None = None

    def parted(self, module: Parted, call: Call, number: int) -> PartedCall:
        """`call` as micro-batches, and the step of each: the same for those of one size. Collective."""
        reader = module._reader
        batch, parts = cut(call, reader.global_shapes(call), number, module._builder.mesh.size, reader.mode == "local", reader.parts)
        found: dict[Shapes, Step] = {}
        for part in parts:
            size = reader.global_shapes(part.call)
            if size not in found:
                found[size] = module._step_for(part.call, True, batch, call)
        return PartedCall(batch, parts, [found[reader.global_shapes(part.call)] for part in parts])

    def number(self, module: Parted, call: Call) -> int:
        """Of micro-batches that a training call is run as: no more than it has samples."""
        if module._builder.pipeline is not None:
            return module._builder.pipeline.number(samples_in(call))
        if not module._builder.micro_batches:
            self.choose(module, call, autocast_dtype(module._builder.device))
        return min(module._builder.micro_batches, samples_in(call))

    def choose(self, module: Parted, call: Call, autocast: torch.dtype | None) -> None:
        """As many as is fastest, by the planner. Collective."""
        reader, builder = module._reader, module._builder
        shapes, local = reader.global_shapes(call), reader.mode == "local"
        reader.check_same(call, shapes, ("micro_batches",), lambda: "micro-batches are not chosen yet")
        whole: list[WholeBatch] = []

        def task(m: int) -> Seen:
            batch, parts = cut(call, shapes, m, builder.mesh.size, local, reader.parts)
            whole.append(batch)
            return builder.seen(call, reader.global_shapes(parts[0].call), True, autocast, True, (), None if m == 1 else whole[0])

        samples = samples_in(call)
        builder.choose(candidates(samples), samples * builder.mesh.size if local else samples, task)

    def run(self, module: Parted, call: Call, parted: PartedCall, tensors: Tensors) -> PartedRun:
        builder, counters = module._builder, functools.cache(module._counters)
        given = whole_values(module, parted.steps[0], call, parted.batch, tensors)
        flights = []
        for part, step in zip(parted.parts, parted.steps, strict=True):

            def numbered(first: int = part.first) -> torch.Tensor:
                return torch.cat([counters(), torch.tensor([first], dtype=torch.int64, device=builder.device)])

            flights.append(Flight(step, module._values(step, part.call, tensors, numbered, given), part.call))
        return PartedRun(module, flights, list(tensors.trained), tensors.buffers)


@dataclass(frozen=True)
class PartedCall:
    """A call that is run as micro-batches, of a batch, with the step of each."""

    batch: WholeBatch
    parts: Sequence[Part]
    steps: Sequence[Step]


@dataclass
class Flight:
    """A micro-batch that is to be run, with its local values."""

    step: Step
    values: dict[Role, torch.Tensor]
    call: Call


def cut(call: Call, shapes: Shapes, number: int, ranks: int, local: bool, parts: int) -> tuple[WholeBatch, list[Part]]:
    """`call` as micro-batches. shapes: of all ranks' batch; ranks: that may share one; local: each rank passes its own part of the batch, one of `parts`.

    Raises InputError."""
    for name, t in zip(call.paths, call.tensors, strict=True):
        if isinstance(t, DTensor) or t.requires_grad:
            what = "is a DTensor" if isinstance(t, DTensor) else "wants a gradient"
            raise InputError(
                f"input {name} {what}, and a batch with such an input is not run as micro-batches", fix="leave micro_batches= out"
            )
    mine = samples_in(call)
    whole = WholeBatch(shapes, mine * parts if local else mine, parts if local else 1)
    found, first = [], 0
    for n in samples_of(mine, number, 1 if local else ranks):
        tensors = tuple(t.narrow(0, first, n) if t.dim() and t.shape[0] == mine else t for t in call.tensors)
        found.append(Part(replace(call, tensors=tensors), first))
        first += n
    return whole, found


def samples_in(call: Call) -> int:
    """How many samples a call has on this rank; 1 where nothing has a dim."""
    return batch_size(tuple(Tensor("", tuple(t.shape), "") for t in call.tensors)) or 1


def whole_values(module: Parted, step: Step, call: Call, batch: WholeBatch, tensors: Tensors) -> dict[Role, torch.Tensor]:
    """What micro-batches are given of the whole batch. Collective where inputs are local."""
    samples: Samples = step.captured.samples
    device, found = module._builder.device, {}
    for role in sorted(samples.values.inputs, key=lambda r: (r.kind, r.name, r.index)):
        if role.kind == "input":
            shape, dtype = batch.shapes[role.index]
            found[role] = module._reader.whole(call.tensors[role.index], shape, device).to(dtype)
        else:
            found[role] = tensors.buffers[role.name] if role.name in tensors.buffers else module._attribute(role.name)
    return {Role(WHOLE, "", k): t for k, t in enumerate(samples.values(found, device))}


class PartedRun(Run):
    """A call in flight whose last micro-batch it is, once `forward` has run the others."""

    def __init__(self, module: Parted, flights: Sequence[Flight], diff: list[str], buffers: Mapping[str, torch.Tensor]) -> None:
        last = flights[-1]
        super().__init__(module, last.step, last.values, diff, last.call, buffers)
        self.micro, self.earlier = module._micro, list(flights[:-1])
        self.unreduced: dict[str, torch.Tensor] = {}
        self.reduced: dict[str, torch.Tensor] = {}
        self.assumed = torch.ones(())
        self.is_spent = False

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        self.assumed = self.guess()
        stays: list[torch.Tensor] = []
        total: torch.Tensor | None = None
        while self.earlier:
            flight = self.earlier.pop(0)
            following = self.earlier[0].step if self.earlier else self.step
            loss, stays = self.one(flight, following is not flight.step, stays)
            stays = stays if following is flight.step else []
            total = loss if total is None else total + loss
        self.stays = stays
        return tuple(o if o is None or total is None else o + total for o in super().forward())

    def one(self, flight: Flight, reduces: bool, stays: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward and backward of one micro-batch: its loss, and what stays of it. reduces: it is the last of its size; stays: of the one before."""
        step, groups = flight.step, self.module._builder.groups
        run = Run(self.module, step, flight.values, self.diff, flight.call, self.buffers, again=True)
        run.check, run.stays = None, stays
        loss = next(o for o in run.forward() if o is not None)
        stays = stays or (step.staying(run.saved) if step.is_gathered_once else [])
        values = {r: v for r, v in run.values.items() if r in step.read_by_backward or r.kind == "coordinate"}
        for role in step.base.backward_inputs:
            if role.kind == "tangent":
                values[role] = self.assumed.to(step.tangent_like(role.index).dtype)
        values |= {Role("accumulated", p): t for p, t in self.unreduced.items()}
        has, self.unreduced = bool(self.unreduced), {}
        saved, run.saved, run.values = run.saved, [], {}
        flight.values.clear()
        with shared(groups, begin(groups), "backward of a micro-batch"), torch.no_grad():
            found = {r.name: t for r, t in step.backward(saved, values, reduces, has) if r.kind == "grad" and t is not None}
        if reduces:
            self.reduced = {n: self.reduced[n] + t if n in self.reduced else t for n, t in found.items()}
        else:
            self.unreduced = found
        return loss, stays

    def guess(self) -> torch.Tensor:
        """A gradient of the loss that is likely to arrive, 0-d: never zero or infinite."""
        last = self.micro.tangent
        if last is None:
            return torch.ones((), device=self.module._builder.device)
        return torch.where(torch.isfinite(last) & (last != 0), last, torch.ones_like(last))

    def reduce(self, saved: list[torch.Tensor], values: dict[Role, torch.Tensor]) -> dict[Role, torch.Tensor | None]:
        if self.is_spent:
            raise AutoparError(
                "backward runs twice through one call (retain_graph=True), whose micro-batches have been let go of",
                fix="add up what the loss is used for and call backward once; or leave micro_batches= out",
            )
        self.is_spent = True
        (tangent,) = (values[r] for r in self.step.base.backward_inputs if r.kind == "tangent")
        self.micro.tangent = tangent.detach().clone()
        ratio = tangent / self.assumed.to(tangent.dtype)
        if ratio.device.type != "cpu" or float(ratio) != 1.0:  # reading it elsewhere would wait for the device
            for t in {id(t): t for t in (*self.unreduced.values(), *self.reduced.values())}.values():
                t.mul_(ratio)
        self.module._sync.add(self.step, self.unreduced, self.reduced)
        self.unreduced, self.reduced = {}, {}
        return super().reduce(saved, values)


def not_kept(number: int) -> Callable[[], Any]:
    """In place of what computes a call's outputs besides the loss."""

    def rest() -> Any:
        raise NotComputedError(
            f"the call was run as {number} micro-batches, which give their loss alone: the model's other outputs are not kept",
            fix="call the model under torch.no_grad(), or in eval(), where the whole batch is run; or leave micro_batches= out",
        )

    return rest


def checked(number: object, outputs: str, has_layout: bool, given: int | None) -> int | str | None:
    """`micro_batches=` of autopar.compile. given: of the plan that is passed, if any."""
    if number is None:
        return None
    found = checked_number(number)
    if found == AUTO and (has_layout or given is not None):
        raise AutoparError(
            'micro_batches="auto" is a question to the planner, and layout= or plan= leave it nothing to plan',
            fix="pass a number, or leave layout= and plan= out",
        )
    if found != 1 and outputs == "all":
        raise AutoparError(
            'outputs="all" asks for all that the model returns, and micro-batches give their loss alone', fix="leave one of the two out"
        )
    if given is not None and given != found:
        raise AutoparError(
            f"the plan is for {given} micro-batches, and micro_batches={number} is passed",
            fix="leave micro_batches= out, or make a plan with it",
        )
    return found
