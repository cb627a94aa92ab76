"""The page: sections in the order in which a reader asks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.report import headline, memory_chart, timeline_chart
from autopar.report.exposed import exposed
from autopar.report.facts import Subject, largest, subject
from autopar.report.html import Markup, join, section, side_by_side, tag
from autopar.report.layers import layers
from autopar.report.parameters import parameters
from autopar.report.seconds import seconds
from autopar.report.style import CSS
from autopar.report.why import Answer, why
from autopar.text.times import format_time

WIDTH, HALF = 1180, 640  # of pictures, alone and side by side
HEADROOM = 1.06


def page(plans: Sequence[tuple[str, Plan]], answers: Sequence[Sequence[Answer]] = ()) -> str:
    """The document for one plan, or for two side by side. plans: with what each is called; answers: of `why.answers`, for each.

    Raises AutoparError for a plan without a profile.
    """
    if not 1 <= len(plans) <= 2:
        raise AutoparError(f"a page is of one plan or two, not of {len(plans)}", where="report")
    subjects = [subject(name, plan) for name, plan in plans]
    title = " and ".join(s.name for s in subjects)
    body = join([_head(subjects), *_sections(subjects, [*answers, *[()] * (len(subjects) - len(answers))]), _foot()])
    meta = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
    )
    head = tag("head", meta, tag("title", f"autopar: {title}"), tag("style", Markup(CSS)))
    return f"<!doctype html>\n{tag('html', head, tag('body', body, class_='two' if len(subjects) > 1 else 'one'), lang='en')}\n"


def save(plans: Sequence[tuple[str, Plan]], path: str | os.PathLike[str], answers: Sequence[Sequence[Answer]] = ()) -> None:
    """Writes `page`. Raises AutoparError where the path cannot be written."""
    text = page(plans, answers)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        where = str(path)[:200]
        raise AutoparError(
            f"the page cannot be written: {e.strerror or e}", where=where, fix="name a file in a folder that exists and can be written"
        ) from e


def _head(subjects: list[Subject]) -> Markup:
    names = " ↔ ".join(s.name for s in subjects)
    if len(subjects) == 1:
        below = join([tag("p", headline.about(subjects[0]), class_="about"), headline.cards(subjects[0])])
    else:
        below = join(
            [*(tag("p", tag("b", s.name), " ", headline.about(s), class_="about") for s in subjects), headline.comparison(subjects)]
        )
    return tag("header", tag("div", "autopar plan", class_="brand"), tag("h1", names), below)


def _sections(subjects: list[Subject], answers: Sequence[Sequence[Answer]]) -> list[Markup]:
    names, width = [s.name for s in subjects], WIDTH if len(subjects) == 1 else HALF

    def each(parts: list[Markup]) -> Markup:
        return side_by_side(names, parts)

    out = [section("Where the time goes", _time_lead(subjects), each([seconds(s) for s in subjects]), id_="time")]
    if all(s.timeline.moments for s in subjects):
        kinds = memory_chart.used(subjects)
        most = HEADROOM * largest(subjects, lambda s: s.timeline.peak.total if s.timeline.peak else 0.0)
        budgets = [s.plan.predicted.get("budget_bytes", 0.0) for s in subjects]
        most = max([most, *(HEADROOM * b for b in budgets if b < 2 * most)])
        charts = [join([memory_chart.chart(s, kinds, width, most), memory_chart.at_peak(s, kinds)]) for s in subjects]
        lead = "Bytes on one device while the step runs. The peak is the plan's predicted peak."
        out.append(section("Memory over the step", lead, memory_chart.legend(kinds), each(charts), id_="memory"))
    out.append(
        section(
            "Timeline", _timeline_lead(), timeline_chart.legend(subjects), each([_timelines(s, width) for s in subjects]), id_="timeline"
        )
    )
    lead = "The longest waits first. What is not listed is hidden behind compute, or takes no time."
    out.append(section("What is exposed", lead, each([exposed(s) for s in subjects]), id_="exposed"))
    lead = "Equal layers are one row. Times are of all layers together, on one device; what runs again counts to backward."
    out.append(section("Layer by layer", lead, each([layers(s) for s in subjects]), id_="layers"))
    lead = "Numbers in names are starred. “Stored” is where parameter, gradient and optimizer state lie; “computed with” is what operators read."
    out.append(section("Where parameters lie", lead, each([parameters(s) for s in subjects]), id_="parameters"))
    lead = "For the heaviest products and the largest parameter: the step solved again with another choice forced."
    out.append(section("Why not otherwise", lead if any(answers) else "", each([why(a) for a in answers]), id_="why"))
    if len(subjects) > 1:
        difference = subjects[0].plan.diff(subjects[1].plan) or "nothing: the plans are equal"
        out.append(section("What differs", f"Line by line, {names[0]} → {names[1]}.", tag("pre", difference, class_="diff"), id_="diff"))
    return out


def _time_lead(subjects: list[Subject]) -> str:
    first = "Seconds on one device, from the cost model."
    if not any(s.timeline.exposed_s for s in subjects):
        return first
    replayed = " and ".join(format_time(s.timeline.seconds) for s in subjects)
    return (
        f"{first} The predicted step has each stage last as long as its busiest resource. Replayed call by call it takes {replayed}: some communication has nothing to "
        "hide behind, and calls wait for their turn on a link. Work on links runs beside compute, so shares add up to more than all."
    )


def _timeline_lead() -> str:
    return "The replayed step of one device. Point at a call for its operator, module, bytes and time; autopar trace writes the same for Perfetto."


def _timelines(s: Subject, width: int) -> Markup:
    parts = [timeline_chart.chart(s, width)]
    for stage in ("forward", "backward"):
        found = timeline_chart.layer(s, stage)
        if found is not None:
            name, start, end = found
            parts.append(tag("h4", f"{name}, {stage}: {format_time(end - start)}"))
            parts.append(timeline_chart.chart(s, width, start, end, stages=False))
    return join(parts)


def _foot() -> Markup:
    return tag("footer", "Times and bytes are predictions of autopar's cost model for the cluster named above, not measurements.")
