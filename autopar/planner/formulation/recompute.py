"""What may be made again for backward: which results, and what that needs."""

from __future__ import annotations

from functools import cached_property

from autopar.cost.memory import base_name, is_view
from autopar.graph.graph import MUST_RECOMPUTE, MUST_SAVE, Op, Tensor
from autopar.planner.formulation.program import Program


class Recomputable:
    """Of a program's results: which a rerun of their operator in backward supplies."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._leaves: dict[tuple[str, str], bool] = {}

    def leaves_its_copy(self, op: Op, t: Tensor) -> bool:
        """Whether forward reads `t`, made in a copy of a layer, outside of that copy; or in one, and a product made it outside of layers. Where layers are
        grouped for want of memory, the last of them may be made again for what comes after it: then it does not leave."""
        if (op.name, t.name) not in self._leaves:
            self._leaves[op.name, t.name] = self._leaves_its_copy(op, t)
        return self._leaves[op.name, t.name]

    def _leaves_its_copy(self, op: Op, t: Tensor) -> bool:
        home = self.program.copy_of.get(op.name)
        if is_view(op, self.program.rules[op.name]) or (home is None and t.name not in self.follows_from_products):
            return False
        todo, seen = [t.name], {t.name}
        while todo:
            for r in self.program.readers.get(todo.pop(), ()):
                if r.direction == "forward":
                    if not self.is_within(op, r):
                        return True
                    if self.program.rules[r.name].kind == "view" and r.outputs[0] is not None and r.outputs[0].name not in seen:
                        seen.add(r.outputs[0].name)
                        todo.append(r.outputs[0].name)
        return False

    def is_within(self, op: Op, reader: Op) -> bool:
        """Whether what `reader` does again may take `op` with it."""
        home, there = self.program.copy_of.get(op.name), self.program.copy_of.get(reader.name)
        ends = home is not None and self.program.q.together > 1 and home[1] == len(self.program.q.stacks[home[0]].forward) - 1
        return there == home or (ends and there is None)

    @cached_property
    def follows_from_products(self) -> set[str]:
        """What forward makes of a product's or an attention's result."""
        found: set[str] = set()
        for op in self.program.graph.ops:
            if op.direction == "forward" and (self.program.rules[op.name].is_heavy or any(t.name in found for t in op.inputs)):
                found |= {t.name for t in op.outputs if t is not None}
        return found

    @cached_property
    def needed_by_recompute(self) -> set[str]:
        """Tensors that backward reads, or what may be made again for it."""
        found: set[str] = set()
        for op in reversed(self.program.graph.ops):
            recompute = [i for i, t in enumerate(op.outputs) if t is not None and t.name in found and self.recomputes(op, i)]
            if op.direction == "backward" or (recompute and not (recompute == [1] and is_mask_tagged(op))):
                found |= {t.name for t in op.inputs}
        return found

    def recomputes(self, op: Op, i: int) -> bool:
        """Whether a rerun of `op` supplies its output `i`. What a layer hands on is kept or not needed, and so is what layers get of products outside of them: made
        again, it would take what is before it with it, all of whose results would then live at once."""
        t = op.outputs[i]
        return t is not None and op.tag(i) != MUST_SAVE and not self.leaves_its_copy(op, t)

    def twins(self, op: Op, t: Tensor) -> list[Tensor]:
        """What the second to last of the copies that `op` stands for read where the first of them reads `t` of the copy before: its equal in
        their own copy. (Where the copy before is of another segment, that is another value.)"""
        home, made = self.program.copy_of.get(op.name), t.name.split(".")[0]
        there = self.program.copy_of.get(made)
        if home is None or there is None or self.program.q.times[op.name] == 1 or there != (home[0], home[1] - 1):
            return []
        stack = self.program.q.stacks[home[0]].forward
        twin = self.program.by_name[stack[home[1]][stack[there[1]].index(made)]]
        return [
            x
            for x, y in zip(twin.outputs, self.program.by_name[made].outputs, strict=True)
            if x is not None and y is not None and y.name == t.name
        ]

    def needs_mask_alone(self, op: Op) -> bool:
        """Of a dropout: whether only its mask is made again, which needs no operand."""
        return is_mask_tagged(op) and not (op.out.name in self.needed_by_recompute and self.recomputes(op, 0))


def is_mask_tagged(op: Op) -> bool:
    """Whether the user wants a dropout's mask made again. It is drawn from a counter, so of nothing."""
    return base_name(op) == "native_dropout" and op.tag(1) == MUST_RECOMPUTE
