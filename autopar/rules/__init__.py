"""Op rules. To add one: put a line into the table of the file whose class fits, or a function where it depends on arguments.

`lookup(op)` gives the `Rule` of a call. An op without a rule is replicated: every operand whole, every output whole;
such fallbacks are counted in the plan and named once.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from dataclasses import replace

from autopar.graph.graph import Op
from autopar.rules.grammar import Dim, Factor, Line, Rule, match

RuleFn = Callable[[Op], "Line | str | Rule | None"]
_RULES: dict[str, RuleFn] = {}
_FOUND: dict[int, tuple[weakref.ref[Op], RuleFn | None, Rule]] = {}  # by identity: equal operators are rarely one
_MODULES = (
    "pointwise", "view", "matmul", "reduction", "norm", "index", "factory", "attention", "conv", "loss", "random", "moe", "experts", "loss_head",
)  # fmt: skip


def rule(*targets: str) -> Callable[[RuleFn], RuleFn]:
    """Registers a function of the op as the rule of `targets`. It may return None: no rule for these arguments."""

    def register(fn: RuleFn) -> RuleFn:
        for t in targets:
            assert t not in _RULES, f"two rules for {t}"
            _RULES[t] = fn
        return fn

    return register


def _always(line: Line | str) -> RuleFn:
    return lambda op: line


def table(lines: dict[str, Line | str]) -> None:
    """Registers ops whose line is the same for all arguments."""
    for target, line in lines.items():
        rule(target)(_always(line))


def targets() -> tuple[str, ...]:
    """Every op that has a rule."""
    _load()
    return tuple(_RULES)


def lookup(op: Op) -> Rule:
    """The rule of this call; a fallback (`is_fallback`) if there is none. Planning asks often: it is kept as long as the operator lives."""
    _load()
    fn, key = _RULES.get(op.target), id(op)
    known = _FOUND.get(key)
    if known is not None and known[0]() is op and known[1] is fn:
        return known[2]
    made = _made(op, fn)
    _FOUND[key] = weakref.ref(op, lambda _: _FOUND.pop(key, None)), fn, made
    return made


def _made(op: Op, fn: RuleFn | None) -> Rule:
    found = fn(op) if fn else None
    if found is None:
        return fallback(op)
    matched = found if isinstance(found, Rule) else match(found, op)
    if not any(f.split and f.size in op.unsplit for f in matched.factors.values()):
        return matched
    factors = {x: replace(f, split=f.split and f.size not in op.unsplit) for x, f in matched.factors.items()}
    return replace(matched, factors=factors)


def fallback(op: Op) -> Rule:
    """Replicated: each dim is a loop of its own that may not be split."""
    factors: dict[str, Factor] = {}

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        out = []
        for n in shape:
            name = f"x{len(factors)}"
            factors[name] = Factor(name, n, None, False)
            out.append((name,))
        return tuple(out)

    inputs = tuple(dims(t.shape) for t in op.inputs)
    outputs = tuple(None if t is None else dims(t.shape) for t in op.outputs)
    return Rule(factors, inputs, outputs, (), "cheap", True)


@functools.cache
def _load() -> None:
    for m in _MODULES:
        importlib.import_module(f"autopar.rules.{m}")
