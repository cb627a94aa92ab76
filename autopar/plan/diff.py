"""What differs between two plans, for people. Empty exactly if nothing that was decided or predicted does; how long planning took is left out.

Layers of a deep model change together, so numbers in names are starred and equal changes are one line with a count, as in `Plan.text`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from autopar.graph.placement import Placement
from autopar.plan.decisions import CollectiveUse, Decisions, OpChoice, ParamChoice
from autopar.plan.schema import is_timing
from autopar.plan.text import measure, merged, placed, summed
from autopar.text.sizes import format_bytes

NONE = "(none)"
_FOLLOW = ("view", "cheap")
LINES = 40  # of one section; what else differs is counted
T = TypeVar("T")


def diff(a: Decisions, b: Decisions) -> str:
    """Line by line what `b` decides otherwise than `a`; "" when they are equal."""
    lines = _values(a, b)
    lines += _section("parameters", parameters(a, b))
    lines += _section("ops", _ops(a, b))
    lines += _section("collectives", collectives(a, b))
    lines += _section("activations", _changes(a.activations, b.activations, str, _star))
    lines += _section("recomputed ops", _changes(dict.fromkeys(a.recompute, "yes"), dict.fromkeys(b.recompute, "yes"), str, _star))
    lines += _section("predicted", _numbers(a.predicted, b.predicted))
    lines += _section("solver", _numbers(_solver(a), _solver(b)))
    lines += _rest(a, b)
    return "\n".join(lines)


# What the sections above cover (of a profile it is said that it differs); any other field of a plan, also one added later, is compared as a whole.
_COVERED = {"mesh_axes", "layout", "cluster", "fingerprint", "data_axes", "reshard_after_forward", "params", "ops", "targets"}
_COVERED |= {"collectives", "activations", "recompute", "predicted", "solver", "order", "profile"}


def _values(a: Decisions, b: Decisions) -> list[str]:
    """Single values, one line each."""
    mesh = [" x ".join(f"{n}={s}" for n, s in p.mesh_axes.items()) for p in (a, b)]
    rows: list[tuple[str, str, str]] = [
        ("mesh", mesh[0], mesh[1]),
        ("layout", a.layout, b.layout),
        ("cluster", a.cluster, b.cluster),
        ("fingerprint", a.fingerprint, b.fingerprint),
        ("batch split over", *_axes(a.data_axes, b.data_axes)),
        ("reshard after forward", str(a.reshard_after_forward), str(b.reshard_after_forward)),
    ]
    lines = [f"{name}: {x or NONE} -> {y or NONE}" for name, x, y in rows if x != y]
    if a.profile != b.profile:
        calls = ["none" if p.profile is None else f"{sum(c.times for c in p.profile.calls):,} calls" for p in (a, b)]
        lines.append(f"profile: {calls[0]} -> {calls[1]}" + (", which take other times or memory" if calls[0] == calls[1] else ""))
    if a.order != b.order:
        other = sum(x != y for x, y in itertools.zip_longest(a.order, b.order))
        lines.append(f"ops that stand for all: {len(a.order)} -> {len(b.order)}, {other} of them named otherwise")
    return lines


def parameters(a: Decisions, b: Decisions) -> list[str]:
    """By kind of parameter, as in `Plan.text`; of each only what changed."""
    rows: Counter[tuple[str, str]] = Counter()
    for name in {**a.params, **b.params}:
        x, y = a.params.get(name), b.params.get(name)
        if x != y:
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            rows[kind, _param(x, y)] += 1
    return [f"{kind}: {text}  ({n} x)" for (kind, text), n in sorted(rows.items(), key=lambda r: (-r[1], r[0]))]


def _param(x: ParamChoice | None, y: ParamChoice | None) -> str:
    if x is None or y is None:
        c = x or y
        assert c is not None
        return f"only in the {'second' if x is None else 'first'}: {list(c.shape)} {c.dtype}, stored {placed(c.storage)}"
    trains = {True: "trained", False: "frozen"}
    gathers = [
        "gathered once a call" if c.once_a_call else "gathered once" if c.keeps_gathered else "gathered again in backward" for c in (x, y)
    ]
    parts = [
        ("shape", str(list(x.shape)), str(list(y.shape))),
        ("padded to", str(list(x.padded)), str(list(y.padded))),
        ("dtype", x.dtype, y.dtype),
        ("", trains[x.trainable], trains[y.trainable]),
        ("stored", *_places(x.storage, y.storage)),
        ("computed with", *_places(x.compute, y.compute)),
        ("", gathers[0], gathers[1]),
        ("", summed(x), summed(y)),
    ]
    # Of another shape, two placements may be written alike; the shape's own line says it then.
    return "; ".join(f"{what} {p} -> {q}".strip() for what, p, q in parts if p != q)


def _ops(a: Decisions, b: Decisions) -> list[str]:
    """By target: a strategy's letters mean something only for one kind of op."""

    def with_target(p: Decisions) -> dict[str, tuple[str, OpChoice | None]]:
        return {n: (p.targets.get(n, ""), p.ops.get(n)) for n in {**p.ops, **p.targets}}

    def say(x: tuple[str, OpChoice | None]) -> str:
        """By axes of the user's; enough unless only strides or parts of axes differ."""
        if x[1] is None:
            return "no choice"
        by_letter: dict[str, list[str]] = {}
        for axis, (letter, _) in sorted(x[1].strategy.items()):
            by_letter.setdefault(letter, []).append(axis)
        for axis in sorted(x[1].partial):
            by_letter.setdefault("partial", []).append(axis)
        parts = [f"{letter} over {'.'.join(merged(axes))}" for letter, axes in by_letter.items()]
        return f"{', '.join(parts) or 'replicated'}{' (no rule)' if x[1].fallback else ''}"

    def full(x: tuple[str, OpChoice | None]) -> str:
        if x[1] is None:
            return "no choice"
        parts = [f"{axis}:{letter}/{stride}" for axis, (letter, stride) in sorted(x[1].strategy.items())]
        parts += [f"{axis}:partial{sorted(inputs)}" for axis, inputs in sorted(x[1].partial.items())]
        return f"{' '.join(parts) or 'replicated'} [{x[1].kind}]"

    ours, theirs = with_target(a), with_target(b)
    target = {n: x[0] for n, x in {**theirs, **ours}.items()}
    renamed = {n: (ours[n][0], theirs[n][0]) for n in ours.keys() & theirs.keys() if ours[n][0] != theirs[n][0]}
    lines = [f"{x or NONE} -> {y or NONE}  ({n} x)" for (x, y), n in sorted(Counter(renamed.values()).items())]
    # Those that cost first: views and pointwise ops mostly follow them, in many ways.
    heavy = {n for n, x in {**ours, **theirs}.items() if x[1] is not None and x[1].kind not in _FOLLOW}
    for part in (heavy, target.keys() - heavy):
        some = [{n: x for n, x in p.items() if n in part} for p in (ours, theirs)]
        lines += _changes(some[0], some[1], say, lambda n: target[n] or _star(n), full)
    return lines


