"""The memory rows: bytes live at every position of forward, backward and the optimizer step, as sums over the program's variables.

Throughout: parameters and optimizer state as stored, buffers, this device's part of the batch.
Transient: what a position's own direction made and still reads, at the placement it was made in, and versions brought elsewhere from first to
last use. Kept: from where it is made to its last use in backward, by what runs again too. Made again: from first to last use in backward, and, where strategies are
fixed, from when what reads it runs again (`chains`).
Gathered parameters live from a stretch before their use, unreduced gradients to a stretch after they are made (`stretches`). Under gradient
accumulation every unreduced gradient has a buffer that is there in forward too; in the last micro-batch backward trades it for the reduced
gradient, in those before it keeps it: there are rows for both. Tensors that fused kernels never write are not counted. Rows whose terms
another row has too, and more, are left out.

Repeated layers. The graph has a first copy, a middle one that stands for M, and a last one. At a position in copy g of the M, what is kept of
the g - 1 copies before it is whole, and its neighbours' and its own tensors live as they do around the graph's middle copy: the bytes are
affine in g, with the sizes kept as the slope. So the peak over g lies at g = 1 or g = M. In forward kept bytes only grow, so g = M
suffices. In backward kept bytes shrink and gradients grow as g falls: there is a row for either end.

The rows that bound plans whose layers have fates of their own: `formulate.loose`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autopar.formulate import away
from autopar.formulate.chains import Chains
from autopar.formulate.loose import Loosen
from autopar.formulate.stretches import Stretches
from autopar.formulate.written import written
from autopar.graph import DTYPE_BYTES
from autopar.solver.problem import DEVICE, Key, Problem, Row
from autopar.storage import batch_placements

if TYPE_CHECKING:
    from autopar.formulate.problem import Formulator
    from autopar.graph import Op

# Bytes per element that drawing random numbers from counters takes on the way, run call by call: 64-bit words (measured: tests/spmd/test_memory.py).
RANDOM_BYTES = 27.0
STRETCH = 4096  # variables


def rows(f: Formulator, problem: Problem, ideal: bool = False) -> Problem:
    """`problem` with its memory rows. ideal: it is the relaxed one of `autopar.formulate.ideal`, where everything is split over all devices."""
    r = Rows(f, problem, ideal)
    found = r.rows()
    tight, loose = ((), ()) if ideal else away.limits(r, problem)
    return replace(
        problem,
        rows=found,
        events=tuple(r.chains.events.known) if r.chains else (),
        rests=tuple(r.loosen.rests),
        loose=tuple(r.loose),
        limits=tight,
        loose_limits=loose,
    )


@dataclass
class Spans:
    """plain: variable, first and last position, bytes; copies: variable, bytes and how often by column, where copies of layers hold some."""

    plain: list[tuple[int, int, int, float]] = field(default_factory=list)
    copies: list[tuple[int, float, np.ndarray]] = field(default_factory=list)

    def __add__(self, other: Spans) -> Spans:
        return Spans(self.plain + other.plain, self.copies + other.copies)


class Rows:
    def __init__(self, f: Formulator, problem: Problem, ideal: bool = False) -> None:
        self.f, self.problem, self.mesh, self.ideal = f, problem, f.mesh, ideal
        ops = f.graph.ops
        self.turn = next((i for i, op in enumerate(ops) if op.direction == "backward"), len(ops))
        self.position = {op.name: i for i, op in enumerate(ops)}
        self.end = len(ops)
        self.stretches = Stretches(f.graph, f.q.stacks)
        self.written, self.written_ahead, self.written_again = written(f)
        self.remade: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # value -> reruns that make it, at which nodes
        for i, rerun in enumerate(problem.reruns):
            for v, nodes in rerun.makes:
                self.remade[v].append((i, nodes))
        # Positions in copies that stand for several, forward and backward; by operator or leaf, the copy that it is in.
        self.middle: list[tuple[list[int], list[int]]] = []
        self.middle_of: dict[str, int] = {}
        for stack in f.q.stacks:
            for forward, backward, leaves in zip(stack.forward, stack.backward, stack.leaves, strict=True):
                if forward and f.q.times[forward[0]] > 1:
                    for n in (*forward, *backward, *leaves):
                        self.middle_of[n] = len(self.middle)
                    self.middle.append(([self.position[n] for n in forward], [self.position[n] for n in backward]))
        # Column i is position i; from `end` + 1 on, positions of backward in middle copies a second time, for the last of M to run.
        self.again = {i: self.end + 1 + k for k, i in enumerate(i for _, backward in self.middle for i in backward)}
        self.positions = {column: i for i, column in self.again.items()}
        self.chains = Chains(self) if f.only is not None else None
        # Columns of what lives before a position of backward runs, of those for which something may be made again.
        wanted = sorted(self.chains.at) if self.chains else []
        columns = [at for p in wanted for at in ((p, self.again[p]) if p in self.again else (p,))]
        self.before = {at: self.end + 1 + len(self.again) + k for k, at in enumerate(columns)}
        self.width = self.end + 1 + len(self.again) + len(self.before)
        self.index: dict[Key, int] = {}
        self.loose: list[Row] = []
        self.loosen = Loosen(self)
        self.known_sizes: dict[int, dict[int, float]] = {}
        self.known_often: dict[tuple[int, int, int, int, bool], np.ndarray] = {}
        # What lives in every call, and what in one that reduces gradients; all of them do where there is one micro-batch.
        self.always = self.last_call = Spans()
        self.chained = Spans()
        self.reloaded: list[int] = []  # variables of what is brought back: a reload is issued before what its position makes again
        if f.setting.micro_batches > 1:
            self.last_call = Spans()

    def rows(self) -> tuple[Row, ...]:
        f, s = self.f, self.f.setting
        static: dict[Key, float] = defaultdict(float)
        step: dict[Key, float] = defaultdict(float)
        for name, t in f.graph.params.items():
            c, options = f.names.storage[f.q.group[t.name]]
            times, trained, grad = f.q.tensor_times[t.name], f.q.tensor_rep[t.name] in f.trained, f.graph.grads.get(name)
            shares = [t.numel / self.mesh.size] if self.ideal else [math.prod(o.placement.local_shape(self.mesh)) for o in options]
            for i, n in enumerate(shares):
                static["x", c, i] += times * n * (s.master_bytes + (s.state_bytes if trained else 0.0))
                if trained:
                    step["x", c, i] += times * n * (s.master_bytes + s.step_bytes)
                    if grad is not None:
                        made = self.position[grad.split(".")[0]]
                        self.add(("x", c, i), n * s.master_bytes, made, self.end - 1, t.name, grows=True, last_call=True)
            if trained and grad is not None and s.micro_batches > 1:
                self.accumulated(grad, times)
        static["x", f.fixed, 0] += sum(t.nbytes for t in f.graph.buffers.values())
        for option, axes in enumerate(f.names.input_options):
            places = batch_placements(f.graph.inputs, axes, self.mesh)
            shares = [1 / self.mesh.size if self.ideal else p.share(self.mesh) for p in places]
            static["x", f.names.inputs, 0 if self.ideal else option] = sum(
                t.nbytes * n for t, n in zip(f.graph.inputs, shares, strict=True)
            )
        for v in range(len(self.problem.values)):
            self.value(v)
        if f.cost.fused is None and not self.ideal:
            self.workspace()
        for key, nbytes, first, last in self.chains.stand() if self.chains else ():
            self.chained.plain.append((self.index.setdefault(key, len(self.index)), first, last, nbytes))
        rows_of = {i: (i, self.again[i]) if i in self.again else (i,) for i, op in enumerate(f.graph.ops) if self.writes(op)}
        columns = [at for found in rows_of.values() for at in found]
        spans = {"": self.always if s.micro_batches == 1 else self.always + self.last_call}
        if s.micro_batches > 1:
            spans[", accumulating"] = self.always
        calls = {said: self.live(mine + self.chained, columns) for said, mine in spans.items()}
        before = {said: self.live(mine, list(self.before.values())) for said, mine in spans.items()}
        inside: list[tuple[str, dict[Key, float]]] = []
        outside: list[tuple[str, dict[Key, float]]] = []
        layers = {n for stack in f.q.stacks for copies in (stack.forward, stack.backward) for names in copies for n in names}
        for i, found_at in rows_of.items():
            op = f.graph.ops[i]
            for said, live in calls.items():
                for at in found_at:
                    (inside if op.name in layers else outside).append((f"{op.direction}{said} at {op.name}", _sum(static, live[at])))
        # Rows of calls: what they have in common with others, and what not.
        shared: dict[str, tuple[dict[Key, float], dict[Key, float]]] = {}
        bases = {(said, at): _sum(static, live[column]) for said, live in before.items() for at, column in self.before.items()}
        for i, op, during in self.chains.calls() if self.chains else ():
            for said in spans:
                for at in (i, self.again[i]) if i in self.again else (i,):
                    name = f"backward{said}, {op.name} again{', last' * (at != i)}, at {f.graph.ops[i].name}"
                    shared[name] = bases[said, at], during
                    (inside if op.name in layers else outside).append((name, _sum(bases[said, at], during)))
        outside.append(("optimizer step", _sum(static, step)))
        # Those outside of the layers are loose rows too: none is left out for one inside.
        kept = _undominated(outside)
        found = [*kept, *_undominated(inside, kept)]
        if f.only is None:
            last = {n for stack in f.q.stacks for copies in (stack.forward, stack.backward) for names in copies[-2:] for n in names}
            outer = _undominated([(name, self.loosen.row(terms, False)) for name, terms in kept])
            inner = [(name, self.loosen.row(terms, True)) for name, terms in inside if name.rpartition(" ")[2] in last]
            self.loose = [Row(name, 0.0, tuple(sorted(terms.items()))) for name, terms in [*outer, *_undominated(inner, outer)]]
        found = [(name, self.by_base(*shared[name]) if name in shared else terms) for name, terms in found]
        return tuple(Row(name, 0.0, tuple(sorted(terms.items()))) for name, terms in found)

    def by_base(self, base: dict[Key, float], more: dict[Key, float]) -> dict[Key, float]:
        """Of one position there are many rows of calls that differ by little: what is in all of them is added up once."""
        rests = self.loosen.rests
        return _sum({("s", rests.setdefault(tuple(sorted(base.items())), len(rests)), 0): 1.0}, more)

    def accumulated(self, grad: str, times: int) -> None:
        """The buffers of a gradient's `times` copies in front of its reduction. Adding to one, the old and the new one live."""
        v = self.f.names.value_of[self.f.q.group[grad]]
        value, size, made = self.problem.values[v], self.sizes(v), self.made(grad)
        for end in flow.supplies if (flow := value.backward or value.forward) else ():
            for s, n in enumerate(end.nodes):
                k = self.index.setdefault(("x", end.choice, s), len(self.index))
                self.always.plain.append((k, 0, self.end - 1, times * size[n]))
                self.add(("x", end.choice, s), size[n], made, made)
                self.add(("x", end.choice, s), -size[n], made + 1, self.end - 1, grad, grows=True, last_call=True)

    def writes(self, op: Op) -> bool:
        """Whether anything is in memory once `op` has run that was not before: what is read elsewhere, or may be kept."""
        return any(t is not None and (t.name in self.written or t.name in self.may_be_kept) for t in op.outputs)

    @cached_property
    def may_be_kept(self) -> set[str]:
        members = self.f.q.members
        return {t for value in self.problem.values if value.fates for t in members[value.name]}

    def live(self, spans: Spans, columns: Sequence[int]) -> dict[int, dict[Key, float]]:
        """Column -> bytes by variable. A stretch of variables at a time: most of them live at few positions, so of a program with a hundred thousand of
        them all columns together would be the largest thing that planning holds."""
        out: dict[int, dict[Key, float]] = {at: {} for at in columns}
        keys = list(self.index)
        plain = sorted(spans.plain)
        copies = sorted(spans.copies, key=lambda c: c[0])
        i = j = 0
        for start in range(0, len(keys), STRETCH):
            stop = min(len(keys), start + STRETCH)
            live = np.zeros((stop - start, self.width))
            upto = bisect_left(plain, (stop,))
            if upto > i:
                variable, first, last, size = (np.array(x) for x in zip(*plain[i:upto], strict=True))
                np.add.at(live, (variable - start, first), size)
                np.add.at(live, (variable - start, last + 1), -size)
                np.cumsum(live[:, : self.end], axis=1, out=live[:, : self.end])
                np.round(live, 3, out=live)  # a sum that is over leaves no crumbs
                live[:, self.end :] = 0.0
                for at, second in self.again.items():
                    live[:, second] = live[:, at]
                if self.before:
                    starts = np.zeros((stop - start, self.end + 1))
                    mine = ~np.isin(variable, self.reloaded)
                    np.add.at(starts, ((variable - start)[mine], first[mine]), size[mine])
                    for at, column in self.before.items():
                        live[:, column] = live[:, at] - starts[:, self.first_of(at)]
            i = upto
            while j < len(copies) and copies[j][0] < stop:
                variable_of, nbytes, often = copies[j]
                live[variable_of - start] += nbytes * often
                j += 1
            for at in columns:
                mine = live[:, at]
                out[at].update((keys[start + k], float(mine[k])) for k in np.flatnonzero(mine))
        return out

    def add(self, key: Key, nbytes: float, first: int, last: int, tensor: str = "", grows: bool = False, last_call: bool = False) -> None:
        """Bytes of `tensor` from position `first` to `last`.

        tensor: one of which copies further up or down hold others at the same time ("": it lives within its copy and the next);
        grows: made in backward and held to the end, else made in forward and held to its use in backward; last_call: only where gradients are
        reduced.
        """
        if last < first or not nbytes:
            return
        k = self.index.setdefault(key, len(self.index))
        last = min(last, self.end - 1)
        spans = self.last_call if last_call else self.always
        times = self.f.q.tensor_times[tensor] if tensor else 1
        middle = self.middle_of.get(tensor.split(".")[0], self.middle_of.get(tensor)) if tensor else None
        if times == 1 or middle is None:
            spans.plain.append((k, first, last, nbytes))
            return
        spans.copies.append((k, nbytes, self.often(middle, times, first, last, grows)))

    def first_of(self, column: int) -> int:
        """The position that a column is of."""
        return column if column <= self.end else self.positions[column]

    def often(self, middle: int, times: int, first: int, last: int, grows: bool) -> np.ndarray:
        """By column: how many of a tensor's copies are alive."""
        what = middle, times, first, last, grows
        if what in self.known_often:
            return self.known_often[what]
        own = np.zeros(self.width)
        own[first : last + 1] = 1.0
        for i, j in self.again.items():
            own[j] = own[i]
        for i, j in self.before.items():
            own[j] = own[i] * (self.first_of(i) != first)
        # This one is the nearest to whatever position it is; the others of the times are there whole, or not yet, or no more.
        forward, backward = self.middle[middle]
        others = np.zeros(self.width)
        if grows:
            others[max(backward, default=first) + 1 : self.end] = 1.0
        else:
            others[min(forward) : max(backward, default=last) + 1] = 1.0
        for i, j in self.again.items():
            others[j] = others[i]
        others[[self.again[i] for i in backward]] = float(grows)
        for i, j in self.before.items():
            others[j] = others[i]
        found = self.known_often[what] = own + (times - 1) * others
        return found

    def value(self, v: int) -> None:
        for tensor in self.f.q.members[self.problem.values[v].name]:
            self.tensor(v, tensor)

    def sizes(self, v: int) -> dict[int, float]:
        """Bytes of one tensor of value `v`, per node."""
        if v not in self.known_sizes:
            wire = self.f.wires[self.problem.values[v].name]
            whole = {n: p.share(self.mesh) for n, p in enumerate(wire.nodes)}
            shares = {0: 1 / self.mesh.size} if self.ideal else whole
            self.known_sizes[v] = {n: wire.nbytes * share for n, share in shares.items()}
        return self.known_sizes[v]

    def tensor(self, v: int, tensor: str) -> None:
        f, value = self.f, self.problem.values[v]
        size = self.sizes(v)
        made = self.made(tensor)
        users = {0: self.users(tensor, "forward"), 1: self.users(tensor, "backward")}
        if tensor not in f.param_of and tensor in self.written_ahead:
            direction = int(made >= self.turn)
            last = max(users[direction], default=made)
            for end in flow.supplies if (flow := (value.forward, value.backward)[direction]) else ():
                for s, n in enumerate(end.nodes):
                    self.add(("x", end.choice, s), size[n], made, last)
        for k, fate in enumerate(value.fates):
            # While the value is alive in forward its own term counts it; what fusion would not write is written to be kept.
            if fate.medium == DEVICE:
                first = max(users[0], default=made) + 1 if tensor in self.written_ahead else made
                self.add(("y", v, k), size[fate.node], first, self.last_need(tensor), tensor)
            else:
                leaving, back = away.in_flight(self, tensor)
                self.add(("y", v, k), size[fate.node], leaving[0] if tensor in self.written_ahead else made, leaving[1])
                self.add(("y", v, k), size[fate.node], *back)
                self.reloaded.append(self.index.get(("y", v, k), -1))
        for direction, flow in ((0, value.forward), (1, value.backward)):
            if flow is None or not users[direction]:
                continue
            first, last = min(users[direction]), max(users[direction])
            if tensor in f.param_of and self.is_cast(tensor):
                self.cast(v, direction, first, last)
            first = self.stretches.issued(first) if tensor in f.param_of else first
            for a, arc in enumerate(flow.arcs):
                if arc.times:
                    self.add(("e", v, direction, a), size[arc.dst], first, last)
        if tensor in f.params_of_grad and value.backward is not None:
            for a, arc in enumerate(value.backward.arcs):
                if arc.times:
                    self.add(("e", v, 1, a), size[arc.src], max([made, *users[1]]) + 1, self.stretches.awaited(made))
        if value.backward is not None and tensor in self.written_again and users[1]:
            for i, nodes in self.remade[v]:
                for s, n in enumerate(nodes):
                    self.add(("r", i, s), size[n], min(users[1]), max(users[1]))

    def is_cast(self, param: str) -> bool:
        """Whether it is stored in another precision than it is computed with."""
        return DTYPE_BYTES.get(self.f.graph.tensors[param].dtype, 4) != self.f.setting.master_bytes

    def cast(self, v: int, direction: int, first: int, last: int) -> None:
        """A parameter in the precision of computing: there while it is used, unless it is gathered, which is counted by itself."""
        value, size = self.problem.values[v], self.sizes(v)
        flow = (value.forward, value.backward)[direction]
        for end in value.forward.supplies:
            for s, n in enumerate(end.nodes):
                self.add(("x", end.choice, s), size[n], first, last)
        for a, arc in enumerate(flow.arcs if flow is not None else ()):
            if arc.times:
                self.add(("e", v, direction, a), -size[arc.src], first, last)

    def workspace(self) -> None:
        """What operators that are run call by call make on the way to their results."""
        f = self.f
        which = {key: i for i, key in enumerate(f.names.reruns)}
        for op in f.graph.ops:
            if f.rules[op.name].kind == "random" and op.outputs[0] is not None:
                name, t = f.q.rep[op.name], op.outputs[0]
                c, again = f.cl.of[name], which.get((name, f.q.segment[op.name]))
                for s, made in enumerate(f.cl.made[name]):
                    nbytes = RANDOM_BYTES * t.numel * (made[0].share(self.mesh) if made[0] is not None else 1.0)
                    at = self.position[op.name]
                    self.add(("x", c, s), nbytes, at, at)
                    if again is not None and op.name in self.earliest and self.chains is None:
                        self.add(("r", again, s), nbytes, self.earliest[op.name], self.earliest[op.name])

    @cached_property
    def earliest(self) -> dict[str, int]:
        """Operator of forward -> the position at which backward first needs something that follows from it in its layer and may be made again (what
        a layer hands on is not)."""
        f, found = self.f, dict[str, int]()
        for op in reversed(f.graph.ops):
            if op.direction == "forward":
                mine = [t.name for t in op.outputs if t is not None and not f.again.leaves_its_copy(op, t)]
                at = [p for t in mine for p in self.users(t, "backward")]
                later = [r for t in mine for r in f.readers.get(t, ()) if r.direction == "forward"]
                at += [found[r.name] for r in later if r.name in found and f.again.is_within(op, r)]
                if at:
                    found[op.name] = min(at)
        return found

    def workspace_of(self, op: Op) -> float:
        """What `op`, of whose cluster one strategy is left, makes on the way where it is run by itself."""
        f = self.f
        if f.cost.fused is not None or self.ideal or f.rules[op.name].kind != "random" or op.outputs[0] is None:
            return 0.0
        (made,) = f.cl.made[f.q.rep[op.name]]
        return RANDOM_BYTES * op.outputs[0].numel * (made[0].share(self.mesh) if made[0] is not None else 1.0)

    def made(self, tensor: str) -> int:
        return self.position.get(tensor if tensor in self.position else tensor.split(".")[0], -1)

    def first_need(self, tensor: str) -> int:
        """The first position of backward at which it, or what may run again, reads `tensor`."""
        again = [self.earliest[r] for r in self.readers_through_views(tensor) if r in self.earliest]
        return min([*self.users(tensor, "backward"), *again], default=self.turn)

    def last_need(self, tensor: str) -> int:
        users = self.users(tensor, "backward")
        return max(users) if users else self.read_again(tensor)

    def stack_of(self, position: int) -> int | None:
        """The repeated stack that an operator is of."""
        return self.stacks.get(self.f.graph.ops[position].name)

    @cached_property
    def stacks(self) -> dict[str, int]:
        f = self.f
        return {n: i for i, s in enumerate(f.q.stacks) for copies in (s.forward, s.backward) for names in copies for n in names}

    def readers_through_views(self, name: str) -> list[str]:
        out: list[str] = []
        for op in self.f.readers.get(name, ()):
            if op.direction == "forward":
                if self.f.rules[op.name].kind == "view":
                    out += [r for t in op.outputs if t is not None for r in self.readers_through_views(t.name)]
                else:
                    out.append(op.name)
        return out

    def read_again(self, name: str) -> int:
        """Where backward reads no tensor `name` itself: the last position at which what runs again may read it, at least the turn."""
        readers = (r.name for r in self.f.readers.get(name, ()) if r.name in self.runs_again)
        return max((self.runs_again[r] for r in readers), default=self.turn)

    @cached_property
    def runs_again(self) -> dict[str, int]:
        """Operator of forward -> the last position at which it may run again: before backward reads its result, or with its readers."""
        found: dict[str, int] = {}
        for op in reversed(self.f.graph.ops):
            if op.direction == "forward":
                made = [t.name for t in op.outputs if t is not None]
                direct = [at for t in made for at in self.users(t, "backward")]
                later = [found[r.name] for t in made for r in self.f.readers.get(t, ()) if r.name in found]
                if direct or later:
                    found[op.name] = min(direct) if direct else max(later)
        return found

    def users(self, name: str, direction: str) -> list[int]:
        """Positions of the ops of `direction` that read `name`, through views."""
        out = []
        todo, seen = [name], {name}
        while todo:
            for op in self.f.readers.get(todo.pop(), ()):
                if op.direction == direction:
                    out.append(self.position[op.name])
                through = self.f.rules[op.name].kind == "view" or (name in self.f.param_of and self.f.is_chained(op))
                for t in op.outputs if through else ():
                    if t is not None and t.name not in seen:
                        seen.add(t.name)
                        todo.append(t.name)
        return out


