"""Hand layouts whose axes split routed experts: which of an operator's letters each axis takes, and whether there are experts to split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.cost.compute import local_sizes
from autopar.cost.experts import is_experts, ranks_of
from autopar.errors import LayoutError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.plan.decisions import OpChoice
from autopar.planner.layout import Layout
from autopar.rules import lookup
from autopar.rules.grammar import Rule


def experts_of(rule: Rule) -> int:
    """How many experts an operator has; 1 where it has none."""
    return math.prod(rule.factors[x].size for x in rule.pairs)


def expert_letters(rule: Rule, axes: Sequence[str], mesh: Mesh) -> dict[str, str]:
    """axis -> the letter of the experts that it takes: the first of its size that no axis before it has. Axes that find none are left out."""
    left, found = list(rule.pairs), dict[str, str]()
    for axis in axes:
        letter = next((x for x in left if rule.factors[x].size == mesh.axis_size(axis)), None)
        if letter is not None:
            left.remove(letter)
            found[axis] = letter
    return found


def expert_params(graph: Graph, rules: Mapping[str, Rule]) -> set[str]:
    """Tensors of parameters that routed experts read, themselves or through views and casts."""
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for t in op.inputs if op.direction == "forward" else ():
            readers.setdefault(t.name, []).append(op)

    def is_read(name: str) -> bool:
        for op in readers.get(name, ()):
            passes_on = len(op.inputs) == 1 and len(op.outputs) == 1 and op.outputs[0] is not None and not rules[op.name].is_heavy
            if rules[op.name].pairs or (passes_on and is_read(op.out.name)):
                return True
        return False

    return {t.name for t in graph.params.values() if is_read(t.name)}


def exchanged_rows(graph: Graph, chosen: Mapping[str, OpChoice], mesh: Mesh) -> dict[str, float]:
    """Of experts that are split over ranks, rows of a rank at even load, in one layer, the most of all: what a plan predicts of them."""
    rows = 0
    for op in graph.ops:
        if is_experts(op) and op.name in chosen:
            rule, strategy = lookup(op), chosen[op.name].strategy
            if ranks_of(rule, strategy, mesh) > 1:
                n = local_sizes(rule, strategy, mesh)
                rows = max(rows, n["t"] * n["k"])
    return {"expert_rows": float(rows)} if rows else {}


def check_experts(graph: Graph, rules: Mapping[str, Rule], layout: Layout, mesh: Mesh) -> None:
    """Raises LayoutError where `layout.experts` cannot split every routed experts' operator of the program.

    layout: refined (`Layout.of`); rules: of every operator."""
    if not layout.experts and layout.expert_features is None:
        return
    ways, found = mesh.sizes_product(layout.experts), [op for op in graph.ops if rules[op.name].pairs]
    if not found:
        raise LayoutError(
            f"layout {layout.name} "
            + (f"splits experts over {ways} devices" if ways > 1 else "says how experts are split")
            + ", but the program has no routed experts",
            where="the captured program",
            fix="use layout fsdp; or, if the model has experts, see which form of them is captured as one operator in docs/layouts.md",
        )
    for op in found:
        if len(expert_letters(rules[op.name], layout.experts, mesh)) < len(layout.experts):
            raise _refused(op, experts_of(rules[op.name]), ways, layout, mesh.size)


def _refused(op: Op, experts: int, ways: int, layout: Layout, devices: int) -> LayoutError:
    most = math.gcd(experts, ways)
    fewer = f"use layout fsdp+ep on a mesh of {devices // most}x{most}, whose last axis splits experts, or layout fsdp"
    return LayoutError(
        f"layout {layout.name} splits experts over {ways} devices, but there are {experts}"
        + ("" if experts < ways else f", which {ways} does not divide"),
        where=f"operator {op.name} of {op.module or 'the model'}",
        fix=fewer if most > 1 else "use layout fsdp",
    )
