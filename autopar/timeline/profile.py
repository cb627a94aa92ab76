"""What a rank does in a step, call by call, with equal layers told once.

A profile is made from the solved program (`autopar.planner.profiling`), is part of a plan and lies in its file. Its calls are those that were priced: operators,
collectives, copies to the host. So seconds by stage and stream are the accounts of the program, and the largest sum of memory is its peak.

    region   a stretch of one stage: the copies of a repeated stack, one behind the other, or one operator outside of stacks
    copies   a call of a stack stands for `times` neighbouring copies of it, from copy `first` on
    spot     where in the step something happens: a region, how many copies further than the call's own (`shift`: a gather is issued a layer early), the
             position within the copy, and the phase there

`expand.py` makes the calls of all layers of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Phases of a position, in order: what is issued ahead, what runs again, what the operator reads, itself, what it makes, what is awaited behind it.
AHEAD, REPEATS, READ, RUN, MADE, BEHIND = range(6)

# Kinds of memory, from what is there throughout to what lives shortest.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "inputs and buffers",
    "gathered parameters",
    "kept for backward",
    "made again",
    "in use",
    "moving",
)


@dataclass(frozen=True)
class Region:
    """stage: "forward" | "backward" | "optimizer"; stack: its name, "" outside of stacks; layers: of each copy."""

    stage: str
    stack: str = ""
    layers: int = 1


@dataclass(frozen=True)
class Spot:
    """phase: one of `AHEAD` ... `BEHIND`; sub: order within it."""

    region: int
    shift: int
    position: int
    phase: int
    sub: int = 0


@dataclass(frozen=True)
class What:
    """What a call is. name: of the operator, the collective ("all_gather") or the copy; module: path of what it is of, layer numbers starred; stack: that it is of,
    though it may run elsewhere, "" for none; serves: what it moves or works for ("activation", "parameter", "gradient", "" for an operator); axes: the mesh axes a collective goes over; recompute: runs a second time, for backward."""

    name: str
    module: str
    stream: str
    stack: str = ""
    serves: str = ""
    axes: tuple[str, ...] = ()
    recompute: bool = False


@dataclass(frozen=True)
class Call:
    """nbytes: what it sends, or moves to and from the device's memory. wait: where compute waits for it; None: it runs on compute, or compute waits at once."""

    what: int
    seconds: float
    nbytes: int
    first: int
    times: int
    at: Spot
    wait: Spot | None = None


@dataclass(frozen=True)
class Sample:
    """Memory by kind (an index of `KINDS`) at a spot, of the copy that comes first in the stack; kinds that are not there hold nothing."""

    first: int
    times: int
    at: Spot
    nbytes: Mapping[int, int]


@dataclass(frozen=True)
class Growth:
    """How samples of copies `first` to `first + times - 1` differ from that of the first, by kind: with every copy between them `before` more, which is what the copies
    in front keep, and `behind` less, which is what the copies behind have made."""

    region: int
    first: int
    times: int
    before: Mapping[int, int]
    behind: Mapping[int, int]


@dataclass(frozen=True)
class Profile:
    """stage_s: seconds of each stage, as priced. model_flops: products and attention of the step on all devices, without what is made again, causal attention as what is
    computed; peak_flops: of a device, in the dtype of most of them; samples, tokens: of a call (0: not known); micro_batches: calls for a step of the optimizer;
    contention: what compute loses beside a collective, as a share of its time; element_bytes: of a parameter as it is stored."""

    regions: tuple[Region, ...]
    whats: tuple[What, ...]
    calls: tuple[Call, ...]
    samples: tuple[Sample, ...]
    growths: tuple[Growth, ...]
    copies: Mapping[str, int]
    model_flops: float = 0.0
    peak_flops: float = 0.0
    samples_a_call: int = 0
    tokens_a_call: int = 0
    micro_batches: int = 1
    contention: float = 0.0
    element_bytes: float = 4.0
