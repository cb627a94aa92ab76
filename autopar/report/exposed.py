"""What compute waits for: exposed communication by what it brings, the longest first."""

from __future__ import annotations

from collections import defaultdict

from autopar.report.facts import Subject
from autopar.report.html import Markup, path, table, tag
from autopar.report.timeline_chart import said
from autopar.report.units import format_bytes, percent
from autopar.text.times import format_time

SHOWN = 12
QUEUED = "its turn on the link comes late: others are sent before it"
WHY = {
    "parameter": "gathered a layer ahead; what is longer than the compute beside it is waited for",
    "gradient": "awaited a layer later; the last ones have nothing left to hide behind",
    "activation": "the next operator reads it at once",
}


def exposed(s: Subject) -> Markup:
    found: dict[tuple[str, str, str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for e in s.timeline.events:
        if e.what.stream != "compute" and not e.slowdown:
            row = found[e.stage, e.what.name, e.what.module, said(e.what.axes), e.what.serves]
            row[0] += 1
            row[1] += e.seconds
            row[2] += e.exposed_s
            row[3] += e.nbytes
    ranked = sorted((r for r in found.items() if r[1][2] > 0), key=lambda r: -r[1][2])
    if not ranked:
        return tag("p", "Nothing: compute never waits.")
    rows = []
    for (stage, name, module, axes, serves), (n, seconds, waited, nbytes) in ranked[:SHOWN]:
        rows.append([
            path(module), f"{name} over {axes}" if axes else name, stage, f"{n:,.0f}", format_bytes(nbytes / n), format_time(seconds),
            format_time(waited), tag("span", percent(waited / s.timeline.seconds), class_="because"), tag("span", _because(serves, axes, seconds, waited), class_="because"),
        ])  # fmt: skip
    rest = sum(r[1][2] for r in ranked[SHOWN:])
    if rest:
        rows.append(
            [
                tag("span", f"and {len(ranked) - SHOWN} more", class_="dim"),
                "",
                "",
                "",
                "",
                "",
                format_time(rest),
                percent(rest / s.timeline.seconds),
                "",
            ]
        )
    return table(
        [
            "of",
            "what",
            "stage",
            "times",
            "sent each",
            "takes",
            "exposed",
            tag("span", "of the step", class_="because"),
            tag("span", "because", class_="because"),
        ],
        rows,
        (3, 4, 5, 6, 7),
    )


def _because(serves: str, axes: str, seconds: float, waited: float) -> str:
    """More is waited than it takes where its link is busy with what was issued before."""
    if waited > 1.01 * seconds:
        return QUEUED
    return WHY.get(serves, "") if axes else "slower than the compute beside it"
