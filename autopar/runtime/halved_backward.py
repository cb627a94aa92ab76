"""A stage's backward as two calls: the gradients that are sent, then those of parameters (`autopar.passes.stages.split`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.capture.capture import Role
from autopar.passes.stages.split import Half, Split, split
from autopar.runtime.lower import Lowered
from autopar.runtime.step import Step
from autopar.tensors.memory_format import with_strides

Values = dict[Role, torch.Tensor]


@dataclass(frozen=True)
class _Lowered:
    half: Half
    lowered: Lowered
    strides: list[tuple[int, ...]]


class HalvedBackward:
    """Of one stage's step. What is between the two is among the values, under roles "between"."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.parts: Split = split(step.base)
        self.first = None if self.parts.input is None else self._lower(self.parts.input, ())
        self.reads = {r.index for r in self.parts.weight.inputs if r.kind == "saved"}
        self.weights: dict[tuple[bool, bool], _Lowered] = {}

    def input(self, saved: list[torch.Tensor], values: Values) -> dict[Role, torch.Tensor | None]:
        """What is sent. Puts what W reads of this into `values`, and takes out of `saved` what it does not read."""
        kept = {i: t for i, t in enumerate(saved)}
        sent: dict[Role, torch.Tensor | None] = {}
        if self.first is not None:
            half = self.first.half
            out = self._run(self.first, kept, values)
            sent = dict(zip(half.outputs, out, strict=False))
            values |= {Role("between", "", i): t for i, t in enumerate(out[len(half.outputs) :])}
        values |= {Role("saved", "", i): t for i, t in kept.items() if i in self.reads}
        saved.clear()
        return sent

    def weight(self, saved: list[torch.Tensor], values: Values, sync: bool, accumulated: bool) -> list[tuple[Role, torch.Tensor | None]]:
        """Gradients of parameters, as `Step.backward` gives them. `saved` is empty by now: all is among the values."""
        assert not saved
        lowered = self.weight_of(sync, accumulated)
        out = self._run(lowered, {}, values)
        values.clear()
        return list(zip(lowered.half.outputs, out, strict=True))

    def weight_of(self, sync: bool, accumulated: bool) -> _Lowered:
        """Its second half, compiled."""
        key = sync, accumulated
        if key not in self.weights:
            parts = self.parts if key == (True, False) else split(self.step.parts(*key)[0])
            assert parts.between == self.parts.between, "variants of backward have the same on the way to what is sent"
            strides = () if self.first is None or self.first.lowered.strides is None else self.first.lowered.strides
            self.weights[key] = self._lower(parts.weight, strides[len(self.first.half.outputs) :] if self.first is not None else ())
        return self.weights[key]

    def _lower(self, half: Half, between: tuple[tuple[int, ...] | None, ...]) -> _Lowered:
        """between: strides of what I made, where the compiler chose them."""
        saved = self.step.saved_strides
        chosen = []
        for r in half.inputs:
            of = {"saved": saved, "between": between}.get(r.kind) or None
            chosen.append(None if of is None else of[r.index])
        places = half.gm.graph.find_nodes(op="placeholder")
        lowered = self.step.lower(half.gm, chosen if any(c is not None for c in chosen) else None, True)
        return _Lowered(half, lowered, [tuple(n.meta["val"].stride()) for n in places])

    def _run(self, part: _Lowered, saved: dict[int, torch.Tensor], values: Values) -> list[torch.Tensor]:
        flat = []
        for r, strides in zip(part.half.inputs, part.strides, strict=True):
            if r.kind == "saved" and r.index in saved:
                flat.append(saved[r.index])
            else:
                flat.append(values[r] if r.kind in ("saved", "between") else with_strides(values[r], strides))
        return part.lowered.fn(flat)
