"""What `autopar.search` answers: layouts in order, what they are predicted to take, and what tells each from the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autopar.hardware.cluster import Cluster
from autopar.planner.layout import Layout
from autopar.predict.prediction import Prediction
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

if TYPE_CHECKING:
    from rich.table import Table

NAMED = 2  # parts of the time that are named when two layouts are compared


@dataclass(frozen=True)
class Ranked:
    """A layout, and `autopar.predict`'s answer to it.

    cluster: the devices that it uses, of `devices` that there are; the others idle. differs: from the best: what of the layout, and where the time goes.
    """

    layout: Layout
    prediction: Prediction
    cluster: Cluster = field(repr=False)
    devices: int
    differs: str = ""

    @property
    def idle(self) -> int:
        return self.devices - self.cluster.size

    def mfu(self, convention: str = "causal") -> float:
        """Of all devices that there are."""
        return self.prediction.mfu(convention) * self.cluster.size / self.devices

    def order(self) -> tuple[Any, ...]:
        """The fastest first; of equals, that of less memory, then by sizes."""
        lay = self.layout
        sizes = (
            lay.pp,
            lay.virtual,
            lay.tp,
            lay.cp,
            lay.dp,
            lay.ep,
            lay.expert_tp or 0,
            lay.micro_batch,
            lay.zero,
            lay.recompute,
            str(lay.sequence_parallel),
        )
        return (self.prediction.step_time_s, self.prediction.peak_bytes, *sizes)

    def compared(self, best: Ranked) -> Ranked:
        return self if self is best else replace(self, differs=difference(best, self))


@dataclass(frozen=True)
class Progress:
    """stage: what is being done. Of the families of layouts: priced; pruned: that cannot be among the best; left. best: the best so far, in order."""

    stage: str
    priced: int
    pruned: int
    left: int
    best: tuple[Ranked, ...]


def difference(best: Ranked, other: Ranked) -> str:
    """How `other` is laid out otherwise, and what that adds to the best's step, most first."""
    a, b = best.layout, other.layout
    names = ("tp", "cp", "pp", "dp", "ep", "expert_tp", "virtual", "micro_batch", "zero", "recompute", "offload", "sequence_parallel")
    changed = [
        f"{n.replace('_', '-')} {_short(getattr(b, n))} for {_short(getattr(a, n))}" for n in names if getattr(a, n) != getattr(b, n)
    ]
    before, now = best.prediction.parts_s, other.prediction.parts_s
    moves = sorted(((now.get(p, 0.0) - before.get(p, 0.0), p) for p in {**before, **now}), key=lambda x: -abs(x[0]))
    times = [f"{s / best.prediction.step_time_s:+.1%} {p}" for s, p in moves[:NAMED] if s]
    return ", ".join(changed) + (f": {', '.join(times)}" if times else "")


def _short(x: object) -> str:
    if isinstance(x, tuple):
        return " to ".join(dict.fromkeys((f"{x[0]:.0%}", f"{x[-1]:.0%}")))
    return f"{x:.0%}" if isinstance(x, float) else str(x)


def table(found: Sequence[Ranked]) -> Table:
    """For people."""
    from rich.table import Table

    t = Table(title=_title(found), title_justify="left")
    for name in ("", "layout", "step", "tokens/s", "MFU", "memory", "differs"):
        t.add_column(name, justify="left" if name in ("layout", "differs") else "right", overflow="fold")
    for i, r in enumerate(found, 1):
        p = r.prediction
        idle = f", {r.idle} devices idle" if r.idle else ""
        t.add_row(
            str(i), f"{r.layout}{idle}", format_time(p.step_time_s), f"{p.tokens_per_s:,.0f}", f"{r.mfu():.1%} ({r.mfu('square'):.1%})",
            format_bytes(p.peak_bytes), r.differs,
        )  # fmt: skip
    return t


def _title(found: Sequence[Ranked]) -> str:
    if not found:
        return "no layout fits"
    p, best = found[0].prediction, found[0]
    return (
        f"{p.model} on {best.devices} devices, global batch {p.global_batch}, {p.tokens // p.global_batch} tokens each; runtime {p.runtime}; "
        f"MFU with causal attention counted (with all of its square); {format_bytes(p.usable_bytes)} a device"
    )
