"""What takes the time: seconds of compute by kind of work, and of every link, by stage."""

from __future__ import annotations

from collections import defaultdict

from autopar.report.facts import Subject
from autopar.report.html import Markup, table, tag
from autopar.report.units import percent
from autopar.text.times import format_time
from autopar.timeline.expand import Event
from autopar.timeline.replay import COMPUTE

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
# What a call is, on compute and on links: the classes of its colour, and what it is called.
WORK = {
    "product": "products", "attention": "attention", "other": "all else (memory-bound)", "again": "made again in backward", "slow": "slowed down by communication",
    "step": "optimizer step", "parameter": "gathers of parameters", "gradient": "reductions of gradients", "activation": "redistribution of activations",
    "moving": "activations to and from the host",
}  # fmt: skip

NOTHING_S = 5e-9  # less is written as nothing


def work(e: Event) -> str:
    """A key of `WORK`."""
    w = e.what
    if e.slowdown:
        return "slow"
    if w.stream != COMPUTE:
        return w.serves if w.axes and w.serves in WORK else "moving"
    if e.stage == "optimizer":
        return "step"
    if w.recompute:
        return "again"
    return "product" if w.name in PRODUCTS else "attention" if "attention" in w.name else "other"


def seconds(s: Subject) -> Markup:
    """A row for every kind of work; communication with how much of it is exposed."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    exposed: dict[str, float] = defaultdict(float)
    for e in s.timeline.events:
        spent[work(e)][e.stage] += e.seconds
        exposed[work(e)] += e.exposed_s
    rows = []
    for key, said in WORK.items():
        if key in spent:
            mine = spent[key]
            total = sum(mine.values())
            if total < NOTHING_S:
                continue
            on_link = key in ("parameter", "gradient", "activation", "moving")
            rows.append([
                Markup(tag("i", "", class_=f"key w-{key}") + tag("span", said)), *(format_time(mine[x]) if mine.get(x) else "" for x in ("forward", "backward")),
                format_time(total), percent(total / s.timeline.seconds), format_time(exposed[key]) if on_link else "",
            ])  # fmt: skip
    return table(["work", "forward", "backward", "in all", "of the step", "exposed"], rows, (1, 2, 3, 4, 5))
