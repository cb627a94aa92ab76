"""A compiled step: what was rewritten (`autopar.runtime.pipeline`), lowered, and how its graph inputs are filled at run time.

A step belongs to one kind of call (structure, shapes, train or eval, grad or not). Forward is lowered at once; the
backward variants (reduce gradients or not, with or without gradients accumulated earlier) when first needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch

from autopar.capture.capture import Captured, Role
from autopar.cost.triton import TRITON, told_of
from autopar.distributed.failures import Collective
from autopar.distributed.groups import Groups
from autopar.graph.graph import Graph
from autopar.graph.placement import Placement
from autopar.kernels.triton import why_not
from autopar.passes.bucket import bucketed
from autopar.passes.lay_out import copies
from autopar.passes.manager import overlap
from autopar.passes.partition import Parts
from autopar.passes.reductions import only_gradients
from autopar.passes.shard import Sharded, accumulated_grads
from autopar.plan.decisions import BUCKETED, CollectiveUse
from autopar.plan.plan import Plan
from autopar.runtime.compile_cache import CompileOnce
from autopar.runtime.dump import Dump
from autopar.runtime.expert_load import layers_of
from autopar.runtime.general import General, Strides
from autopar.runtime.lower import Lowered, lower
from autopar.runtime.pipeline import Settings, halves, rewritten
from autopar.tensors.memory_format import with_strides
from autopar.text.log import timed
from autopar.text.progress import told


class StepStats(TypedDict):
    """Counts of what compilation did. backward: by what it does with gradients, (whether they are reduced, whether earlier calls' are added)."""

    forward: dict[str, float]
    backward: dict[tuple[bool, bool], dict[str, float]]


class Step:
    """One captured call, lowered. `forward(values)` returns (results by role, saved tensors); `backward(...)` the gradients."""

    def __init__(
        self,
        captured: Captured,
        graph: Graph,
        plan: Plan,
        groups: Groups,
        settings: Settings,
        kind: str = "step",
        stage: Callable[[bool, bool], Sharded] | None = None,
    ) -> None:
        """kind: "train", "eval", ...: what a dump of it is called. stage: where it is a stage of a pipeline, its joint graph, by what becomes of gradients."""
        self.stage = stage
        self.program = ""  # what the module computes in it, as text
        self.captured, self.graph, self.plan, self.groups, self.settings = captured, graph, plan, groups, settings
        self.dump = Dump(kind)
        self.dump.graph("captured", captured.gm)
        self.dump.text("plan", plan.text() + "\n")
        self.general = None if captured.family is None else General(captured.family, graph, plan)
        self.units: tuple[int, ...] = () if self.general is None else self.general.family.units
        parts, self.collectives = self.parts(True, False)
        self.base = parts
        self.read_by_backward = frozenset(parts.backward_inputs)
        self.taken = tuple(dict.fromkeys((*parts.forward_inputs, *parts.backward_inputs)))
        self.local_shapes = {name: c.storage.local_shape(plan.mesh) for name, c in plan.params.items()}
        self.plan = replace(plan, collectives=self.collectives, solver=self.told(parts))
        places = [n for n in parts.forward.graph.nodes if n.op == "placeholder"]
        self.dtypes = {r: n.meta["val"].dtype for r, n in zip(parts.forward_inputs, places, strict=True)}
        self.experts = layers_of(parts.forward, {op.name: op.module for op in graph.ops})
        self.strides: list[Strides] = [n.meta["val"].stride() for n in places]
        if self.general is None:
            self.lowered = self.lower(parts.forward)
        else:
            self.lowered, self.strides = self.general.lower(self, parts.forward, (True, False))
        self.backwards: dict[tuple[bool, bool], tuple[Parts, Lowered]] = {}
        self.given_strides: dict[tuple[bool, bool], list[Strides]] = {}  # of what a backward takes besides what is saved
        self._accumulated: dict[str, tuple[Placement, torch.dtype]] | None = None
        self._tangents: dict[int, torch.Tensor] = {}
        self.updates = any(r.kind == "buffer_update" for r in parts.forward_outputs)
        self.differentiable = frozenset(r.index for r in captured.inputs if r.kind == "tangent")  # outputs that have a gradient
        self._later: Lowered | None = None
        self._checked: list[bool] = []  # by AUTOPAR_CHECK; shared with this step at other sizes

    @property
    def checked(self) -> bool:
        return bool(self._checked)

    def first_run(self) -> bool:
        """Whether nobody has asked this before, at any size."""
        self._checked.append(True)
        return len(self._checked) == 1

    def bound(self, groups: Groups, once: CompileOnce | None) -> None:
        """From here on the step is of these groups, which have the sizes and names of those that it was compiled for."""
        self.groups, self.settings = groups, replace(self.settings, once=once)

    def holds(self, units: tuple[int, ...]) -> bool:
        """Whether this step, of sizes that vary, is right and compiled for these."""
        return self.general is not None and self.general.holds(units)

    def sized(self, units: tuple[int, ...]) -> Step:
        """This step for sizes of so many units: the same code, and what is said of it at those sizes."""
        assert self.general is not None
        if units == self.units:
            return self
        other = copy.copy(self)
        other.units, other._tangents = units, {}
        other.captured, other.plan = self.general.said(units, self.captured, self.plan)
        return other

    def written_out(self) -> Step:
        """This step, with its graphs at its sizes, not at those that stand for all: for checks, not to be run."""
        if self.general is None or self.units == self.general.family.units:
            return self
        other = copy.copy(self)
        other.captured, other.graph, other.plan = self.general.at(self.units)
        other._tangents = {}
        other.base, _ = self.parts_of(other.captured, other.graph, other.plan, True, False, Dump(""))
        return other

    def fixed(self, strides: Sequence[Strides]) -> Sequence[Strides]:
        """Strides at this step's sizes."""
        if self.general is None:
            return strides
        return [tuple(self.general.family.size_at(x, self.units) for x in s) for s in strides]

    @property
    def accumulated(self) -> dict[str, tuple[Placement, torch.dtype]]:
        """Where each parameter's gradient is added to those of other micro-batches, and its dtype there."""
        if self._accumulated is None:
            self._accumulated = accumulated_grads(self.graph, self.plan, self.settings.reduce, dict(self.settings.storage))
        return self._accumulated

    @property
    def has_backward(self) -> bool:
        return self.base.backward is not None

    def parts(self, sync: bool, accumulated: bool) -> tuple[Parts, tuple[CollectiveUse, ...]]:
        return self.parts_of(self.captured, self.graph, self.plan, sync, accumulated, self.dump)

    def parts_of(
        self, captured: Captured, graph: Graph, plan: Plan, sync: bool, accumulated: bool, dump: Dump
    ) -> tuple[Parts, tuple[CollectiveUse, ...]]:
        if self.stage is not None:
            mine = self.stage(sync, accumulated)
            return halves(mine, graph, plan, self.groups, self.settings, dump), mine.collectives
        return rewritten(captured, graph, plan, self.groups, self.settings, sync, accumulated, dump)

    def told(self, parts: Parts) -> dict[str, str | float | int]:
        """What the plan's solver says, with what became of buckets on this cluster, and which kernels run on these devices. A CPU may run what is planned for a GPU."""
        cost, solver = self.settings.links if self.settings.joins else None, self.plan.solver
        if self.settings.device.type != "cpu" or TRITON not in solver:
            solver = {**{k: v for k, v in solver.items() if k != TRITON}, **self.kernels()}
        if cost is None and not any(k in self.plan.predicted for k in BUCKETED):
            return solver
        return {**solver, "buckets": "" if cost is None else str(bucketed(parts, self.groups.prefix, cost))}

    def kernels(self) -> dict[str, str]:
        """Which Triton kernels this device runs of the step, for people."""

        def reason(*dtypes: str) -> str:
            return next((said for d in dtypes if (said := why_not(self.settings.device, getattr(torch, d)))), "")

        ops = ((op, self.plan.ops[op.name].strategy, 1) for op in self.graph.ops if op.name in self.plan.ops)
        return told_of(ops, self.plan.mesh, reason)

    def lower(self, gm: Any, saved_strides: Any = None, is_backward: bool = False, mode: Any = None) -> Lowered:
        """mode: of the values recorded in `gm`, where it is not the captured program's."""
        s, mode = self.settings, mode or self.captured.fake_mode
        with timed(f"lower {'backward' if is_backward else 'forward'} with {s.backend}"):
            return lower(
                gm, backend=s.backend, fake_mode=mode, is_backward=is_backward, saved_strides=saved_strides, once=s.once, kept=s.kept
            )

    def tangent_like(self, index: int) -> torch.Tensor:
        """Shape and dtype of the tangent of output `index`."""
        assert self.base.backward is not None
        found = self._tangents.get(index)
        if found is not None:
            return found
        places = [n for n in self.base.backward.graph.nodes if n.op == "placeholder"][len(self.base.saved) :]
        like: torch.Tensor = next(
            n.meta["val"] for r, n in zip(self.base.backward_inputs, places, strict=True) if r == Role("tangent", "", index)
        )
        shape = self.plan.outputs[index].local_shape(self.plan.mesh)
        found = self._tangents[index] = torch.empty(shape, dtype=like.dtype, device="meta")
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the lowered graphs take before tensors."""
        return self.units if self.general is not None else ()

    @property
    def stats(self) -> StepStats:
        """By half, and for backward by variant."""
        copied = [0 if gm is None else copies(gm) for gm in (self.base.forward, self.base.backward)]
        return {
            "forward": {**self.lowered.stats, "layout_copies": copied[0]},
            "backward": {k: {**lowered.stats, "layout_copies": copied[1]} for k, (_, lowered) in self.backwards.items()},
        }

    @property
    def saved_strides(self) -> Any:
        strides = self.lowered.strides
        return None if strides is None else strides[len(self.base.forward_outputs) :]

    def backward_of(self, sync: bool, accumulated: bool) -> tuple[Parts, Lowered]:
        key = (sync, accumulated)
        if key not in self.backwards:
            at = self.general.first if self.general is not None else (self.captured, self.graph, self.plan)
            parts = self.base if key == (True, False) else self.parts_of(*at, *key, self.dump)[0]
            assert parts.saved == self.base.saved, "variants of backward must read the same saved values"
            assert parts.backward is not None
            places = parts.backward.graph.find_nodes(op="placeholder")
            strides: list[Strides] = [n.meta["val"].stride() for n in places]
            with told("backward compiled", self.groups.rank == 0):
                if self.general is None:
                    lowered = self.lower(parts.backward, self.saved_strides, True)
                else:
                    lowered, strides = self.general.lower(self, parts.backward, key, self.saved_strides, True)
            self.given_strides[key] = strides[len(parts.saved) :]
            self.backwards[key] = (parts, lowered)
        return self.backwards[key]

    def reduces_gradients(self, collective: Collective) -> bool:
        """Whether this collective of a backward pass belongs to no activation, but reduces a gradient."""
        graphs = [parts.backward for parts, _ in self.backwards.values() if parts.backward is not None]
        return any(only_gradients(gm, collective.kind, collective.group, collective.result) for gm in graphs)

    def forward(self, values: Mapping[Role, torch.Tensor]) -> tuple[list[tuple[Role, torch.Tensor | None]], list[torch.Tensor]]:
        """values: a local tensor for every graph input's role."""
        flat = [with_strides(values[r], s) for r, s in zip(self.base.forward_inputs, self.fixed(self.strides), strict=True)]
        with self.settings.load.watched(self.experts, self.plan.imbalance):
            out = self.lowered.fn([*self.sizes, *flat])
        n = len(self.base.forward_outputs)
        return list(zip(self.base.forward_outputs, out[:n], strict=True)), list(out[n:])

    @property
    def is_gathered_once(self) -> bool:
        """Whether something of what a micro-batch saves stays for later ones of a call."""
        return self.base.later is not None and self.general is None

    def staying(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what forward saved, what later micro-batches are given."""
        return [saved[i] for i in self.base.stays]

    def forward_later(
        self, values: Mapping[Role, torch.Tensor], stays: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[Role, torch.Tensor | None]], list[torch.Tensor]]:
        """`forward`, without gathering what stays."""
        lowered, strides = self.later, self.saved_strides
        flat = [with_strides(values[r], s) for r, s in zip(self.base.forward_inputs, self.strides, strict=True)]
        with self.settings.load.watched(self.experts, self.plan.imbalance):
            out = lowered.fn([*stays, *flat])
        n = len(self.base.forward_outputs)
        made, given, saved = iter(out[n:]), iter(stays), list[torch.Tensor]()
        for i in range(len(self.base.saved)):
            t = next(given) if i in self.base.stays else next(made)
            saved.append(t if strides is None or strides[i] is None or not isinstance(t, torch.Tensor) else with_strides(t, strides[i]))
        return list(zip(self.base.forward_outputs, out[:n], strict=True)), saved

    @property
    def later(self) -> Lowered:
        """Forward of later micro-batches; backward is the same, and reads what that of the first saves, as it lies there."""
        if self._later is None:
            assert self.base.later is not None
            s, strides = self.settings, self.saved_strides
            gm = overlap(self.base.later, self.groups.prefix, s.links, s.joins).forward
            self.dump.graph("overlap, forward of later micro-batches", gm)
            self._later = self.lower(gm, None if strides is None else [strides[i] for i in self.base.stays])
        return self._later

    def backward(
        self, saved: list[torch.Tensor], values: dict[Role, torch.Tensor], sync: bool, accumulated: bool
    ) -> list[tuple[Role, torch.Tensor | None]]:
        """Empties `saved` and `values`, so that each tensor can be freed at its last use."""
        parts, lowered = self.backward_of(sync, accumulated)
        strides = self.fixed(self.given_strides[sync, accumulated])
        flat = [*self.sizes, *saved, *(with_strides(values[r], s) for r, s in zip(parts.backward_inputs, strides, strict=True))]
        saved.clear()
        values.clear()
        out = lowered.fn(flat)
        return list(zip(parts.backward_outputs, out, strict=True))
