"""The plan: what is decided about a captured step. Torch-free, frozen, JSON in and out.

A plan names, for every op, the strategy (axis -> factor), for every parameter where it is stored and where it is computed with,
and where inputs and outputs live. Passes apply it and decide nothing.
"""

from __future__ import annotations

import importlib
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.placement import Placement
from autopar.plan_text import text

OFFLOAD = "offload:"
_ASKED = ("_why", "_trace")  # what `explain` and `frontier` ask


@dataclass(frozen=True)
class OpChoice:
    """strategy: axis -> (letter, stride); partial: axis -> inputs whose Partial(sum) passes through; kind: the rule's kind."""

    strategy: dict[str, tuple[str, int]] = field(default_factory=dict)
    partial: dict[str, frozenset[int]] = field(default_factory=dict)
    kind: str = "cheap"
    fallback: bool = False


@dataclass(frozen=True)
class ParamChoice:
    """storage: placement of parameter, gradient and optimizer state, over `padded` (the shape rounded up so that it divides);
    compute: where ops use it; gradients: reduced to `storage` every micro-batch."""

    shape: tuple[int, ...]
    dtype: str
    padded: tuple[int, ...]
    storage: Placement
    compute: Placement
    trainable: bool = True


@dataclass(frozen=True)
class CollectiveUse:
    """A collective the shard pass inserted: kind, axes, local bytes moved a rank, the tensor it serves, direction; how many there are of it
    (one for each of a class of tensors, where the plan is made for equal layers at once)."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    tensor: str
    direction: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """A decided step on a mesh (user axes name -> size)."""

    mesh_axes: dict[str, int]
    layout: str
    params: dict[str, ParamChoice]
    ops: dict[str, OpChoice]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    data_axes: tuple[str, ...]
    targets: dict[str, str] = field(default_factory=dict)  # op name -> target, for the report
    collectives: tuple[CollectiveUse, ...] = ()
    repeated: dict[str, float] = field(default_factory=dict)  # heavy op -> how many ranks repeat the same work
    reshard_after_forward: bool = True
    # Empty in a hand layout: backward then reads whatever version is cheapest, and all of them are kept.
    kept: dict[str, Placement] = field(default_factory=dict)  # what backward reads of forward -> the version of it that is kept
    recompute: frozenset[str] = frozenset()  # ops that run again in backward
    unmet: tuple[str, ...] = ()  # what is kept though the user wants it made again (`autopar.tags`), for people
    # Which program it is for (`autopar.refit`): of its canonical graph, and operators that stand for all others, in order.
    fingerprint: str = ""
    order: tuple[str, ...] = ()
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)  # repeated stack -> layers that share fates, first to last, if cut
    together: int = 1  # neighbouring layers that have fates of their own, the same in every so many (`solver.fold.grouped`)
    modules: dict[str, str] = field(default_factory=dict)  # op of forward -> path of the module it came from, for the report
    # What planning says of it; a hand layout says nothing.
    cluster: str = ""
    activations: dict[str, str] = field(
        default_factory=dict
    )  # what backward needs of forward -> "save" | "recompute" | "offload:host" | ...
    predicted: dict[str, float] = field(default_factory=dict)  # step_time_s, forward_s, backward_s, optimizer_s, peak_memory_bytes, ...
    solver: dict[str, str | float | int] = field(default_factory=dict)  # objective_s, bound_s, gap, stopped_by, seconds, ...

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.mesh_axes)

    @property
    def offload(self) -> dict[str, str]:
        """What is kept away from the device: tensor -> "host" | "nvme"."""
        return {t: fate.removeprefix(OFFLOAD) for t, fate in self.activations.items() if fate.startswith(OFFLOAD)}

    @property
    def fallbacks(self) -> dict[str, int]:
        """Ops without a rule, replicated: target -> count."""
        return dict(Counter(self.targets[o] for o, c in self.ops.items() if c.fallback))

    def fallbacks_of(self, *kinds: str) -> dict[str, int]:
        """Replicated-for-want-of-a-rule or repeated ops among heavy kinds: target -> count."""
        return dict(Counter(self.targets[o] for o, c in self.ops.items() if c.kind in kinds and (c.fallback or o in self.repeated)))

    @property
    def parameters(self) -> dict[str, str]:
        """Name -> storage and compute placement, for people."""
        return {n: f"{p.storage} -> {p.compute}" for n, p in self.params.items()}

    @property
    def data_size(self) -> int:
        """Over how many ranks the batch is split."""
        return math.prod(self.mesh.axis_size(a) for a in self.data_axes)

    def explain(self, op: str, placement: str) -> Any:
        """Why this plan does not have `op` at `placement`, or what that would cost (`autopar.explain`, which see): the step is solved again.

        Raises AutoparError for a plan that comes from a file: it does not know the program.
        """
        why: Any = self.__dict__.get("_why")
        if why is None:
            raise AutoparError(
                "this plan was read from a file, copied or made by hand: what else there was to choose is not in it",
                fix="ask autopar.explain(model, inputs, cluster, mesh, op=..., placement=...), which plans again",
            )
        return why(op, placement)

    def frontier(self, points: int = 20) -> Any:
        """Plans of the same step from the fastest, whatever memory it needs, to the one of least memory (`autopar.frontier.Frontier`).

        points: at most so many. Raises AutoparError for a plan that comes from a file: it does not know the program.
        """
        trace: Any = self.__dict__.get("_trace")
        if trace is None:
            raise AutoparError(
                "this plan was read from a file, copied or made by hand: it does not know the program, so there is nothing to plan again",
                fix="make the plan with autopar.plan(model, inputs, cluster, mesh) and ask that one, or use `autopar frontier`",
            )
        return trace(points)

    def explained_by(self, why: Callable[[str, str], Any], trace: Callable[[int], Any] | None = None) -> Plan:
        """This plan, with what `explain` and `frontier` ask. It is no part of the plan: files do not have it, nor copies."""
        object.__setattr__(self, "_why", why)
        object.__setattr__(self, "_trace", trace)
        return self

    def answering_as(self, other: Plan) -> Plan:
        """This plan, which answers what `other` does: one of the same program."""
        for key in _ASKED:
            if key in other.__dict__:
                object.__setattr__(self, key, other.__dict__[key])
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all. Raises PlanError where the path cannot be written."""
        _files().save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file that `save` or `autopar plan -o` wrote. Raises PlanError for anything else."""
        found: Plan = _files().load(path)
        return found

    def diff(self, other: Plan) -> str:
        """Line by line what `other` decides otherwise; "" when they are equal."""
        found: str = importlib.import_module("autopar.plan_diff").diff(self, other)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _ASKED}

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """A block for every kind of layer, then collectives, fallbacks and predictions."""
        return text(self)


def _files() -> Any:
    # The schema is written in terms of plans.
    return importlib.import_module("autopar.plan_schema")
