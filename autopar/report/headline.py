"""The head of the page: what the plan is of, its numbers in cards; of two plans, a table with the difference."""

from __future__ import annotations

from autopar.report.facts import Fact, Subject, facts
from autopar.report.html import Markup, join, table, tag, text
from autopar.report.units import percent, signed


def about(s: Subject) -> Markup:
    """One line: layout, cluster, mesh, batch."""
    plan, p = s.plan, s.plan.profile
    assert p is not None
    mesh = " × ".join(f"{n}={k}" for n, k in plan.mesh_axes.items())
    parts = [
        f"layout {plan.layout}",
        f"cluster {plan.cluster}" if plan.cluster else "",
        f"mesh {mesh}",
        f"batch split {plan.data_size} ways" if plan.data_size > 1 else "batch not split",
    ]
    if p.micro_batches > 1:
        parts.append(f"times are of one of {p.micro_batches} micro-batches, with its share of the optimizer's step")
    if plan.fallbacks:
        parts.append(f"without a rule, replicated: {', '.join(plan.fallbacks)}")
    return join((tag("span", x) for x in parts if x), " ")


def cards(s: Subject) -> Markup:
    return tag("div", *(_card(f, s) for f in facts(s)), class_="cards")


def _card(f: Fact, s: Subject) -> Markup:
    bar: Markup | str = ""
    if f.key == "peak_memory_bytes" and (budget := s.plan.predicted.get("budget_bytes", 0.0)):
        bar = _bar(f.value / budget)
    elif f.key == "mfu":
        bar = _bar(f.value)
    elif f.key == "exposed_s" and s.timeline.seconds:
        bar = _bar(f.value / s.timeline.seconds)
    return tag(
        "div",
        tag("div", f.title, class_="t"),
        tag("div", _value(f.said), class_="v"),
        bar,
        tag("div", f.note, class_="s"),
        class_="card",
        data_key=f.key,
    )


def _value(said: str) -> Markup:
    """The last word, if it is a unit, small: "328,462 tokens/s"."""
    number, _, unit = said.rpartition(" ")
    return Markup(f"{text(number)} {tag('small', unit)}") if number and not unit[0].isdigit() else text(said)


def _bar(share: float) -> Markup:
    return tag("div", tag("i", "", style=f"width:{min(1.0, max(0.0, share)):.4%}"), class_="bar", role="img", aria_label=percent(share))


def comparison(subjects: list[Subject]) -> Markup:
    """A row for every number; what is better is marked."""
    found = [{f.key: f for f in facts(s)} for s in subjects]
    rows = []
    for key in dict.fromkeys(k for mine in found for k in mine):
        both = [mine.get(key) for mine in found]
        title = next(f.title for f in both if f is not None)
        difference: object = "–"
        if key == "gap" and both[0] is not None and both[1] is not None:
            difference = f"{100 * (both[1].value - both[0].value):+.2f} points"
        elif both[0] is not None and both[1] is not None and both[0].value:
            change = both[1].value / both[0].value - 1
            good = both[0].better * change
            difference = tag("span", signed(change), class_="good" if good > 5e-5 else "bad" if good < -5e-5 else None)
        rows.append([title, *(tag("span", f.said, title=f.note) if f else "–" for f in both), difference])
    return table(["", *(s.name for s in subjects), "difference"], rows, (1, 2, 3), class_="compare")
