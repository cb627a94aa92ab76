"""Calls on their resources: the whole step, and one layer of forward and of backward near by.

A picture has a thousand columns and a step ten thousand calls: neighbours that are narrower than a column are drawn as one, in the colour of what takes most of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from autopar.plan.text import merged
from autopar.report.facts import Subject
from autopar.report.html import Markup, join, tag
from autopar.report.scale import grid_seconds, num
from autopar.report.seconds import WORK, work
from autopar.report.units import format_bytes
from autopar.text.times import format_time
from autopar.timeline.expand import Event
from autopar.timeline.perfetto import track
from autopar.timeline.replay import COMPUTE

LEFT, RIGHT, TOP, BOTTOM, ROW, GAP = 124, 14, 24, 30, 26, 6
NARROW = 1.4  # a call's least width in the picture


def said(axes: Iterable[str]) -> str:
    return " × ".join(merged(axes))


def tracks(s: Subject) -> list[str]:
    """The resources that have anything to do, compute first."""
    found = dict.fromkeys([COMPUTE, *(track(e, said) for e in s.timeline.events)])
    return list(found)


def legend(subjects: Sequence[Subject]) -> Markup:
    have = {work(e) for s in subjects for e in s.timeline.events}
    keys = [tag("span", tag("i", "", class_=f"key w-{k}"), words) for k, words in WORK.items() if k in have]
    return tag("div", *keys, tag("span", tag("i", "", class_="key w-wait"), "compute waits (exposed)"), class_="legend")


def chart(s: Subject, width: int, start_s: float = 0.0, end_s: float | None = None, stages: bool = True) -> Markup:
    """What happens from `start_s` to `end_s`."""
    end_s = s.timeline.seconds if end_s is None else end_s
    names = [name for name in tracks(s) if name == COMPUTE or stages or any(track(e, said) == name for e in _between(s, start_s, end_s))]
    top_of_all = TOP if stages else GAP
    height = top_of_all + len(names) * (ROW + GAP) + BOTTOM
    inner, bottom = width - LEFT - RIGHT, height - BOTTOM

    def x(t: float) -> float:
        return LEFT + inner * (t - start_s) / (end_s - start_s)

    parts: list[Markup] = [grid_seconds(LEFT, inner, bottom, top_of_all, end_s - start_s)]
    rows: dict[str, list[Event]] = defaultdict(list)
    for e in _between(s, start_s, end_s):
        rows[track(e, said)].append(e)
    for i, name in enumerate(names):
        top = top_of_all + i * (ROW + GAP) + GAP / 2
        parts.append(tag("rect", class_="lane", x=LEFT, y=num(top), width=num(inner), height=ROW))
        parts.append(tag("text", *_two_lines(name, top), class_="track", text_anchor="end"))
        if name == COMPUTE:
            for e in s.timeline.events:
                left_s, right_s = max(e.end_s - e.exposed_s, start_s), min(e.end_s, end_s)
                if e.exposed_s > 0 and right_s > left_s:
                    parts.append(_wait(x(left_s), x(right_s), top, e))
        for group in _grouped(rows[name], x):
            left, right = max(x(group[0].start_s), LEFT), min(x(group[-1].end_s), LEFT + inner)
            box = {"x": num(left), "y": num(top), "width": num(max(right - left, 0.4)), "height": ROW}
            parts.append(tag("rect", tag("title", _title(group)), class_=f"w-{_mostly(group)}", **box))
            if len(group) == 1 and right - left > 6.2 * len(group[0].what.name) + 12:
                parts.append(
                    tag(
                        "text",
                        group[0].what.name,
                        class_=f"in in-{work(group[0])}",
                        x=num((left + right) / 2),
                        y=num(top + ROW / 2 + 4),
                        text_anchor="middle",
                    )
                )
    for stage, start, end in s.timeline.stages if stages else ():
        if start > start_s:
            parts.append(tag("line", class_="mark", x1=num(x(start)), x2=num(x(start)), y1=TOP - 6, y2=bottom))
        if (end - start) / (end_s - start_s) > 0.06:
            parts.append(tag("text", stage, class_="stage", x=num(x((start + end) / 2)), y=TOP - 9, text_anchor="middle"))
    return tag("svg", join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=f"timeline of {s.name}", class_="chart")


def layer(s: Subject, stage: str) -> tuple[str, float, float] | None:
    """A layer in the middle of the deepest stack, and when compute works for it in a stage; None without layers."""
    p = s.plan.profile
    assert p is not None
    if not p.copies:
        return None
    stack = max(p.copies, key=lambda name: p.copies[name])
    mine = [
        e
        for e in s.timeline.events
        if e.stage == stage and e.stack == stack and e.copy == p.copies[stack] // 2 and e.what.stream == COMPUTE and not e.slowdown
    ]
    if not mine:
        return None
    return mine[0].layer, min(e.start_s for e in mine), max(e.end_s for e in mine)


def _between(s: Subject, start_s: float, end_s: float) -> list[Event]:
    return [e for e in s.timeline.events if e.end_s > start_s and e.start_s < end_s]


def _two_lines(name: str, top: float) -> list[Markup]:
    """ "dp (network)" -> the axis, and under it the link."""
    head, _, rest = name.partition(" (")
    y = top + ROW / 2 + (4 if not rest else -1)
    lines = [tag("tspan", head, x=LEFT - 9, y=num(y), class_="long" if len(head) > 17 else None)]
    return [*lines, tag("tspan", rest.removesuffix(")"), x=LEFT - 9, y=num(y + 11), class_="under")] if rest else lines


def _wait(left: float, right: float, top: float, e: Event) -> Markup:
    title = tag("title", f"compute waits {format_time(e.exposed_s)} for {e.what.name}, {e.what.module}")
    return tag("rect", title, class_="w-wait", x=num(left), y=num(top), width=num(max(right - left, 0.4)), height=ROW)


def _grouped(events: Sequence[Event], at: Callable[[float], float]) -> list[list[Event]]:
    """Each call by itself, but for neighbours that are too narrow to be seen. at: where a time lies in the picture."""
    out: list[list[Event]] = []
    for e in events:
        left, right = at(e.start_s), at(e.end_s)
        if out:
            first, last = at(out[-1][0].start_s), at(out[-1][-1].end_s)
            if left - last < 0.5 and (right - left < NARROW or last - first < NARROW) and right - first < 4 * NARROW:
                out[-1].append(e)
                continue
        out.append([e])
    return out


def _mostly(group: Sequence[Event]) -> str:
    spent: dict[str, float] = defaultdict(float)
    for e in group:
        spent[work(e)] += e.seconds
    return max(spent, key=lambda k: spent[k])


def _title(group: Sequence[Event]) -> str:
    if len(group) > 1:
        seconds = sum(e.seconds for e in group)
        return f"{len(group)} calls, {format_time(seconds)}, mostly {WORK[_mostly(group)]}\n{group[0].layer or group[0].what.module}"
    e = group[0]
    lines = [f"{e.what.name}{' (again)' if e.what.recompute else ''}: {format_time(e.seconds)}", e.what.module, e.layer, e.stage]
    if e.nbytes:
        lines.append(f"{format_bytes(e.nbytes)} {'sent a rank' if e.what.axes else 'moved'}")
    if e.exposed_s:
        lines.append(f"{format_time(e.exposed_s)} of it exposed")
    return "\n".join(x for x in lines if x)
