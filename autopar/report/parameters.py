"""Where parameters lie: a row for every kind, with what a device holds of it."""

from __future__ import annotations

import math
from collections import defaultdict

from autopar.plan.decisions import ParamChoice
from autopar.plan.text import LAYER, placed, stored
from autopar.report.facts import Subject
from autopar.report.html import Markup, path, table, tag
from autopar.report.units import count, format_bytes, percent


def parameters(s: Subject) -> Markup:
    mesh, p = s.plan.mesh, s.plan.profile
    assert p is not None
    each = p.element_bytes  # as stored; computed with in the dtype that the capture has
    kinds: dict[tuple[str, str, str, str, str], list[ParamChoice]] = defaultdict(list)
    for name, c in s.plan.params.items():
        kinds[LAYER.sub("*", name), " × ".join(map(str, c.shape)) or "scalar", c.dtype, stored(c), placed(c.compute)].append(c)
    rows: list[list[object]] = []
    total = whole = elements = 0.0
    for (name, shape, _, at, computed), group in kinds.items():
        here = sum(math.prod(c.storage.local_shape(mesh)) * each for c in group)
        full = sum(math.prod(c.shape) * each for c in group)
        total, whole, elements = total + here, whole + full, elements + sum(math.prod(c.shape) for c in group)
        many = tag("span", f" {len(group)} ×", class_="dim") if len(group) > 1 else ""
        frozen = "" if all(c.trainable for c in group) else tag("span", " frozen", class_="dim")
        name_cell = Markup(path(name) + many + frozen)
        rows.append([name_cell, shape, _placement(at), _placement(computed), format_bytes(here), percent(here / full) if full else ""])
    rows.append([tag("b", "in all"), count(elements), "", "", tag("b", format_bytes(total)), percent(total / whole) if whole else ""])
    return table(["parameter", "shape", "stored", "computed with", "a device holds", "of all"], rows, (4, 5))


def _placement(said: str) -> Markup:
    return tag("span", "whole" if said == "Replicate" else said, class_="place whole" if said == "Replicate" else "place", title=said)
