"""What plans ahead say: for each number of units that may be left, what a step takes, what moves, what idles; as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from autopar.elastic.plans.combine import Combination
from autopar.errors import AutoparError
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time


@dataclass(frozen=True)
class Size:
    """A number of units that may be left. step_s: None where nothing keeps to the memory, and `why` says so. groups: "units x how many (parts of the batch)"; layouts: of each size. one_s: of one group over
    all; even_s: of groups that all get as much, of which there are even_groups. moved_bytes: from the size above, after the worst loss; busiest_bytes: of it, to one device; grown_bytes: to one
    device, where the size below grows to this. filled: whether template sizes fill it without rest."""

    units: int
    devices: int
    step_s: float | None
    memory_bytes: float = 0.0
    groups: str = ""
    layouts: Mapping[int, str] = field(default_factory=dict)
    shares: tuple[tuple[int, int], ...] = ()
    sync_s: float = 0.0
    idle: int = 0
    one_s: float | None = None
    even_s: float | None = None
    even_groups: int = 0
    moved_bytes: float = 0.0
    busiest_bytes: float = 0.0
    grown_bytes: float = 0.0
    filled: bool = True
    why: str = ""


@dataclass(frozen=True)
class Templates:
    """sizes: the largest first. templates: units -> the layout of a group of so many; lacking: sizes without one, with the bytes that are missing. state_bytes: of parameters and optimizer
    state that a checkpoint has; link_Bps: of a device, between nodes; host_Bps: between a device and its host; node_units: units of a node. filled_from: template sizes fill every number of units from this one on; None: there is none."""

    model: str
    cluster: str
    unit: str
    batch: int
    micro_batch: int
    tokens: int
    sizes: tuple[Size, ...]
    templates: Mapping[int, str]
    lacking: Mapping[int, float]
    filled_from: int | None
    state_bytes: float
    link_Bps: float
    host_Bps: float
    node_units: int
    cost_of: Callable[[Sequence[int]], Combination | None] | None = field(default=None, repr=False, compare=False)

    @property
    def without_plan(self) -> tuple[int, ...]:
        return tuple(s.units for s in self.sizes if s.step_s is None)

    def of(self, places: Sequence[int]) -> Combination | None:
        """The best combination of templates where survivors are distributed so: devices left on each node; of nodes, their number alone. None where no group fits. Not of templates that were read from a file."""
        if self.cost_of is None:
            raise AutoparError(
                "templates from a file have no prices of other distributions",
                where="of",
                fix="make them anew: autopar.elastic.plans.templates",
            )
        return self.cost_of(places)

    def document(self) -> dict[str, Any]:
        """As JSON has it. lacking: None where no bytes would do."""
        plain = {k: v for k, v in self.__dict__.items() if k not in ("cost_of", "sizes", "lacking")}
        lacking = {k: b if math.isfinite(b) else None for k, b in self.lacking.items()}
        return {"kind": "elastic-templates", "version": 1, **plain, "lacking": lacking, "sizes": [asdict(s) for s in self.sizes]}

    def text(self) -> str:
        lacks = self.without_plan
        head = f"NO PLAN keeps to the memory of {listed(lacks)} {self.unit}s: a run that comes to so few ends\n" if lacks else ""
        head += (
            f"{self.model} on {self.cluster}, {self.batch} sequences of {self.tokens} in micro-batches of {self.micro_batch}; a unit is a {self.unit}\n"
            f"templates: {'; '.join(f'{k}: {lay}' for k, lay in sorted(self.templates.items())) or 'none'}"
        )
        if self.lacking:
            head += "\nno group within memory on: " + ", ".join(
                f"{k}" + (f" (lacks {format_bytes(b)} a device)" if math.isfinite(b) else "") for k, b in sorted(self.lacking.items())
            )
        head += "\n" + (
            "template sizes fill no number of units from some one on: they have a common divisor, or there are none" if self.filled_from is None
            else f"template sizes fill every number of units of one place from {self.filled_from} on, without rest"
        )  # fmt: skip
        rows = [("units", "devices", "step", "memory", "moves at most", "one group", "idle", "groups (micro-batches of each)")]
        for s in self.sizes:
            if s.step_s is None:
                rows.append((str(s.units), str(s.devices), "NO PLAN", "", "", "", "", s.why))
                continue
            one = "" if s.one_s is None else format_time(s.one_s)
            rows.append(
                (
                    str(s.units),
                    str(s.devices),
                    format_time(s.step_s),
                    format_bytes(s.memory_bytes),
                    format_bytes(s.moved_bytes),
                    one,
                    str(s.idle),
                    s.groups,
                )
            )
        widths = [max(len(r[i]) for r in rows) for i in range(7)]
        table = "\n".join("  ".join(c.rjust(w) for c, w in zip(r[:7], widths, strict=True)) + "  " + r[7] for r in rows)
        idle = [str(s.units) for s in self.sizes if s.step_s is not None and s.idle]
        unfilled = [str(s.units) for s in self.sizes if not s.filled]
        tail = [f"devices idle at: {', '.join(idle)}"] if idle else ["no size leaves a device idle"]
        if unfilled:
            tail.append(f"not filled by templates alone: {', '.join(unfilled)}")
        return "\n".join([head, table, *tail])

    __str__ = text


def listed(numbers: Sequence[int]) -> str:
    """(9, 8, 7, 3) -> "9 to 7, 3"."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a - 1), len(numbers)]
    runs = [numbers[a:b] for a, b in pairwise(cuts)]
    return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)
