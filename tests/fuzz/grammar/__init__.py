"""The grammar: productions by class, each of which adds a statement or a few to a program that is being drawn.

A production is a function of the `Draw`, or a template of text: {a} a float value, {b} one it broadcasts with, {s} one of a's shape, {m} a mask for a,
{d} and {e} two dims of a, {c} a constant, {k} a small size, {w} a parameter that a broadcasts with.
"""

from __future__ import annotations

import importlib
import string
from collections.abc import Callable, Sequence

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.program import Line

Production = Callable[[Draw], "Sequence[Line] | None"]
CLASSES: dict[str, list[tuple[float, Production]]] = {}
# How often a class is drawn.
WEIGHTS = {
    "pointwise": 10.0, "reduce": 4.0, "matmul": 8.0, "norm": 4.0, "conv": 3.0, "index": 5.0, "softmax": 3.0, "attention": 1.5, "scan": 2.0,
    "view": 9.0, "inplace": 4.0, "dtypes": 2.0, "blocks": 3.0, "state": 2.0, "factory": 2.0, "random": 0.6, "formats": 1.5, "modules": 1.0, "samples": 5.0,
}  # fmt: skip
_MODULES = ("pointwise", "reduce", "products", "layers", "lookups", "views", "mutation", "blocks", "samples")


def production(kind: str, weight: float = 1.0) -> Callable[[Production], Production]:
    def register(fn: Production) -> Production:
        CLASSES.setdefault(kind, []).append((weight, fn))
        return fn

    return register


def templates(kind: str, texts: str | Sequence[str], weight: float = 1.0, rank: int | None = None, least: int = 0) -> None:
    """One production a line; rank: of {a}, least: its least rank. All of them together weigh `weight`."""
    lines = [t.strip() for t in (texts.strip().splitlines() if isinstance(texts, str) else texts) if t.strip()]
    for text in lines:

        def draw(d: Draw, text: str = text) -> Sequence[Line]:
            return [expand(d, text, rank, least)]

        CLASSES.setdefault(kind, []).append((weight / len(lines), draw))


def expand(d: Draw, text: str, rank: int | None = None, least: int = 0) -> Line:
    """`text`, an expression, bound to a new name."""
    fields = {f for _, f, _, _ in string.Formatter().parse(text) if f}
    a = d.float(lambda t: t.dim() >= least, rank)
    found: dict[str, object] = {"a": a}
    if fields & {"d", "e"}:
        dim = found["d"] = d.dim(a)
        n = len(d.shape(a))
        others = [i for i in range(-n, n) if i % n != dim % n]
        if "e" in fields:
            found["e"] = d.one_of(others)
    if "b" in fields:
        found["b"] = d.beside(a)
    if "s" in fields:
        found["s"] = d.alike(a)
    if "m" in fields:
        found["m"] = d.mask(a)
    if "c" in fields:
        found["c"] = d.constant()
    if "k" in fields:
        found["k"] = d.one_of((1, 2, 2, 3, 4))
    if "w" in fields:
        shape = d.shape(a)
        found["w"] = d.parameter(shape[d.rng.randrange(len(shape) + 1) :])
    made = d.fresh()
    return Line(f"{made} = {text.format(**found)}", (made,))


def bound(d: Draw, expression: str, n: int = 1) -> Line:
    """The expression's results under new names."""
    made = tuple(d.fresh() for _ in range(n))
    return Line(f"{', '.join(made)} = {expression}", made)


def draw_statement(d: Draw, weights: dict[str, float]) -> bool:
    load()
    kind = d.rng.choices(list(weights), list(weights.values()))[0]
    choices = CLASSES.get(kind, [])
    if not choices:
        raise Unable
    _, fn = d.rng.choices(choices, [w for w, _ in choices])[0]
    return d.attempt(fn, kind)


def load() -> None:
    for m in _MODULES:
        importlib.import_module(f"tests.fuzz.grammar.{m}")
