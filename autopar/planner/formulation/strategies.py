"""The strategies of one op: every way to give each of the user's mesh axes a factor.

A user's axis is used whole where it divides. Where it does not (2 key/value heads on an axis of 8), as many of its prime factors as do, and the
rest of the axis on another factor or on none. A heavy op leaves an axis idle only if nothing can use it, or if it reads no input (learned positions).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.rules.grammar import Rule

SUM = "+"  # an axis over which all tensor inputs are Partial and so are the outputs


@dataclass(frozen=True)
class OpStrategy:
    """What one op does on the mesh: axis -> (letter, stride), and axes over which Partial operands pass through (axis -> inputs)."""

    split: tuple[tuple[str, tuple[str, int]], ...] = ()
    partial: tuple[tuple[str, frozenset[int]], ...] = ()

    @staticmethod
    def of(split: Mapping[str, tuple[str, int]], partial: Mapping[str, frozenset[int]] | None = None) -> OpStrategy:
        return OpStrategy(tuple(sorted(split.items())), tuple(sorted((partial or {}).items())))

    @property
    def label(self) -> str:
        parts = [f"{a}:{x}" + (f"/{s}" if s > 1 else "") for a, (x, s) in self.split]
        return " ".join(parts + [f"{a}:{SUM}" for a, _ in self.partial]) or "R"


@dataclass(frozen=True)
class _Slot:
    """A stretch of a letter between two cuts. beside: letters, with their sizes, one of which every axis takes that is put here (`Rule.pairs`). of: the letter whose
    stretch it is, where another one is split alongside (`Rule.alongside`); least: of a rank's part of that, so much."""

    letter: str
    low: int
    high: int
    beside: tuple[tuple[str, int], ...] = ()
    of: str = ""
    least: int = 1

    @property
    def room(self) -> _Slot:
        """The stretch itself, whatever is beside it."""
        return _Slot(self.of or self.letter, self.low, self.high)


def strategies(
    op: Op,
    rule: Rule,
    mesh: Mesh,
    cuts: Mapping[tuple[str, str], tuple[int, ...]],
    summed: Sequence[str] = (),
    passes: frozenset[int] = frozenset(),
    without: frozenset[str] = frozenset(),
    repeats: bool = False,
    least: int = 0,
) -> list[OpStrategy]:
    """summed: axes over which operands `passes` may be Partial, and the outputs with them; without: letters not to split; repeats: a heavy op may leave an axis idle that it could use;
    least: loops that take others along (`Rule.alongside`) may be split, into parts of so much; 0: they are not."""
    slots = []
    for x, f in rule.factors.items():
        if f.split and f.size > 1 and x not in without and x not in rule.taken:
            at = cuts.get((op.name, x), (1, f.size))
            mine = [_Slot(x, lo, hi) for lo, hi in itertools.pairwise(at) if hi > lo]
            # (b s) may be split along either; of a product's features, (heads d), only the major part: attention keeps d whole. Where queries, keys
            # and values are made together, (3 heads d), that is the heads, for axes that three parts are too few for.
            slots += mine[::-1] if rule.kind != "matmul" or _is_kept(rule, x) else _major(mine, mesh)
            beside = tuple((y, rule.factors[y].size) for y, other in rule.pairs.items() if other == x and rule.factors[y].split)
            slots += [replace(s, beside=beside) for s in mine[::-1] if beside]
            along = [y for y, other in rule.alongside.items() if other == x and rule.factors[y].split and least]
            slots += [replace(s, letter=y, of=x, least=least) for y in along for s in mine[::-1]]
    found: dict[OpStrategy, None] = {}
    parents = [p for p, size in mesh.parents.items() if size > 1]

    def go(i: int, split: dict[str, tuple[str, int]], partial: dict[str, frozenset[int]], used: dict[_Slot, int]) -> None:
        if i == len(parents):
            found[OpStrategy.of(split, partial)] = None
            return
        children = [c for c in mesh.children(parents[i]) if mesh.axis_size(c) > 1]
        whole = False
        for more, then in _fill(children, slots, used, mesh, rule.is_heavy):
            whole = True
            go(i + 1, {**split, **more}, partial, then)
        if summed and all(c in summed for c in children):
            go(i + 1, split, {**partial, **{c: passes for c in children}}, used)
        if not (rule.is_heavy and whole) or repeats:
            part = _part(children, slots, used, mesh) if rule.is_heavy and not whole else ({}, used)
            go(i + 1, {**split, **part[0]}, partial, part[1])

    go(0, {}, {}, {})
    return list(found)


