"""What is decided: a Problem is choices, values that flow between them, operators that may run twice, and budgets.

It says nothing of tensors or meshes. `autopar.planner.formulation` makes one from a graph; `model` writes it as an integer program;
`brute_force` solves small ones by enumeration; `evaluate` prices a solution on its own. All times are seconds of one training step, with the
number of equal layers already multiplied in; all sizes are bytes.

    choice   a cluster of operators (or the storage of a parameter) and its strategies; exactly one is taken
    value    a tensor. Its nodes are placements; arcs between nodes are redistributions. A `Flow` is a value in one direction: choices
             supply it at the node their strategy makes it at, and demand it at the node their strategy reads
    keeping  a value that backward reads is kept at a node where forward makes or reads it, on the device or away from it, or made again; what is
             kept supplies the backward flow
    rerun    an operator that may run again in backward, under its own strategy: it demands its operands there and supplies its results
    stage    a stretch whose compute and communication overlap: its time is the largest of its accounts
    row      live bytes at one position of the step, at most the budget
    limit    anything else that is bounded: bytes in host memory, seconds of a link beside the compute that hides it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

NONE = -1  # in a map from strategies to nodes: this strategy does not touch the value
DEVICE, HOST, NVME = MEDIA = ("device", "host", "nvme")


@dataclass(frozen=True)
class Account:
    """Busy time of one resource in one stage: the stage lasts at least as long as each of its accounts."""

    stage: int
    resource: str  # "compute" | "intra" | "inter" | "d2h" | "h2d" | ...


Times = Mapping[int, float]  # account -> seconds


@dataclass(frozen=True)
class Choice:
    """times: per strategy, what it takes of every account."""

    name: str
    labels: tuple[str, ...]
    times: tuple[Times, ...]


@dataclass(frozen=True)
class Arc:
    """A redistribution from node `src` to node `dst`. Paid once, however many consumers share its result. It starts where the value is: where
    it is supplied, or where another consumer has it brought (no stops on the way that nobody asked for: none would be made).

    way: which of several arcs between the two, that differ in times and in what they take of memory.
    stays: of forward alone, from where the value is supplied to where it is read: what it brings is there in backward too. Of
    one value all that are used stay, or none of those that take time.
    once: of `times`, what it does once for several steps of the problem: a share of that."""

    src: int
    dst: int
    times: Times
    way: int = 0
    stays: bool = False
    once: Times = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """Choice `choice` touches a flow at node `nodes[s]` under strategy s (NONE: not at all)."""

    choice: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Flow:
    """A value in one direction. supplies: at hand without being kept; demands: one entry per consumer."""

    arcs: tuple[Arc, ...]
    supplies: tuple[End, ...]
    demands: tuple[End, ...]


@dataclass(frozen=True)
class Policy:
    """Kept for backward at node `node`, in the device's memory or in another. times: of writing it and reading it for that alone, and of moving it there and back."""

    node: int
    medium: str = DEVICE
    times: Times = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """nodes: names of placements. backward: None when only forward reads it. policies: how it may be kept.

    group: the repeated stack it belongs to, "" for what occurs once.
    """

    name: str
    nodes: tuple[str, ...]
    forward: Flow
    backward: Flow | None = None
    policies: tuple[Policy, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Rerun:
    """An operator that may be recomputed. times: per strategy of its choice; reads, makes: (value, End on that value's backward flow).

    relaxed_times: what it takes at least by the share of layers that run again, whichever these are; `times` where nothing is said."""

    name: str
    choice: int
    times: tuple[Times, ...]
    reads: tuple[tuple[int, tuple[int, ...]], ...]  # value, node per strategy
    makes: tuple[tuple[int, tuple[int, ...]], ...]
    group: str = ""
    relaxed_times: tuple[Times, ...] = ()


# What a memory row adds up. Keys of the program's variables:
#   ("x", choice, strategy)  ("y", value, policy)  ("e", value, direction, arc)  ("r", rerun, strategy)  ("z", event, 0)
#   ("s", rest, 0): a sum of bytes of others, or nothing if that is negative
Key = tuple[str, int, int] | tuple[str, int, int, int]


Member = tuple[str, int]  # ("r", rerun): it runs again; ("z", event)


@dataclass(frozen=True)
class Event:
    """All of `every` happen, one of `one` does if there are any, and none of `no`. Events among them are earlier ones."""

    every: tuple[Member, ...]
    one: tuple[Member, ...] = ()
    no: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Row:
    """constant + sum of coefficient x variable <= budget, in bytes."""

    name: str
    constant: float
    terms: tuple[tuple[Key, float], ...]


@dataclass(frozen=True)
class Limit:
    """sum of coefficient x variable <= most, in a unit of its own."""

    name: str
    most: float
    terms: tuple[tuple[Key, float], ...]

    @property
    def unit(self) -> float:
        """What it is measured against: differences of a millionth of it are none."""
        return max((abs(k) for _, k in self.terms), default=1.0)


@dataclass(frozen=True)
class Problem:
    stages: tuple[str, ...]
    accounts: tuple[Account, ...]
    choices: tuple[Choice, ...]
    values: tuple[Value, ...]
    reruns: tuple[Rerun, ...] = ()
    rows: tuple[Row, ...] = ()
    budget_bytes: float = float("inf")
    constant_s: float = 0.0
    forbidden: frozenset[tuple[int, int]] = field(default_factory=frozenset)  # (choice, strategy)
    events: tuple[Event, ...] = ()  # of what runs again: `autopar.planner.formulation.recompute_chains`
    rests: tuple[
        tuple[tuple[Key, float], ...], ...
    ] = ()  # what rows have in common: sums of coefficient x variable, in bytes, and of earlier ones
    relaxed_rows: tuple[Row, ...] = ()  # rows that hold for policies that are means over layers, whatever policy each has
    limits: tuple[Limit, ...] = ()
    relaxed_limits: tuple[Limit, ...] = ()

    @property
    def relaxed(self) -> Problem:
        """What holds for policies that are means over layers: its optimum is a bound of the whole."""
        reruns = tuple(replace(r, times=r.relaxed_times) if r.relaxed_times else r for r in self.reruns)
        return replace(self, rows=self.relaxed_rows, limits=self.relaxed_limits, reruns=reruns)


FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Decision:
    """A complete answer. strategies: per choice; kept: value -> its policy (an index of `Value.policies`), at most one; rerun: indices of reruns that run (for every layer).

    arcs: (value, direction) -> arcs used.
    """

    strategies: tuple[int, ...]
    kept: Mapping[int, frozenset[int]] = field(default_factory=dict)
    rerun: frozenset[int] = frozenset()
    arcs: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)
