"""Layers that are alike but no copies of one another: which of their operators do the same.

A fold (`solver.fold`) ties what repeats exactly. Patterns are left: five layers with a window and one without, an encoder's first layer that makes a table of
positions which the others read, dense layers before mixtures of experts. A copy of such a stack has several layers, and layers stand beside it, each with
operators of its own; but most of them do what those of their neighbours do, on other parameters of the same shapes. Here they are tied, so that
one strategy is chosen for all of them: the program that is solved then grows with the kinds of layers, not with the length of their pattern.

Layers are those of one module list, by the modules' paths. Their operators are written as text (target, constants, shapes, parameters without their numbers; in
backward also which operator of forward made what is read) and the texts of one layer aligned with those of the layers before it, in order: equal ones are
tied. Layers with fewer than two products in common are no layers of a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from difflib import SequenceMatcher

from autopar.graph.graph import Graph, Op
from autopar.solver.fold import Folded
from autopar.solver.stacks import Home, Program, op_hash

LAYER = re.compile(r"^(|.*?\.)(\d+)(?:\.|$)")  # the outermost number of a module's path
PRODUCTS = 2  # operators on parameters of two dims and more that layers of a kind have in common

Layer = tuple[str, int]  # module list, number


def alike(f: Folded) -> dict[str, str]:
    """Operator that stands for a class -> one of another class that does the same in a layer of the same kind."""
    return _Patterns(f).run()


class _Patterns:
    def __init__(self, f: Folded) -> None:
        self.f, self.program = f, Program(f.graph)
        self.layer_of = layers_of(f.graph)
        self.number: dict[str, int] = {}  # of an operator that others are tied to
        self.in_stack = {n for s in f.stacks for part in (s.forward, s.backward) for copy in part for n in copy}
        self.given_grads = {f.graph.params[n].name for n in f.graph.grads if n in f.graph.params}
        self.weights = {t.name for t in f.graph.params.values() if len(t.shape) > 1}

    def run(self) -> dict[str, str]:
        families: dict[str, dict[int, dict[str, list[Op]]]] = defaultdict(dict)
        for op in self.f.graph.ops:
            layer = self.layer_of.get(op.name)
            if layer is not None and self.f.rep[op.name] == op.name:
                of = families[layer[0]].setdefault(layer[1], {"forward": [], "backward": []})
                of[op.direction].append(op)
        tied: dict[str, str] = {}
        for numbers in families.values():
            if len(numbers) > 1:
                tied |= self.family(numbers)
        return tied

    def family(self, numbers: Mapping[int, Mapping[str, list[Op]]]) -> dict[str, str]:
        """Of the layers of one module list. Those that repeat come first, then those between others: what they read is what most layers read."""
        first, last = min(numbers), max(numbers)

        def rank(number: int) -> tuple[bool, bool, int]:
            repeats = any(op.name in self.in_stack for op in numbers[number]["forward"])
            return not repeats, number in (first, last), number

        tied: dict[str, str] = {}
        merged: dict[str, list[tuple[str, str]]] = {"forward": [], "backward": []}  # text, operator
        for number in sorted(numbers, key=rank):
            places: dict[str, Home] = {}
            kept, mine = {d: list(m) for d, m in merged.items()}, dict[str, str]()
            for direction in ("forward", "backward"):
                ops = numbers[number][direction]
                texts = [self.text(op, places) for op in ops]
                kept[direction], found = aligned(kept[direction], [(t, op.name) for t, op in zip(texts, ops, strict=True)])
                mine |= found
                if direction == "forward":
                    places = {
                        t.name: Home(0, "f", self.number.setdefault(mine.get(op.name, op.name), len(self.number)), 0, i)
                        for op in ops
                        for i, t in enumerate(op.outputs)
                        if t is not None
                    }
            products = [op for op in numbers[number]["forward"] if op.name in mine and self.reads_weight(op)]
            if merged["forward"] and len(products) < PRODUCTS:
                continue
            merged, tied = kept, tied | mine
        return tied

    def text(self, op: Op, places: Mapping[str, Home]) -> str:
        trained = "".join("g" if t.name in self.given_grads else "-" for t in op.inputs)
        return op_hash(self.program, op, places) + trained

    def reads_weight(self, op: Op) -> bool:
        """Whether it reads a matrix of its layer's, also through a cast of it or a view."""
        todo = [t.name for t in op.inputs]
        for _ in range(3):
            if any(name in self.weights for name in todo):
                return len(op.inputs) > 1
            makers = [self.program.maker[name][0] for name in todo if name in self.program.maker]
            todo = [t for m in makers for t in self.program.inputs[m] if len(self.program.inputs[m]) == 1]
        return False


def layers_of(graph: Graph) -> dict[str, Layer]:
    """Operator -> the layer that its module is in, or is; one of no module belongs where the one before it does."""
    found: dict[str, Layer] = {}
    before: tuple[str, Layer | None] = "", None
    for op in graph.ops:
        match = LAYER.match(op.module)
        layer = (match[1], int(match[2])) if match else None
        if not op.module and before[0] == op.direction:
            layer = before[1]
        if layer is not None:
            found[op.name] = layer
        before = op.direction, layer
    return found


def aligned(merged: list[tuple[str, str]], own: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """`merged` with what `own` has besides, in order; and, of `own`, which operator is which of those."""
    matcher = SequenceMatcher(None, [t for t, _ in merged], [t for t, _ in own], autojunk=False)
    out: list[tuple[str, str]] = []
    same: dict[str, str] = {}
    for what, a, b, c, d in matcher.get_opcodes():
        out += merged[a:b]
        if what == "equal":
            same |= {own[c + i][1]: merged[a + i][1] for i in range(b - a)}
        else:
            out += own[c:d]
    return out, same
