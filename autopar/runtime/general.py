"""What a step of sizes that vary has besides an ordinary one: the program and its plan at any size, and graphs that are lowered for all of them.

Everything up to lowering is done at the size that stands for all, and once more at another one; what differs is put in as expressions (`passes.generalize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured, NotGeneralError, varied
from autopar.capture.describe import describe
from autopar.capture.family import Family
from autopar.capture.lift import Lift
from autopar.graph.graph import Graph
from autopar.passes.generalize import generalize
from autopar.passes.partition import Parts
from autopar.plan.decisions import CollectiveUse
from autopar.plan.plan import Plan
from autopar.planner.resize import Resize, resized
from autopar.runtime.dump import Dump
from autopar.runtime.lower import Lowered

Strides = Sequence[Any]  # numbers, or expressions of the sizes that vary
At = tuple[Captured, Graph, Plan]
KEPT = 256  # sizes whose program and plan are kept ready; they have no compiled code of their own


class Rewriter(Protocol):
    """What is asked of a step here."""

    def parts_of(
        self, captured: Captured, graph: Graph, plan: Plan, sync: bool, accumulated: bool, dump: Dump
    ) -> tuple[Parts, tuple[CollectiveUse, ...]]: ...
    def lower(self, gm: Any, saved_strides: Any = None, is_backward: bool = False, mode: Any = None) -> Lowered: ...


class General:
    """family: the captured program; graph, plan: at the size that stands for all.

    Raises NotGeneralError where the plan has no form at other sizes."""

    def __init__(self, family: Family[Captured], graph: Graph, plan: Plan) -> None:
        self.family = family
        self.first: At = (family.at(family.units), graph, plan)
        self._at: dict[tuple[int, ...], At] = {}
        self._holds: dict[tuple[tuple[int, ...], int], bool] = {}
        second = next(self.family.others(1), None)
        if second is None:
            raise NotGeneralError("there is no other size for which the same was assumed while it was captured")
        self.second = self.at(second)
        self.lift = Lift(family, family.units, second)
        self.values = _torch.SymbolicValues(self.lift.names, family.units)
        self._parts: dict[tuple[bool, bool], Parts] = {}  # at the second size

    def at(self, units: tuple[int, ...]) -> At:
        """The program at these sizes, without symbols, and the plan for it."""
        if units not in self._at:
            _, graph, plan = self.first
            captured = self.family.at(units)
            there = describe(captured)
            found = resized(plan, graph, there, self.family.units, units)
            if found is None:
                raise NotGeneralError(f"at {units} units it has other operators than at {self.family.units}")
            self._at[units] = captured, there, found
            while len(self._at) > KEPT:
                del self._at[next(iter(self._at))]
        return self._at[units]

    def said(self, units: tuple[int, ...], captured: Captured, plan: Plan) -> tuple[Captured, Plan]:
        """What is said of the program and of its plan to those who call it, at these sizes. captured, plan: at the size that stands for all."""
        r = Resize(self.family.units, units)
        shapes = varied(captured.input_shapes, self.family.varying, units)
        inputs = tuple(r.placement(p, s) for p, (s, _) in zip(plan.inputs, shapes, strict=True))
        outputs = list(plan.outputs)
        for i, shape in self.family.output_shapes(captured.outputs, units):
            outputs[i] = r.placement(outputs[i], shape)
        constants = self.family.output_numbers(captured.outputs, units, captured.constants)
        return replace(captured, input_shapes=shapes, constants=constants), replace(plan, inputs=inputs, outputs=tuple(outputs))

    def holds(self, units: tuple[int, ...]) -> bool:
        """Whether the program, and what was compiled of it, is right at these sizes."""
        key = (units, self.values.symbols.assumed)  # compiling a backward may assume more
        if key not in self._holds:
            if len(self._holds) > KEPT:
                self._holds.clear()
            self._holds[key] = self.family.holds(units) and self.values.symbols.hold(units)
        return self._holds[key]

    def lower(
        self, step: Rewriter, gm: fx.GraphModule, variant: tuple[bool, bool], saved_strides: Any = None, is_backward: bool = False
    ) -> tuple[Lowered, list[Strides]]:
        """A half of the step, for all sizes, and the strides of the tensors that it takes. gm: at the size that stands for all; variant: of backward."""
        if variant not in self._parts:
            self._parts[variant] = step.parts_of(*self.second, *variant, Dump(""))[0]
        parts = self._parts[variant]
        other = parts.backward if is_backward else parts.forward
        assert other is not None
        found = generalize(gm, other, self.lift)
        _torch.fill_sizes(found.gm, self.values, found.inputs)
        return step.lower(found.gm, saved_strides, is_backward, self.values.mode), [strides for _, strides in found.inputs]
