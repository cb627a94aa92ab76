"""Repeated layers -> one copy with a multiplicity.

A class is a set of operators that stand for each other: one per copy of a repeated stack (`stacks.py` says which and checks that they
are wired alike), or a single operator. Its representative lies in the last copy but one, which has a copy before and a copy
after it: what it reads and what reads it is what holds in the middle of the stack. The graph keeps all copies that were captured,
so the edges at either end of a stack can be found there.

The graph may hold fewer copies than the program it stands for (`autopar.capture.tile`); counts are always of the program.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.graph.graph import Graph, Op
from autopar.solver.backward_stacks import with_backward
from autopar.solver.correspondence import generic, homes_of, token
from autopar.solver.forward_stacks import forward_stacks
from autopar.solver.stacks import DIGITS, Copies, Program, Stack, constant_text, shape_text, tag_text

LAYER = re.compile(r"^(|.*?\.)(\d+)\.")  # the outermost number of a parameter's name


@dataclass(frozen=True)
class Folded:
    """A graph and which of its operators and tensors stand for which.

    rep: operator -> its representative.  count: representative -> operators of the program that it stands for.
    tensor_rep, tensor_count: the same of tensors (results, parameters, buffers, inputs, tangents, constants), by tensor name.
    stacks: the repeated stretches as they are in `graph`; copies: how many copies of each the program has.
    unfolded: layers that look repeated but do not fold, with the reason.  note: how it was captured, if not as asked.
    together: neighbouring layers taken as one copy, more than there have to be (`grouped`).
    """

    graph: Graph
    rep: Mapping[str, str]
    count: Mapping[str, int]
    tensor_rep: Mapping[str, str]
    tensor_count: Mapping[str, int]
    stacks: tuple[Stack, ...]
    copies: tuple[int, ...]
    unfolded: tuple[str, ...] = ()
    note: str = ""
    together: int = 1

    @property
    def depth(self) -> dict[str, int]:
        """Layers in every repeated stack."""
        return {s.name: s.layers * n for s, n in zip(self.stacks, self.copies, strict=True)}

    def counted(self) -> Iterator[tuple[Op, int]]:
        """Representatives, and how many of the program each stands for."""
        return ((op, self.count[op.name]) for op in self.graph.ops if self.rep[op.name] == op.name)

    @cached_property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """Canonical text of every class and its count, in order of first appearance. No node names, no dependence on captured depth."""
        return tuple(_Text(self).lines())

    def form(self) -> str:
        """Canonical text without the counts."""
        return "\n".join(line for line, _ in self.lines)

    def fingerprint(self) -> str:
        text = "\n".join(f"{count} x {line}" for line, count in self.lines)
        return hashlib.sha256(text.encode()).hexdigest()


def fold(graph: Graph) -> Folded:
    program = Program(graph)
    found = forward_stacks(program)
    kept, given_up = with_backward(program, found)
    kept = [replace(s, name=n, layers=_layers(graph, s)) for s, n in zip(kept, _names(graph, kept), strict=True)]
    lost = [f"{name}: {given_up[i]}" for i, name in enumerate(_names(graph, found)) if i in given_up]
    return folded(graph, tuple(kept), tuple(s.copies for s in kept), (*lost, *_unfolded(graph, kept)))


def folded(graph: Graph, stacks: tuple[Stack, ...], copies: tuple[int, ...], unfolded: tuple[str, ...] = (), note: str = "") -> Folded:
    """`graph` folded along `stacks`, which the program has `copies` of."""
    rep = {op.name: op.name for op in graph.ops}
    tensor_rep = {n: n for n in graph.tensors}
    count = dict.fromkeys(rep, 1)
    tensor_count = dict.fromkeys(tensor_rep, 1)
    outputs = {op.name: [t.name if t else "" for t in op.outputs] for op in graph.ops}
    for stack, n in zip(stacks, copies, strict=True):
        for part in (stack.forward, stack.backward, stack.leaves):
            for names in zip(*part, strict=True):
                chosen = names[-2]
                is_op = part is not stack.leaves
                values = zip(*(outputs[x] for x in names), strict=True) if is_op else [names]
                if is_op:
                    for x in names:
                        rep[x] = chosen
                        del count[x]
                    count[chosen] = n
                for members in values:
                    for x in members:
                        if x:
                            tensor_rep[x] = members[-2]
                            del tensor_count[x]
                    if members[-2]:
                        tensor_count[members[-2]] = n
    return Folded(graph, rep, count, tensor_rep, tensor_count, stacks, copies, unfolded, note)


def grouped(f: Folded, together: int) -> Folded | None:
    """`f` with so many neighbouring copies of every stack as one: what one of them hands to the next is then within a copy. A stack of so many copies is
    not folded at all. None where copies are left over, or were not all captured."""
    if any(s.copies != n or n % together for s, n in zip(f.stacks, f.copies, strict=True)):
        return None

    def joined(copies: Copies, backwards: bool = False) -> Copies:
        groups = [copies[i : i + together] for i in range(0, len(copies), together)]
        return tuple(tuple(name for copy in (group[::-1] if backwards else group) for name in copy) for group in groups)

    stacks = tuple(
        replace(s, forward=joined(s.forward), backward=joined(s.backward, True), leaves=joined(s.leaves), layers=s.layers * together)
        for s in f.stacks
        if s.copies > together
    )
    return replace(folded(f.graph, stacks, tuple(s.copies for s in stacks), f.unfolded, f.note), together=together)


def handed_on_bytes(folded: Folded) -> float:
    """Of what layers hand to the next, in forward, on one device."""
    home = {n: (s, k) for s, stack in enumerate(folded.stacks) for k, names in enumerate(stack.forward) for n in names}
    read_by: dict[str, set[tuple[int, int] | None]] = {}
    for op in folded.graph.ops:
        for t in op.inputs if op.direction == "forward" else ():
            read_by.setdefault(t.name, set()).add(home.get(op.name))
    made = ((t, home[op.name]) for op in folded.graph.ops if op.name in home for t in op.outputs if t is not None)
    return sum(t.nbytes * folded.tensor_count.get(t.name, 0) for t, at in made if read_by.get(t.name, set()) - {at})


# ---- names -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbered:
    """Names of a leaf in the copies of a stack: before + number + after, the first number and the step."""

    before: str
    after: str
    first: int
    step: int

    @staticmethod
    def of(names: Sequence[str]) -> Numbered | None:
        """None where the names are not numbered evenly."""
        for match in DIGITS.finditer(names[0]):
            before, after, first = names[0][: match.start()], names[0][match.end() :], int(match[0])
            second = names[1].removeprefix(before).removesuffix(after)
            if second == match[0] or not second.isdigit():
                continue
            step = int(second) - first
            if all(n == f"{before}{first + k * step}{after}" for k, n in enumerate(names)):
                return Numbered(before, after, first, step)
        return None

    def name(self, k: int) -> str:
        return f"{self.before}{self.first + k * self.step}{self.after}"

    def index(self, name: str) -> int | None:
        """The copy that `name` would be of."""
        number = name.removeprefix(self.before).removesuffix(self.after)
        if not name.startswith(self.before) or not name.endswith(self.after) or not number.isdigit():
            return None
        k, rest = divmod(int(number) - self.first, self.step)
        return k if not rest else None


def numbered(graph: Graph, stack: Stack) -> dict[int, Numbered]:
    """Slot of a leaf -> how its parameter (or buffer) is named."""
    name_of = {t.name: n for names in (graph.params, graph.buffers) for n, t in names.items()}
    found = {}
    for slot, leaves in enumerate(zip(*stack.leaves, strict=True)):
        names = [name_of[x] for x in leaves if x in name_of]
        way = Numbered.of(names) if len(names) == len(leaves) else None
        if way is not None:
            found[slot] = way
    return found


def _names(graph: Graph, stacks: Sequence[Stack]) -> list[str]:
    """A name for people of every stack: "model.layers", or its place among the stacks."""
    names: list[str] = []
    for i, stack in enumerate(stacks):
        befores = Counter(w.before.rstrip(".") for w in numbered(graph, stack).values())
        name = befores.most_common(1)[0][0] if befores else f"stack {i}"
        while name in names:
            name += "'"
        names.append(name)
    return names


def _layers(graph: Graph, stack: Stack) -> int:
    """How many layers a copy has, as the parameters are numbered."""
    steps = Counter(way.step for way in numbered(graph, stack).values())
    return steps.most_common(1)[0][0] if steps else stack.layers


def _unfolded(graph: Graph, stacks: Sequence[Stack]) -> list[str]:
    """Numbered modules with the parameters of another one that lie in no stack."""
    layers: dict[tuple[str, int], set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    outside: set[tuple[str, int]] = set()
    inside = {x for s in stacks for copy in s.leaves for x in copy}
    for name, t in graph.params.items():
        match = LAYER.match(name)
        if match:
            key = match[1], int(match[2])
            layers[key].add((name[match.end() :], t.shape))
            if t.name not in inside:
                outside.add(key)
    alike = Counter((before, frozenset(own)) for (before, _), own in layers.items())
    folding = {before for before, number in layers if (before, number) not in outside}
    found = []
    for before, number in sorted(outside):
        if before in folding:
            found.append(f"{before}{number}: its operators or what they read differ from the layers that fold")
        elif alike[before, frozenset(layers[before, number])] > 1:
            found.append(f"{before}{number}: no neighbour has the same operators and wiring")
    return found


# ---- text --------------------------------------------------------------------------------------------------------


class _Text:
    """Canonical text. Classes are numbered by first appearance; copies at the ends of a stack are counted from that end."""

    def __init__(self, f: Folded) -> None:
        self.f, self.graph = f, f.graph
        self.homes = homes_of(Program(f.graph), f.stacks)
        self.ops = {op.name: op for op in self.graph.ops}
        self.id: dict[str, int] = {}
        for op in self.graph.ops:
            self.id.setdefault(f.rep[op.name], len(self.id))
        self.maker = {t.name: (op.name, i) for op in self.graph.ops for i, t in enumerate(op.outputs) if t is not None}
        self.leaves = self._leaf_texts()
        self.given = {t.name: f"input {i}" for i, t in enumerate(self.graph.inputs)}
        self.given |= {t.name: f"tangent {i}" for t, i in zip(self.graph.tangents, self.graph.tangent_of, strict=True)}

    def lines(self) -> list[tuple[str, int]]:
        f, g = self.f, self.graph
        found = [(f"{self.given[t.name]} {shape_text(t)}", 1) for t in (*g.inputs, *g.tangents)]
        members: dict[str, tuple[int, tuple[str, ...]]] = {}  # operator in a stack -> its stack, its class by copy
        for s, stack in enumerate(f.stacks):
            for names in (*zip(*stack.forward, strict=True), *zip(*stack.backward, strict=True)):
                members |= dict.fromkeys(names, (s, names))
        seen: set[str] = set()
        for name, leaf in self.leaves.items():
            if f.tensor_rep[name] not in seen:
                seen.add(f.tensor_rep[name])
                found.append((f"{leaf} {shape_text(g.tensors[name])}", f.tensor_count[f.tensor_rep[name]]))
        for op in g.ops:
            if f.rep[op.name] in seen:
                continue
            seen.add(f.rep[op.name])
            if op.name in members:
                s, names = members[op.name]
                reads = self._reads(s, [[t.name for t in self.ops[n].inputs] for n in names])
            else:
                reads = [self._outside(t.name) for t in op.inputs]
            constants = constant_text(op.args, shape_text) + constant_text(op.kwargs, shape_text)
            results = " ".join(map(shape_text, op.outputs))
            text = (
                f"%{self.id[f.rep[op.name]]} {op.direction} {op.target}{constants} reads {', '.join(reads)} gives {results}{tag_text(op)}"
            )
            found.append((text, f.count[f.rep[op.name]]))
        found += [(f"output {self._outside(n) if n else '-'}", 1) for n in g.outputs]
        made_for = [("gradient", g.params[n], t) for n, t in g.grads.items()]
        made_for += [("update", g.buffers[n], t) for n, t in g.buffer_updates.items()]
        for kind, owner, made in made_for:
            if f.tensor_rep[owner.name] == owner.name:
                value = self._outside(made) if owner.name not in self.homes else self._class(made)
                found.append((f"{kind} {self.leaves[owner.name]} {value}", f.tensor_count[owner.name]))
        return found

    def _leaf_texts(self) -> dict[str, str]:
        """Tensor name of a leaf -> kind and name, layer numbers starred; a number tells classes of one starred name apart."""
        f, g = self.f, self.graph
        befores = {w.before for s in f.stacks for w in numbered(g, s).values()}

        def star(name: str) -> str:
            for before in befores:
                match = DIGITS.match(name, len(before)) if name.startswith(before) else None
                if match:
                    return f"{before}*{name[match.end() :]}"
            return name

        named = {t.name: f"parameter {star(n)}" for n, t in g.params.items()}
        named |= {t.name: f"buffer {star(n)}" for n, t in g.buffers.items()}
        named |= {n: "constant" for n in Program(g).leaf_names if n not in named}
        used: Counter[str] = Counter()
        texts: dict[str, str] = {}
        for name, text in named.items():
            rep = f.tensor_rep[name]
            if rep not in texts:
                used[text] += 1
                texts[rep] = f"{text} #{used[text]}" if used[text] > 1 else text
        return {name: texts[f.tensor_rep[name]] for name in named}

    def _class(self, name: str) -> str:
        if name in self.maker:
            op, i = self.maker[name]
            return f"%{self.id[self.f.rep[op]]}.{i}"
        return self.leaves.get(name) or self.given[name]

    def _outside(self, name: str) -> str:
        """What something outside of the stack reads: which copy, from the nearer end."""
        home = self.homes.get(name)
        return self._class(name) + (self._copy(home.stack, home.copy) if home else "")

    def _copy(self, stack: int, copy: int) -> str:
        n = self.f.stacks[stack].copies
        return f"[{copy}]" if 2 * copy < n - 1 else f"[{copy - n}]"

    def _reads(self, stack: int, by_copy: list[list[str]]) -> list[str]:
        """What a class reads: the rule, then what the copies at the ends read instead."""
        found = []
        for names in zip(*by_copy, strict=True):
            tokens = [token(self.homes, stack, k, n) for k, n in enumerate(names)]
            rule = generic(tokens)
            at = tokens.index(rule)
            text = self._class(names[at]) + f"@{-rule[-1]}" if rule[0] == "in" else self._outside(names[at])
            ends = [f"{self._copy(stack, k)}: {self._outside(n)}" for k, n in enumerate(names) if tokens[k] != rule]
            found.append(f"{text} ({', '.join(ends)})" if ends else text)
        return found
