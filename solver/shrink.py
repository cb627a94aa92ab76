"""A fold with as few copies in its graph as the program needs to be planned: the first, one or more that stand for those in the middle,
the last.

A capture of the whole program has every copy, a tiled one (`autopar.capture.tile`) a few; shrunk, both are the same graph but for names, and so
have the same plan. Copies are wired alike, so a copy reads, at the same distance, whichever copy stands there.

Layers share a strategy, not a policy. Where one policy for all layers wastes memory or time, the middle is cut into segments, consecutive layers with
a policy of their own: the middle copy then stands for the last segment, clones of it for those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph.graph import Graph, Op, Tensor
from autopar.solver.correspondence import homes_of
from autopar.solver.fold import Folded, folded
from autopar.solver.stacks import Home, Program, Stack

CLONE = "~"  # not in any name that torch gives


@dataclass(frozen=True)
class Place:
    """A copy of the smaller graph: which copy of the larger one it is made from, what its names end in, how many of the program it stands for,
    the segment it belongs to."""

    copy: int
    suffix: str
    times: int
    segment: int


@dataclass(frozen=True)
class Shrunk:
    """fold: of the smaller graph. image: operator of the larger graph -> the operator of the smaller one that stands for it.

    times, tensor_times: how many operators (tensors) of the program each of the smaller graph stands for. segment: operator -> its
    segment, 0 outside of stacks. segments: stack -> layers in each segment (one segment: all have one policy).
    """

    fold: Folded
    image: Mapping[str, str]
    times: Mapping[str, int]
    tensor_times: Mapping[str, int]
    segment: Mapping[str, int]
    segments: Mapping[str, tuple[int, ...]]

    @property
    def graph(self) -> Graph:
        return self.fold.graph


def shrink(f: Folded, segments: Mapping[str, Sequence[int]] | None = None) -> Shrunk:
    """segments: stack (by name) -> copies in each segment, first to last; default one segment. Raises ValueError if they do not add up."""
    return _Shrinker(f, segments or {}).run()


class _Shrinker:
    def __init__(self, f: Folded, segments: Mapping[str, Sequence[int]]) -> None:
        self.f, self.graph = f, f.graph
        self.program = Program(f.graph)
        self.homes = homes_of(self.program, f.stacks)
        self.segments = {s.name: tuple(segments.get(s.name, (n,))) for s, n in zip(f.stacks, f.copies, strict=True)}
        outside = self.read_outside()
        self.places = [self.place(s, stack, outside.get(s, set())) for s, stack in enumerate(f.stacks)]
        # operator or leaf -> stack, part, copy, slot
        self.at: dict[str, tuple[int, str, int, int]] = {}
        for s, stack in enumerate(f.stacks):
            for part, copies in (("f", stack.forward), ("b", stack.backward), ("l", stack.leaves)):
                for k, names in enumerate(copies):
                    for slot, name in enumerate(names):
                        self.at[name] = s, part, k, slot

    def place(self, s: int, stack: Stack, outside: set[int]) -> list[Place]:
        n, total, reach = stack.copies, self.f.copies[s], self.reach(s, stack)
        counts = self.segments[stack.name]
        if sum(counts) != total or min(counts) < 1:
            raise ValueError(f"{stack.name}: segments {counts} of {total} copies")
        head = list(range(reach))
        if reach >= n - 2 or set(range(reach, n - 2)) & outside:
            head = list(range(n - 2))
        middle = total - len(head) - 1
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]

        def segment(copy: int) -> int:
            return next(i for i, end in enumerate(ends) if copy < end)

        out = [Place(k, "", 1, segment(k)) for k in head]
        inner = [i for i in range(len(counts)) if any(segment(k) == i for k in range(len(head), total - 1))]
        for i in inner:
            times = sum(segment(k) == i for k in range(len(head), total - 1))
            out.append(Place(n - 2, "" if i == inner[-1] else f"{CLONE}{i}", times, i))
        assert sum(p.times for p in out) == middle + len(head)
        return [*out, Place(n - 1, "", 1, segment(total - 1))]

    def reach(self, s: int, stack: Stack) -> int:
        """Over how many copies an operator reads."""
        far = 1
        for copies in (stack.forward, stack.backward):
            for k, names in enumerate(copies):
                for name in names:
                    for t in self.program.inputs[name]:
                        home = self.homes.get(t)
                        if home is not None and home.stack == s:
                            far = max(far, abs(home.copy - k))
        return far

    def read_outside(self) -> dict[int, set[int]]:
        """Stack -> copies of which something that is not in the stack reads."""
        found: dict[int, set[int]] = {}
        where = {name.split(".")[0]: home for name, home in self.homes.items()}
        for op in self.graph.ops:
            mine = where.get(op.name)
            for t in op.inputs:
                home = self.homes.get(t.name)
                if home is not None and (mine is None or mine.stack != home.stack):
                    found.setdefault(home.stack, set()).add(home.copy)
        for name in self.graph.outputs:
            if name in self.homes:
                found.setdefault(self.homes[name].stack, set()).add(self.homes[name].copy)
        return found

    # ---- the smaller graph -----------------------------------------------------------------------------------------

    def run(self) -> Shrunk:
        g = self.graph
        ops: list[Op] = []
        times: dict[str, int] = {}
        segment: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        made = {t.name for op in g.ops for t in op.outputs if t is not None}
        for n, t in g.tensors.items():
            if n not in made and n not in self.at:
                self.tensors[n] = t
        tensor_times: dict[str, int] = dict.fromkeys(self.tensors, 1)
        order = self.order()
        for name, s, i in order:
            op = self.program.ops[name]
            if s >= 0:
                place = self.places[s][i]
                op = self.rewired(op, s, i)
                times[op.name], segment[op.name] = place.times, place.segment
            else:
                times[op.name], segment[op.name] = 1, 0
            ops.append(op)
            for made_here in op.outputs:
                if made_here is not None:
                    self.tensors[made_here.name] = made_here
                    tensor_times[made_here.name] = times[op.name]
        stacks = []
        for s, stack in enumerate(self.f.stacks):
            forward, backward, leaves_of = (
                tuple(tuple(_named(n, p.suffix) for n in copies[p.copy]) for p in self.places[s])
                for copies in (stack.forward, stack.backward, stack.leaves)
            )
            stacks.append(replace(stack, forward=forward, backward=backward, leaves=leaves_of))
            for p, leaves in zip(self.places[s], leaves_of, strict=True):
                for old, new in zip(stack.leaves[p.copy], leaves, strict=True):
                    self.tensors[new] = replace(g.tensors[old], name=new)
                    tensor_times[new] = p.times
        graph = self.with_leaves(tuple(ops))
        small = replace(folded(graph, tuple(stacks), self.f.copies, self.f.unfolded, self.f.note), together=self.f.together)
        return Shrunk(small, self.images(), times, tensor_times, segment, self.segments)

    def order(self) -> list[tuple[str, int, int]]:
        """(operator of the larger graph, stack, place): clones run before the middle copy in forward, after it in backward."""
        middle = {s: len(p) - 2 for s, p in enumerate(self.places)}
        first = {stack.forward[-2][0]: s for s, stack in enumerate(self.f.stacks) if stack.forward[-2]}
        place = {op.name: i for i, op in enumerate(self.graph.ops)}
        last = {max(stack.backward[-2], key=place.__getitem__): s for s, stack in enumerate(self.f.stacks) if stack.backward[-2]}
        clones = {s: [i for i, p in enumerate(places) if p.suffix] for s, places in enumerate(self.places)}
        out: list[tuple[str, int, int]] = []
        for op in self.graph.ops:
            at = self.at.get(op.name)
            if op.name in first:
                s = first[op.name]
                out += [(n, s, i) for i in clones[s] for n in self.f.stacks[s].forward[-2]]
            if at is None:
                out.append((op.name, -1, -1))
            else:
                i = next((i for i, p in enumerate(self.places[at[0]]) if p.copy == at[2] and not p.suffix), None)
                if i is not None:
                    out.append((op.name, at[0], i))
            if op.name in last:
                s = last[op.name]
                out += [(n, s, i) for i in reversed(clones[s]) for n in self.f.stacks[s].backward[-2]]
        assert all(len(p) - 2 == middle[s] for s, p in enumerate(self.places))
        return out

    def rewired(self, op: Op, s: int, i: int) -> Op:
        """`op` of the copy at place `i`, reading what stands at the same distance there."""
        place = self.places[s][i]

        def new(x: Any) -> Any:
            if isinstance(x, Tensor):
                home = self.homes.get(x.name)
                if home is None or home.stack != s:
                    return x
                return self.tensor(s, home, i + home.copy - place.copy)
            if isinstance(x, (list, tuple)):
                return type(x)(new(y) for y in x)
            if isinstance(x, dict):
                return {key: new(y) for key, y in x.items()}
            return x

        outputs = tuple(None if t is None else replace(t, name=_named(t.name, place.suffix)) for t in op.outputs)
        return replace(op, name=_named(op.name, place.suffix), args=new(op.args), kwargs=new(op.kwargs), outputs=outputs)

    def tensor(self, s: int, home: Home, i: int) -> Tensor:
        place, stack = self.places[s][i], self.f.stacks[s]
        name = {"f": stack.forward, "b": stack.backward, "l": stack.leaves}[home.part][place.copy][home.slot]
        t = self.graph.tensors[name] if home.part == "l" else self.program.ops[name].outputs[home.output]
        assert t is not None
        return replace(t, name=_named(t.name, place.suffix)) if place.suffix else t

    def with_leaves(self, ops: tuple[Op, ...]) -> Graph:
        """Parameters, buffers, their gradients and updates, of the copies that are there."""
        g = self.graph
        params: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        grads: dict[str, str] = {}
        updates: dict[str, str] = {}
        for old, new, results, new_results in ((g.params, params, g.grads, grads), (g.buffers, buffers, g.buffer_updates, updates)):
            for n, t in old.items():
                at = self.at.get(t.name)
                suffixes = [""] if at is None else [p.suffix for p in self.places[at[0]] if p.copy == at[2]]
                for suffix in suffixes:
                    new[n + suffix] = replace(t, name=_named(t.name, suffix))
                    if n in results:
                        new_results[n + suffix] = _named(results[n], suffix)
        return replace(g, params=params, buffers=buffers, ops=ops, grads=grads, buffer_updates=updates, tensors=self.tensors)

    def images(self) -> dict[str, str]:
        out = {}
        for op in self.graph.ops:
            at = self.at.get(op.name)
            if at is None:
                out[op.name] = op.name
                continue
            s, part, k, slot = at
            stack = self.f.stacks[s]
            # Copies of the larger graph are those of the program at its ends; where it has fewer, the middle one stands for the rest.
            place = self.standing(s, k if k < stack.copies - 2 else self.f.copies[s] - (stack.copies - k))
            name = {"f": stack.forward, "b": stack.backward}[part][place.copy][slot]
            out[op.name] = _named(name, place.suffix)
        return out

    def standing(self, s: int, copy: int) -> Place:
        """The place that stands for copy `copy` of the program."""
        before = 0
        for p in self.places[s]:
            before += p.times
            if copy < before:
                return p
        raise AssertionError(copy)


def _named(name: str, suffix: str) -> str:
    """Of operators ("mm") and of their results ("mm.1")."""
    base, dot, output = name.partition(".")
    return base + suffix + dot + output
