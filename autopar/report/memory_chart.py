"""Memory over the step, by kind, as stacked areas: bytes against replayed time, with the budget and the peak."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.report.facts import Subject
from autopar.report.html import Markup, join, table, tag
from autopar.report.scale import grid_bytes, grid_seconds, num
from autopar.report.units import format_bytes, percent
from autopar.text.times import format_time
from autopar.timeline.expand import Moment
from autopar.timeline.profile import KINDS

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 64, 16, 26, 30
COLUMNS = 360  # of the picture: in each the fullest moment is drawn
SAID = {
    "parameters": "parameters, as stored", "optimizer": "optimizer state", "gradients": "gradients", "inputs and buffers": "inputs and buffers",
    "gathered parameters": "parameters gathered or cast for use", "kept for backward": "activations kept for backward", "made again": "made again for backward",
    "in use": "activations in use", "moving": "on the way to or from the host",
}  # fmt: skip


def used(subjects: Sequence[Subject]) -> list[str]:
    """Kinds that any moment has, from the bottom of the stack to its top."""
    have = {k for s in subjects for m in s.timeline.moments for k, n in m.nbytes.items() if n > 0}
    return [k for k in KINDS if k in have]


def legend(kinds: Sequence[str]) -> Markup:
    return tag("div", *(tag("span", tag("i", "", class_=f"key m-{KINDS.index(k)}"), SAID[k]) for k in reversed(kinds)), class_="legend")


def chart(s: Subject, kinds: Sequence[str], width: int, most_bytes: float) -> Markup:
    """most_bytes: what the picture is high for."""
    t = s.timeline
    columns = _columns(t.moments, t.seconds)
    inner_w, inner_h = width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = inner_w / len(columns)

    def y(n: float) -> float:
        return TOP + inner_h * (1 - n / most_bytes)

    parts: list[Markup] = [grid_bytes(LEFT, width - RIGHT, most_bytes, y), grid_seconds(LEFT, inner_w, HEIGHT - BOTTOM, TOP, t.seconds)]
    base = [0.0] * len(columns)
    for k in kinds:
        top = [b + m.nbytes.get(k, 0) for b, m in zip(base, columns, strict=True)]
        there = [(i, a, b) for i, (a, b) in enumerate(zip(base, top, strict=True))]
        up = " ".join(f"L{num(LEFT + i * step)} {num(y(b))}L{num(LEFT + (i + 1) * step)} {num(y(b))}" for i, _, b in there)
        down = " ".join(f"L{num(LEFT + (i + 1) * step)} {num(y(a))}L{num(LEFT + i * step)} {num(y(a))}" for i, a, _ in reversed(there))
        parts.append(tag("path", class_=f"m-{KINDS.index(k)}", d=f"M{up[1:]} {down}Z"))
        base = top
    for _stage, start, _ in t.stages[1:]:
        x = LEFT + inner_w * start / t.seconds
        parts.append(tag("line", class_="mark", x1=num(x), x2=num(x), y1=TOP, y2=HEIGHT - BOTTOM))
    for stage, start, end in t.stages:
        if (end - start) / t.seconds > 0.06:
            parts.append(
                tag("text", stage, class_="stage", x=num(LEFT + inner_w * (start + end) / 2 / t.seconds), y=TOP - 9, text_anchor="middle")
            )
    budget = s.plan.predicted.get("budget_bytes", 0.0)
    if 0 < budget <= most_bytes:
        parts.append(tag("line", class_="budget", x1=LEFT, x2=width - RIGHT, y1=num(y(budget)), y2=num(y(budget))))
        parts.append(
            tag("text", f"budget {format_bytes(budget)}", class_="budget", x=width - RIGHT - 4, y=num(y(budget) - 5), text_anchor="end")
        )
    if t.peak is not None:
        x, top_y = LEFT + inner_w * t.peak.start_s / t.seconds, y(t.peak.total)
        parts.append(tag("circle", class_="peak", cx=num(x), cy=num(top_y), r=3.5))
        end = x > width * 0.6
        said = f"peak {format_bytes(t.peak.total)}"
        parts.append(
            tag(
                "text", said, class_="peak", x=num(x + (-8 if end else 8)), y=num(max(top_y - 6, 11)), text_anchor="end" if end else "start"
            )
        )
    for i, m in enumerate(columns):
        held = "\n".join(f"{SAID[k]}: {format_bytes(m.nbytes[k])}" for k in reversed(kinds) if m.nbytes.get(k))
        title = f"{format_time(t.seconds * i / len(columns))}, {m.stage} {m.layer}\nin all: {format_bytes(m.total)}\n{held}"
        box = {"x": num(LEFT + i * step), "y": TOP, "width": num(step), "height": inner_h}
        parts.append(tag("rect", tag("title", title), class_="hit", **box))
    return tag(
        "svg", join(parts), viewBox=f"0 0 {width} {HEIGHT}", role="img", aria_label=f"memory over the step of {s.name}", class_="chart"
    )


def at_peak(s: Subject, kinds: Sequence[str]) -> Markup:
    """What holds the memory where it is fullest."""
    peak = s.timeline.peak
    if peak is None:
        return Markup("")
    rows = [
        [
            Markup(tag("i", "", class_=f"key m-{KINDS.index(k)}") + tag("span", SAID[k])),
            format_bytes(peak.nbytes[k]),
            percent(peak.nbytes[k] / peak.total),
        ]
        for k in reversed(kinds)
        if peak.nbytes.get(k)
    ]
    where = f"At the peak: {peak.stage}" + (f", {peak.layer}" if peak.layer else "")
    return table(["", "bytes", "share"], [*rows, [tag("b", "in all"), tag("b", format_bytes(peak.total)), ""]], (1, 2), where, "small")


def _columns(moments: Sequence[Moment], seconds: float) -> list[Moment]:
    """The fullest moment of every column; where nothing changes, what was before."""
    out: list[Moment] = []
    i, now = 0, moments[0]
    for c in range(COLUMNS):
        here = []
        while (i < len(moments) and moments[i].start_s < seconds * (c + 1) / COLUMNS) or (c == COLUMNS - 1 and i < len(moments)):
            here.append(moments[i])
            i += 1
        out.append(max([now, *here], key=lambda m: m.total) if here else now)
        now = here[-1] if here else now
    return out