def _major(slots: Sequence[_Slot], mesh: Mesh) -> list[_Slot]:
    """From the major one on, until every axis of the user's fits into one of them."""
    out: list[_Slot] = []
    for slot in reversed(slots):
        out.append(slot)
        if all((slot.high // slot.low) % size == 0 for size in mesh.parents.values()):
            break
    return out[:2]


def _is_kept(rule: Rule, letter: str) -> bool:
    """Whether both the first operand and the first output have it: the tokens of a product."""
    outs = rule.outputs[0] or ()
    return any(letter in d for d in rule.inputs[0]) and any(letter in d for d in outs)


def _fill(
    children: Sequence[str], slots: Sequence[_Slot], used: Mapping[_Slot, int], mesh: Mesh, mix: bool
) -> Iterator[tuple[dict[str, tuple[str, int]], dict[_Slot, int]]]:
    """Ways to use every child: all on one slot, or (mix) as many as fit on one and the rest on another."""
    for slot in slots:
        n = _fits(children, slot, used, mesh)
        if n == len(children):
            yield _put(children, slot, used, mesh)
        elif n and slot.beside:  # fewer experts than devices: the rest of the axis, its minor or its major part, splits tokens alone
            for mine, left in ((children[:n], children[n:]), (children[-n:], children[:-n])):
                some, then = _put(mine, slot, used, mesh)
                for other in slots:
                    if not other.beside and other.letter == slot.letter and _fits(left, other, then, mesh) == len(left):
                        others, end = _put(left, other, then, mesh)
                        yield {**some, **others}, end
        elif n and mix and slot == slots[0]:  # a batch smaller than the axis: the rest of the axis goes to another factor
            some, then = _put(children[:n], slot, used, mesh)
            for other in slots:
                if other.letter != slot.letter and _fits(children[n:], other, then, mesh) == len(children) - n:
                    rest, end = _put(children[n:], other, then, mesh)
                    yield {**some, **rest}, end


def _part(
    children: Sequence[str], slots: Sequence[_Slot], used: Mapping[_Slot, int], mesh: Mesh
) -> tuple[dict[str, tuple[str, int]], dict[_Slot, int]]:
    """As many children as any slot takes; the rest repeat the work."""
    best = max(slots, key=lambda s: _fits(children, s, used, mesh), default=None)
    return _put(children[: _fits(children, best, used, mesh)], best, used, mesh) if best else ({}, dict(used))


def _fits(children: Sequence[str], slot: _Slot, used: Mapping[_Slot, int], mesh: Mesh) -> int:
    room, n = slot.high // slot.low, 0
    taken, free = used.get(slot.room, 1), _free(slot, used)
    for c in children:
        taken *= mesh.axis_size(c)
        if room % taken or (slot.beside and mesh.axis_size(c) not in free) or room < taken * slot.least:
            break
        if slot.beside:
            free.remove(mesh.axis_size(c))
        n += 1
    return n


def _put(
    children: Sequence[str], slot: _Slot, used: Mapping[_Slot, int], mesh: Mesh
) -> tuple[dict[str, tuple[str, int]], dict[_Slot, int]]:
    taken, out, then = used.get(slot.room, 1), {}, dict(used)
    for c in children:
        taken *= mesh.axis_size(c)
        letter = slot.letter
        if slot.beside:
            letter = next(x for x, size in slot.beside if size == mesh.axis_size(c) and _Slot(x, 0, 0) not in then)
            then[_Slot(letter, 0, 0)] = 1
        out[c] = (letter, slot.high // taken)
    return out, {**then, slot.room: taken}


def _free(slot: _Slot, used: Mapping[_Slot, int]) -> list[int]:
    """Sizes of the letters beside that no axis has yet."""
    return [size for x, size in slot.beside if _Slot(x, 0, 0) not in used]
