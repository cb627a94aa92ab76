"""What is decided about a captured step, as values: what passes apply, and what files, texts and comparisons of plans are made of.

A plan names, for every op, the strategy (axis -> factor), for every parameter where it is stored and where it is computed with,
and where inputs and outputs live. Passes apply it and decide nothing. Torch-free, frozen.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.pipeline import Lists, parse, scheduled, verified
from autopar.pipeline.named import INTERLEAVED
from autopar.timeline.profile import Profile

OFFLOAD = "offload:"
# What `predicted` says of buckets: collectives that are joined, what they become, seconds that this takes off the links.
BUCKETED = ("bucketed_collectives", "buckets", "bucket_saved_s")


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
    compute: where ops use it; keeps_gathered: what forward gathered of it stays until backward has read it, as in ZeRO-2, and is not
    gathered again; once_a_call: what the first of a call's micro-batches gathered stays for all of them, as in ZeRO-1; accumulated: where gradients of micro-batches are added up, `storage` or on the way there, each reduced so far. None: where they
    are made, unreduced."""

    shape: tuple[int, ...]
    dtype: str
    padded: tuple[int, ...]
    storage: Placement
    compute: Placement
    trainable: bool = True
    keeps_gathered: bool = False
    accumulated: Placement | None = None
    once_a_call: bool = False


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
class PipelineChoice:
    """The stages of a pipeline. schedule: its name; actions: of a schedule that has none of its own, a line a rank as `autopar.pipeline.actions` writes them; where: the rank of each stage; layers: paths of its layers' modules; work: its share of forward and backward; sent_bytes: what it sends
    to the next one, of a micro-batch, on each of its devices; bubble: share of the step in which ranks wait, by the replay, with stages that take as `work` says. forward_s, backward_s, hop_s:
    what the replay was made with, by stage, and by rank; empty where there are no times. weight_s: of backward_s the part that makes gradients of parameters alone; empty: half. peak_bytes: by rank,
    the most that it holds; empty where that is not known."""

    schedule: str
    ranks: int
    where: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    work: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    bubble: float
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    hop_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    actions: tuple[str, ...] = ()
    peak_bytes: tuple[float, ...] = ()

    def lists(self, micro_batches: int) -> Lists:
        """What every rank does. Raises LayoutError for a schedule that is not known by its name and not written out."""
        if self.actions:
            return verified(parse("\n".join(self.actions), self.schedule, self.schedule))
        stages = len(self.where) // self.ranks if self.schedule == INTERLEAVED else None
        return scheduled(self.schedule, self.ranks, micro_batches, stages)


@dataclass(frozen=True)
class Decisions:
    """A decided step on a mesh (user axes name -> size): what a plan holds. `autopar.plan.plan.Plan` is what people have of it."""

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
    unmet: tuple[str, ...] = ()  # what is kept though the user wants it made again (`autopar.planner.tags`), for people
    # Which program it is for (`autopar.planner.refit`): of its canonical graph, and operators that stand for all others, in order.
    fingerprint: str = ""
    order: tuple[str, ...] = ()
    segments: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # repeated stack -> layers that share policies, first to last, if cut
    together: int = 1  # neighbouring layers that have policies of their own, the same in every so many (`solver.fold.grouped`)
    micro_batches: int = 1  # that a call is run as, one after the other; all else is said of one of them, but times of a step
    imbalance: float = 1.0  # rows of the fullest rank over the mean, as assumed where routed experts are split over ranks
    pipeline: PipelineChoice | None = None  # `mesh_axes` are then of one stage
    modules: dict[str, str] = field(default_factory=dict)  # op of forward -> path of the module it came from, for the report
    # What planning says of it; a hand layout says nothing.
    cluster: str = ""
    activations: dict[str, str] = field(
        default_factory=dict
    )  # what backward needs of forward -> "save" | "recompute" | "offload:host" | ...
    predicted: dict[str, float] = field(default_factory=dict)  # step_time_s, forward_s, backward_s, optimizer_s, peak_memory_bytes, ...
    solver: dict[str, str | float | int] = field(default_factory=dict)  # objective_s, bound_s, gap, stopped_by, seconds, ...
    profile: Profile | None = (
        None  # the step call by call, as it was priced; None in a hand layout, and in files from before there were any
    )

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.mesh_axes)

    @property
    def offload(self) -> dict[str, str]:
        """What is kept away from the device: tensor -> "host" | "nvme"."""
        return {t: policy.removeprefix(OFFLOAD) for t, policy in self.activations.items() if policy.startswith(OFFLOAD)}

    @property
    def gathered_once(self) -> frozenset[str]:
        """Parameters of which what forward gathered stays for backward."""
        return frozenset(n for n, c in self.params.items() if c.keeps_gathered or c.once_a_call)

    @property
    def gathered_once_a_call(self) -> frozenset[str]:
        """Parameters of which what the first micro-batch gathered stays for all of a call, if it has several."""
        return frozenset(n for n, c in self.params.items() if c.once_a_call and self.micro_batches > 1)

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
