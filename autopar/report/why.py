"""Why not otherwise: `plan.explain`'s answers for what takes the most time and the most memory.

A plan that was read from a file does not know its program and cannot answer: then the page says how to ask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.plan.text import HEAVY, LAYER, LETTERS, placed
from autopar.report.facts import Subject
from autopar.report.html import Markup, path, tag
from autopar.report.units import signed

ASKED = 4  # questions: each solves the step twice
Ask = Callable[[str, str], Any]  # `plan.explain`


@dataclass(frozen=True)
class Answer:
    """title: operator (or parameter) and placement; verdict, text: as `Explanation` has them; dearer: relative, None where that is not known."""

    title: str
    verdict: str
    text: str
    dearer: float | None = None


def questions(s: Subject, most: int = ASKED) -> list[tuple[str, str]]:
    """(operator or parameter, placement) for the heaviest kinds of products, and for the largest kind of parameter: the ways that the plan does not take."""
    plan = s.plan
    axes = [a for a, n in plan.mesh_axes.items() if n > 1]
    spent: dict[str, float] = defaultdict(float)
    for e in s.timeline.events:
        spent[LAYER.sub("*", e.what.module)] += e.seconds
    found: dict[tuple[str, str], float] = {}
    for op, module in plan.modules.items():
        c, starred = plan.ops.get(op), LAYER.sub("*", module)
        if c is None or c.kind not in HEAVY or not axes:
            continue
        named = LETTERS.get(plan.targets.get(op, "").rsplit(".", 1)[0], {})
        axis = axes[-1]
        mine = {c.strategy[a][0] for a in plan.mesh.children(axis) if a in c.strategy}
        other = next((said for letter, said in reversed(named.items()) if letter not in mine), None)
        if other is not None:
            found[starred, f"{axis}:{other}"] = spent[starred]
    ranked = sorted(found, key=lambda q: -found[q])[: most - 1]
    stored = [(n, c) for n, c in plan.params.items() if c.trainable]
    if stored and axes:
        name, largest = max(stored, key=lambda x: math.prod(x[1].shape))
        way = f"Shard(0) over {axes[0]}" if placed(largest.storage) == "Replicate" else f"Replicate over {axes[0]}"
        ranked.append((LAYER.sub("*", name), way))
    return ranked


def answers(s: Subject, ask: Ask, most: int = ASKED, on_progress: Callable[[str], None] = lambda said: None) -> list[Answer]:
    """What `ask` says to `questions`. What it cannot read or solve is left out, if it says why."""
    out = []
    for op, placement in questions(s, most):
        on_progress(f"why not {op} {placement}")
        try:
            found = ask(op, placement)
        except AutoparError as e:
            out.append(Answer(f"{op}: {placement}", "not asked", str(e)))
            continue
        dearer = found.instead_s / found.step_s - 1 if found.step_s and found.instead_s else None
        out.append(Answer(f"{op}: {placement}", found.verdict, found.text, dearer))
    return out


def why(found: Sequence[Answer]) -> Markup:
    if not found:
        how = Markup(
            "A plan that is read from a file does not know its program. <code>autopar report plan.json --why MODEL</code> plans it again and asks, "
        )
        more = Markup(
            "<code>autopar explain MODEL OPERATOR PLACEMENT …</code> answers any such question, and so does <code>plan.explain(…)</code>."
        )
        return tag("p", how, more, class_="note")
    return tag("div", *(_answer(a) for a in found), class_="answers")


def _answer(a: Answer) -> Markup:
    said = (
        signed(a.dearer)
        if a.dearer is not None and a.verdict == "costs"
        else {"cannot": "cannot be", "does": "it does", "does not fit": "does not fit"}.get(a.verdict, a.verdict)
    )
    lines = a.text.splitlines()
    body = "\n".join(lines[1:] if lines and lines[0].endswith(a.title.rpartition(": ")[2]) else lines)
    return tag("details", tag("summary", path(a.title), " ", tag("span", said, class_="verdict")), tag("pre", body), open="")
