"""The plan: what is decided about a captured step. Torch-free, frozen, JSON in and out.

A plan names, for every op, the strategy (axis -> factor), for every parameter where it is stored and where it is computed with,
and where inputs and outputs live. Passes apply it and decide nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from autopar.mesh import Mesh
from autopar.placement import Placement


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
    # Which program it is for (`autopar.refit`): of its canonical graph, and operators that stand for all others, in order.
    fingerprint: str = ""
    order: tuple[str, ...] = ()
    # What planning says of it; a hand layout says nothing.
    cluster: str = ""
    activations: dict[str, str] = field(default_factory=dict)  # what backward needs of forward -> "save" | "recompute"
    predicted: dict[str, float] = field(default_factory=dict)  # step_time_s, forward_s, backward_s, optimizer_s, peak_memory_bytes, ...
    solver: dict[str, str | float | int] = field(default_factory=dict)  # objective_s, bound_s, gap, stopped_by, seconds, ...

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.mesh_axes)

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

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """A layout table by parameter kind, collectives by kind, fallbacks."""
        mesh = " x ".join(f"{n}={s}" for n, s in self.mesh_axes.items())
        lines = [f"plan: layout {self.layout} on mesh {mesh}, batch split {self.data_size} ways"]
        rows: dict[tuple[str, str, str], list[int]] = {}
        for name, p in self.params.items():
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            row = rows.setdefault((kind, _short(p.storage), _short(p.compute)), [0, 0])
            row[0] += 1
            row[1] += math.prod(p.shape)
        width = max((len(k) for k, _, _ in rows), default=10)
        lines.append(f"  {'parameter':<{width}}  {'count':>5}  {'elements':>12}  {'stored':<24}  computed with")
        for (kind, storage, compute), (count, numel) in rows.items():
            lines.append(f"  {kind:<{width}}  {count:>5}  {numel:>12,}  {storage:<24}  {compute}")
        uses: dict[tuple[str, str, str], tuple[int, float]] = {}
        for c in self.collectives:
            key = (c.direction, c.kind, " x ".join(_merge(list(c.axes))))
            count, total = uses.get(key, (0, 0.0))
            uses[key] = (count + c.count, total + c.count * c.wire_bytes)
        for (direction, kind, names), (count, total) in sorted(uses.items()):
            lines.append(f"  {direction:<8} {kind:<15} over {names:<12} {count:>5} x, {total / 1e6:,.2f} MB sent a rank")
        lines.append(f"  collectives: {sum(c.count for c in self.collectives if c.kind != 'slice')}; those of activations block")
        lines.append(f"  fallbacks (ops without a rule, replicated): {self.fallbacks or 'none'}")
        if self.activations:
            saved = sum(f == "save" for f in self.activations.values())
            lines.append(f"  activations: {saved} saved, {len(self.activations) - saved} recomputed by {len(self.recompute)} ops")
        if self.predicted:
            order = sorted(self.predicted, key=lambda k: (k != "step_time_s", k))
            lines.append(f"  predicted on {self.cluster}: " + ", ".join(_said(k, self.predicted[k]) for k in order))
        if "gap" in self.solver:
            lines.append(
                f"  solver: within {float(self.solver['gap']):.2%} of the bound, stopped by {self.solver.get('stopped_by', 'gap')}"
            )
        if self.repeated:
            lines.append(f"  heavy ops whose work some ranks repeat: {dict(Counter(self.targets[o] for o in self.repeated))}")
        return "\n".join(lines)


def _said(key: str, value: float) -> str:
    """step_time_s -> "step time 12.3 ms"."""
    for suffix, scale, unit in (("_s", 1e3, "ms"), ("_bytes", 1e-9, "GB")):
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')} {value * scale:,.3f} {unit}"
    return f"{key.replace('_', ' ')} {value:,.3f}"


def _short(p: Placement) -> str:
    if p.is_replicate:
        return "Replicate"
    by_dim: dict[int, list[str]] = {}
    for s in sorted(p.splits, key=lambda s: (s.dim, -s.stride)):
        by_dim.setdefault(s.dim, []).append(s.axis)
    return ", ".join(f"Shard({d}) {'.'.join(_merge(axes))}" for d, axes in sorted(by_dim.items()))


def _merge(axes: list[str]) -> list[str]:
    """dp.0, dp.1 -> dp for people."""
    return list(dict.fromkeys(a.rsplit(".", 1)[0] if a.rsplit(".", 1)[-1].isdigit() else a for a in axes))