def _sum(a: dict[Key, float], b: dict[Key, float]) -> dict[Key, float]:
    out = dict(a)
    for key, k in b.items():
        out[key] = out.get(key, 0.0) + k
    return out


def _undominated(
    rows: list[tuple[str, dict[Key, float]]], given: Sequence[tuple[str, dict[Key, float]]] = ()
) -> list[tuple[str, dict[Key, float]]]:
    """Rows that no other row, nor any of `given`, covers term by term."""
    rows = sorted(rows, key=lambda r: -len(r[1]))
    often: dict[Key, int] = defaultdict(int)
    for _, terms in (*given, *rows):
        for key in terms:
            often[key] += 1
    kept: list[tuple[str, dict[Key, float]]] = []
    for name, terms in rows:
        rarest = dict(sorted(terms.items(), key=lambda term: often[term[0]]))  # what few rows have tells soonest that one does not cover it
        if not any(_covers(big, rarest) for _, big in (*given, *kept)):
            kept.append((name, terms))
    return kept


def _covers(big: dict[Key, float], small: dict[Key, float]) -> bool:
    """Whether `big` is no less whatever the variables are."""
    return all(big.get(k, 0.0) >= x for k, x in small.items()) and all(x >= 0 or small.get(k, 0.0) <= x for k, x in big.items())