def collectives(a: Decisions, b: Decisions) -> list[str]:
    def totals(uses: tuple[CollectiveUse, ...]) -> dict[str, tuple[int, float]]:
        out: dict[str, tuple[int, float]] = {}
        for c in uses:
            key = f"{c.direction} {c.kind} over {' x '.join(merged(c.axes))}"
            n, size = out.get(key, (0, 0.0))
            out[key] = (n + c.count, size + c.count * c.wire_bytes)
        return out

    def say(t: tuple[int, float]) -> str:
        return f"{t[0]} x, {format_bytes(t[1])}" if t[0] else NONE

    x, y = totals(a.collectives), totals(b.collectives)
    lines = [f"{k}: {say(x.get(k, (0, 0.0)))} -> {say(y.get(k, (0, 0.0)))}" for k in sorted({**x, **y}) if x.get(k) != y.get(k)]
    if not lines and Counter(a.collectives) != Counter(b.collectives):
        lines = ["the same in all, for other tensors"]
    if not lines and a.collectives != b.collectives:
        lines = ["the same, in another order"]
    return lines


def _numbers(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    lines = []
    for k in sorted({**a, **b}):
        x, y = a.get(k), b.get(k)
        if x == y:
            continue
        numbers = all(isinstance(v, (int, float)) for v in (x, y))
        change = f"  ({100 * (y / x - 1):+.1f}%)" if numbers and x else ""
        name, before, after = _pair(k, x, y)
        lines.append(f"{name}: {before} -> {after}{change}")
    return lines


def _pair(key: str, x: Any, y: Any) -> tuple[str, str, str]:
    """With units; as they are stored where that would say the same of both."""
    said = [NONE if v is None else measure(key, v)[1] if isinstance(v, (int, float)) else str(v) for v in (x, y)]
    return (measure(key, 0.0)[0], said[0], said[1]) if said[0] != said[1] else (key, repr(x), repr(y))


def _rest(a: Decisions, b: Decisions) -> list[str]:
    lines = []
    for name in [f.name for f in fields(Decisions) if f.name not in _COVERED]:
        x, y = getattr(a, name), getattr(b, name)
        if x == y:
            continue
        if isinstance(x, dict) and isinstance(y, dict):
            lines += _section(name, _changes(x, y, str, _star))
        elif isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            lines += _section(name, _changes(dict(enumerate(x)), dict(enumerate(y)), str, str))
        else:
            lines.append(f"{name}: {_say(x)} -> {_say(y)}")
    return lines


# ---- parts -------------------------------------------------------------------------------------------------------


def _changes(
    a: Mapping[Any, T], b: Mapping[Any, T], say: Callable[[T], str], kind: Callable[[Any], str], full: Callable[[T], str] | None = None
) -> list[str]:
    """One line for every (kind of name, before, after), most frequent first. full: for two values of which `say` says the same."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for name in {**a, **b}:
        inside = (name in a, name in b)
        if inside == (True, True) and a[name] == b[name]:
            continue
        x, y = say(a[name]) if inside[0] else NONE, say(b[name]) if inside[1] else NONE
        if x == y and full is not None:
            x, y = full(a[name]), full(b[name])
        rows[kind(name), x, y] += 1
    ranked = sorted(rows.items(), key=lambda r: (-r[1], r[0]))
    return [f"{k}: {x} -> {y}  ({n} x)" for (k, x, y), n in ranked]


def _section(title: str, lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - LINES} more"] if len(lines) > LINES else []
    return [f"{title}:", *(f"  {x}" for x in lines[:LINES]), *more] if lines else []


def _solver(plan: Decisions) -> dict[str, Any]:
    return {k: v for k, v in plan.solver.items() if not is_timing(k)}


def _star(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _axes(x: tuple[str, ...], y: tuple[str, ...]) -> tuple[str, str]:
    short = [" x ".join(merged(axes)) for axes in (x, y)]
    return (short[0], short[1]) if short[0] != short[1] else (" x ".join(x), " x ".join(y))


def _places(x: Placement, y: Placement) -> tuple[str, str]:
    """As in `Plan.text`, or digit by digit where that would say the same of both."""
    return (placed(x), placed(y)) if placed(x) != placed(y) else (str(x), str(y))


def _say(x: Any) -> str:
    if x is None:
        return NONE
    return f"{x:.6g}" if isinstance(x, float) else str(x)
