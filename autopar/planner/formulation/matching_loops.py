"""Which loops of two operators are the same loop, so that backward's products can be split as the forward product they belong to.

A product of backward reads what forward's read, but through views of its own (a transpose, heads merged into one dim): a letter of the one and a
letter of the other are one loop if they run over the same digit of the tensor that both views show. What is left is matched by size. The
backward of other heavy operators has a rule with the letters of their forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.graph.graph import Graph, Op
from autopar.rules.grammar import Rule
from autopar.rules.strategy import letter_at, right_of


class Loops:
    """maker, chain: as `autopar.planner.formulation.clusters.Clusters` has them, the maker an operator. readers: tensor -> who reads it."""

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, Rule],
        maker: Mapping[str, tuple[Op, int]],
        readers: Mapping[str, list[Op]],
        chain: Mapping[str, tuple[str, tuple[Op, ...]]],
    ) -> None:
        self.rules, self.maker, self.readers, self.chain = rules, maker, readers, chain
        self.params = {t.name for t in graph.params.values()}
        self.param_of_grad = {g: graph.params[p].name for p, g in graph.grads.items()}

    def forward_of(self, op: Op, among: Iterable[Op]) -> list[Op]:
        """Those of the forward ops `among` that `op` may be the backward of, best first: it makes the gradient of their parameter, or reads
        their operands."""
        mine = {self.base(t.name) for t in op.inputs}
        target = self._gradient_of(op)
        out = []
        for f in among:
            if self.rules[f.name].kind != self.rules[op.name].kind:
                continue
            bases = {self.base(t.name) for t in f.inputs}
            shared = len(mine & bases)
            params = bases & self.params
            if target is not None:
                if target in bases:
                    out.append((0, -shared, f))
            elif mine & params or (shared and not params):
                out.append((1, -shared, f))
        return [f for _, _, f in sorted(out, key=lambda e: e[:2])]

    def base(self, name: str) -> str:
        """The tensor that `name` is a view or cast of."""
        while name in self.maker:
            op = self.maker[name][0]
            if self.rules[op.name].kind != "view" or len(op.inputs) != 1:
                break
            name = op.inputs[0].name
        return self.chain[name][0] if name in self.chain else name

    def _gradient_of(self, op: Op) -> str | None:
        """The parameter whose gradient the first output becomes, through views and casts."""
        todo = [t.name for t in op.outputs if t is not None]
        for _ in range(8):
            for name in todo:
                if name in self.param_of_grad:
                    return self.param_of_grad[name]
            todo = [r.out.name for name in todo for r in self.readers.get(name, ()) if len(r.inputs) == 1 and r.outputs[0] is not None]
        return None

    def letters(self, op: Op, f: Op) -> dict[str, str] | None:
        """Letters of `f` -> letters of `op` that are the same loop."""
        mine, theirs = self.rules[op.name].factors, self.rules[f.name].factors
        if self.rules[op.name].kind != "matmul":
            same = {x: x for x in theirs if x in mine and mine[x].size == theirs[x].size}
            return same if all(x in same for x, loop in theirs.items() if loop.split and loop.size > 1) else None
        found: dict[str, str] = {}
        for i, t in enumerate(op.inputs):
            for j, u in enumerate(f.inputs):
                if self.base(t.name) != self.base(u.name):
                    continue
                for x in [y for d in self.rules[f.name].inputs[j] for y in d]:
                    y = self._same_loop(op, i, f, j, x)
                    if y is not None:
                        found[x] = y
        left = [x for x in theirs if x not in found]
        free = [y for y in mine if y not in found.values()]
        if len(left) > 1 and len({theirs[x].size for x in left}) < len(left):
            return None
        for x in left:
            same_size = [y for y in free if mine[y].size == theirs[x].size]
            if len(same_size) != 1:
                return None
            found[x] = same_size[0]
        return found

    def _same_loop(self, op: Op, i: int, f: Op, j: int, letter: str) -> str | None:
        """The letter of op's operand i that is f's `letter` in operand j, both being views of one tensor. Told by where a digit of 2 goes."""
        rule = self.rules[f.name]
        dim = next(d for d, x in enumerate(rule.inputs[j]) if letter in x)
        at = self._down(f.inputs[j].name, (dim, right_of(rule.inputs[j][dim], letter, rule)))
        for view in reversed(self._views(op.inputs[i].name)):
            at = None if at is None else self._through(view, at)
        found = None if at is None else letter_at(self.rules[op.name].inputs[i], at, 1, self.rules[op.name])
        return found[0] if found else None

    def _views(self, name: str) -> list[Op]:
        """The views from the base to `name`, last first."""
        out = []
        base = self.base(name)
        while name != base and name in self.maker:
            op = self.maker[name][0]
            out.append(op)
            name = op.inputs[0].name
        return out

    def _down(self, name: str, at: tuple[int, int]) -> tuple[int, int] | None:
        """Digit `at` of `name` as a digit of its base."""
        here: tuple[int, int] | None = at
        for view in self._views(name):
            rule = self.rules[view.name]
            outs = rule.outputs[0]
            assert outs is not None and here is not None
            found = letter_at(outs, here, 1, rule)
            here = None
            if found:
                letter, stride = found
                here = next(((d, stride * right_of(x, letter, rule)) for d, x in enumerate(rule.inputs[0]) if letter in x), None)
            if here is None:
                return None
        return here

    def _through(self, view: Op, at: tuple[int, int]) -> tuple[int, int] | None:
        """Digit `at` of what `view` reads as a digit of what it makes."""
        rule = self.rules[view.name]
        found = letter_at(rule.inputs[0], at, 1, rule)
        outs = rule.outputs[0]
        if found is None or outs is None:
            return None
        letter, stride = found
        return next(((d, stride * right_of(x, letter, rule)) for d, x in enumerate(outs) if letter in x), None)
