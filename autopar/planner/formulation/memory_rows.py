"""The memory rows: bytes live at every position of forward, backward and the optimizer step, as sums over the program's variables.

Throughout: parameters and optimizer state as stored, buffers, this device's part of the batch.
Transient: what a position's own direction made and still reads, at the placement it was made in, and versions brought elsewhere from first to
last use. Kept: from where it is made to its last use in backward, by what runs again too. Made again: from first to last use in backward, and, where strategies are
fixed, from when what reads it runs again (`chains`).
Gathered parameters live from a stretch before their use, unreduced gradients to a stretch after they are made (`windows`). Under gradient
accumulation every unreduced gradient has a buffer that is there in forward too; in the last micro-batch backward trades it for the reduced
gradient, in those before it keeps it: there are rows for both. Tensors that fused kernels never write are not counted. Rows whose terms
another row has too, and more, are left out.

Repeated layers. The graph has a first copy, a middle one that stands for M, and a last one. At a position in copy g of the M, what is kept of
the g - 1 copies before it is whole, and its neighbours' and its own tensors live as they do around the graph's middle copy: the bytes are
affine in g, with the sizes kept as the slope. So the peak over g lies at g = 1 or g = M. In forward kept bytes only grow, so g = M
suffices. In backward kept bytes shrink and gradients grow as g falls: there is a row for either end.

The rows that bound plans whose layers have policies of their own: `autopar.planner.formulation.relaxed_rows`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.graph.graph import DTYPE_BYTES
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.lifetimes import RANDOM_BYTES, Lifetimes
from autopar.planner.formulation.live_bytes import Columns, Spans
from autopar.planner.formulation.offload import in_flight, limits
from autopar.planner.formulation.recompute_chains import Chains
from autopar.planner.formulation.relaxed_rows import RowRelaxation
from autopar.planner.storage import batch_placements
from autopar.solver.problem import DEVICE, Key, Problem, Row


def rows(f: Formulated, problem: Problem, is_bound: bool = False) -> Problem:
    """`problem` with its memory rows. is_bound: it is the relaxed one of `autopar.planner.formulation.lower_bound`, where everything is split over all devices."""
    r = Rows(Lifetimes(f, problem, is_bound))
    found = r.rows()
    tight, relaxed_rows = ((), ()) if is_bound else limits(r.life, problem)
    return replace(
        problem,
        rows=found,
        events=tuple(r.chains.events.known) if r.chains else (),
        rests=tuple(r.relaxation.rests),
        relaxed_rows=tuple(r.relaxed_rows),
        limits=tight,
        relaxed_limits=relaxed_rows,
    )


class Rows:
    def __init__(self, life: Lifetimes) -> None:
        self.life, self.f, self.program, self.problem, self.mesh, self.is_bound = (
            life,
            life.f,
            life.program,
            life.problem,
            life.mesh,
            life.is_bound,
        )
        self.chains = Chains(life) if self.f.is_decided else None
        self.columns = Columns(life, self.chains.at if self.chains else ())
        self.relaxation = RowRelaxation(life)
        self.relaxed_rows: list[Row] = []
        # What lives in every call, and what in one that reduces gradients; all of them do where there is one micro-batch.
        self.always = self.last_call = Spans()
        self.chained = Spans()
        if self.f.training.micro_batches > 1:
            self.last_call = Spans()

    def add(self, key: Key, nbytes: float, first: int, last: int, tensor: str = "", grows: bool = False, last_call: bool = False) -> None:
        """As `Columns.add`; last_call: only where gradients are reduced."""
        self.columns.add(self.last_call if last_call else self.always, key, nbytes, first, last, tensor, grows)

    def rows(self) -> tuple[Row, ...]:
        f, s = self.f, self.f.training
        static: dict[Key, float] = defaultdict(float)
        step: dict[Key, float] = defaultdict(float)
        for name, t in self.program.graph.params.items():
            c, options = f.names.storage[self.program.q.group[t.name]]
            times, trained, grad = (
                self.program.q.tensor_times[t.name],
                self.program.q.tensor_rep[t.name] in self.program.trained,
                self.program.graph.grads.get(name),
            )
            shares = [t.numel / self.mesh.size] if self.is_bound else [math.prod(o.placement.local_shape(self.mesh)) for o in options]
            for i, n in enumerate(shares):
                static["x", c, i] += times * n * (s.master_bytes + (s.state_bytes if trained else 0.0))
                if trained:
                    step["x", c, i] += times * n * (s.master_bytes + s.step_bytes)
                    if grad is not None:
                        made = self.life.grad_made(grad)
                        self.add(("x", c, i), n * s.master_bytes, made, self.life.end - 1, t.name, grows=True, last_call=True)
            if trained and grad is not None and s.micro_batches > 1:
                self.accumulated(grad, times)
        static["x", f.fixed, 0] += sum(t.nbytes for t in self.program.graph.buffers.values())
        for option, axes in enumerate(f.names.input_options):
            places = batch_placements(self.program.graph.inputs, axes, self.mesh)
            shares = [1 / self.mesh.size if self.is_bound else p.share(self.mesh) for p in places]
            static["x", f.names.inputs, 0 if self.is_bound else option] = sum(
                t.nbytes * n for t, n in zip(self.program.graph.inputs, shares, strict=True)
            )
        for v in range(len(self.problem.values)):
            self.value(v)
        if f.cost.fused is None and not self.is_bound:
            self.workspace()
        for key, nbytes, first, last in self.chains.stand() if self.chains else ():
            self.chained.plain.append((self.columns.of(key), first, last, nbytes))
        rows_of = {i: self.columns.at(i) for i, op in enumerate(self.program.graph.ops) if self.life.writes(op)}
        spans = {"": self.always if s.micro_batches == 1 else self.always + self.last_call}
        if s.micro_batches > 1:
            spans[", accumulating"] = self.always
        alive = {said: mine + self.chained for said, mine in spans.items()}
        layers = {n for stack in self.program.q.stacks for copies in (stack.forward, stack.backward) for names in copies for n in names}
        ends = {n for stack in self.program.q.stacks for copies in (stack.forward, stack.backward) for names in copies[-2:] for n in names}
        parts: dict[tuple[bool, bool], list[int]] = defaultdict(list)  # what relaxed rows are made of is not left out for other rows
        for i, found_at in rows_of.items():
            name = self.program.graph.ops[i].name
            parts[name in layers, name in ends] += found_at
        calls = {
            said: self.columns.live(mine, [at for part in parts.values() for at in self.largest(mine, part)])
            for said, mine in alive.items()
        }
        before = {said: self.columns.live(mine, list(self.columns.before.values())) for said, mine in spans.items()}
        inside: list[tuple[str, dict[Key, float]]] = []
        outside: list[tuple[str, dict[Key, float]]] = []
        for i, found_at in rows_of.items():
            op = self.program.graph.ops[i]
            for said, live in calls.items():
                for at in (at for at in found_at if at in live):
                    (inside if op.name in layers else outside).append((f"{op.direction}{said} at {op.name}", _sum(static, live[at])))
        # Rows of calls: what they have in common with others, and what not.
        shared: dict[str, tuple[dict[Key, float], dict[Key, float]]] = {}
        bases = {(said, at): _sum(static, live[column]) for said, live in before.items() for at, column in self.columns.before.items()}
        for i, op, during in self.chains.calls() if self.chains else ():
            for said in spans:
                for at in self.columns.at(i):
                    name = f"backward{said}, {op.name} again{', last' * (at != i)}, at {self.program.graph.ops[i].name}"
                    shared[name] = bases[said, at], during
                    (inside if op.name in layers else outside).append((name, _sum(bases[said, at], during)))
        outside.append(("optimizer step", _sum(static, step)))
        # Those outside of the layers are relaxed rows too: none is left out for one inside.
        kept = _undominated(outside)
        found = [*kept, *_undominated(inside, kept)]
        if not f.is_decided:
            outer = _undominated([(name, self.relaxation.row(terms, False)) for name, terms in kept])
            inner = [(name, self.relaxation.row(terms, True)) for name, terms in inside if name.rpartition(" ")[2] in ends]
            self.relaxed_rows = [Row(name, 0.0, tuple(sorted(terms.items()))) for name, terms in [*outer, *_undominated(inner, outer)]]
        found = [(name, self.by_base(*shared[name]) if name in shared else terms) for name, terms in found]
        return tuple(Row(name, 0.0, tuple(sorted(terms.items()))) for name, terms in found)

    def largest(self, spans: Spans, columns: Sequence[int]) -> list[int]:
        """Of columns, those at which memory may be largest."""
        found = self.columns.peaks(spans, columns)
        ops, q = self.program.graph.ops, self.program.q
        groups: dict[str, list[int]] = defaultdict(list)
        for at in sorted(found, key=lambda at: (self.columns.first_of(at), at)):
            groups[q.rep[ops[self.columns.first_of(at)].name]].append(at)
        patterned = [group for rep, group in groups.items() if rep in q.patterned]
        return [*(at for rep, group in groups.items() if rep not in q.patterned for at in group), *self.columns.corners(spans, patterned)]

    def by_base(self, base: dict[Key, float], more: dict[Key, float]) -> dict[Key, float]:
        """Of one position there are many rows of calls that differ by little: what is in all of them is added up once."""
        rests = self.relaxation.rests
        return _sum({("s", rests.setdefault(tuple(sorted(base.items())), len(rests)), 0): 1.0}, more)

    def accumulated(self, grad: str, times: int) -> None:
        """The buffers of a gradient's `times` copies in front of its reduction. Adding to one, the old and the new one live."""
        v = self.f.names.value_of[self.program.q.group[grad]]
        value, size, made = self.problem.values[v], self.life.sizes(v), self.life.grad_made(grad)
        for end in flow.supplies if (flow := value.backward or value.forward) else ():
            for s, n in enumerate(end.nodes):
                k = self.columns.of(("x", end.choice, s))
                self.always.plain.append((k, 0, self.life.end - 1, times * size[n]))
                self.add(("x", end.choice, s), size[n], made, made)
                self.add(("x", end.choice, s), -size[n], made + 1, self.life.end - 1, grad, grows=True, last_call=True)

    def value(self, v: int) -> None:
        for tensor in self.program.q.members[self.problem.values[v].name]:
            self.tensor(v, tensor)

    def tensor(self, v: int, tensor: str) -> None:
        value = self.problem.values[v]
        size = self.life.sizes(v)
        made = self.life.made(tensor)
        users = {0: self.life.users(tensor, "forward"), 1: self.life.users(tensor, "backward")}
        if tensor not in self.program.param_of and tensor in self.life.written_ahead:
            direction = int(made >= self.life.turn)
            last = max(users[direction], default=made)
            for end in flow.supplies if (flow := (value.forward, value.backward)[direction]) else ():
                for s, n in enumerate(end.nodes):
                    self.add(("x", end.choice, s), size[n], made, last)
        for k, policy in enumerate(value.policies):
            # While the value is alive in forward its own term counts it; what fusion would not write is written to be kept.
            if policy.medium == DEVICE:
                first = max(users[0], default=made) + 1 if tensor in self.life.written_ahead else made
                self.add(("y", v, k), size[policy.node], first, self.life.last_need(tensor), tensor)
            else:
                leaving, back = in_flight(self.life, tensor)
                self.add(("y", v, k), size[policy.node], leaving[0] if tensor in self.life.written_ahead else made, leaving[1])
                self.add(("y", v, k), size[policy.node], *back)
                self.columns.reloaded.append(self.columns.index.get(("y", v, k), -1))
        for direction, flow in ((0, value.forward), (1, value.backward)):
            if flow is None or not users[direction]:
                continue
            first, last = min(users[direction]), max(users[direction])
            if tensor in self.program.param_of and self.is_cast(tensor):
                self.cast(v, direction, first, last)
            first = self.life.windows.issued(first) if tensor in self.program.param_of else first
            for a, arc in enumerate(flow.arcs):
                if arc.times:
                    self.add(("e", v, direction, a), size[arc.dst], first, last)
        if tensor in self.program.params_of_grad and value.backward is not None:
            for a, arc in enumerate(value.backward.arcs):
                if arc.times:
                    self.add(("e", v, 1, a), size[arc.src], max([made, *users[1]]) + 1, self.life.windows.awaited(made))
        if value.backward is not None and tensor in self.life.written_by_recompute and users[1]:
            for i, nodes in self.life.remade[v]:
                for s, n in enumerate(nodes):
                    self.add(("r", i, s), size[n], min(users[1]), max(users[1]))

    def is_cast(self, param: str) -> bool:
        """Whether it is stored in another precision than it is computed with."""
        return DTYPE_BYTES.get(self.program.graph.tensors[param].dtype, 4) != self.f.training.master_bytes

    def cast(self, v: int, direction: int, first: int, last: int) -> None:
        """A parameter in the precision of computing: there while it is used, unless it is gathered, which is counted by itself."""
        value, size = self.problem.values[v], self.life.sizes(v)
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
        for op in self.program.graph.ops:
            if self.program.rules[op.name].kind == "random" and op.outputs[0] is not None:
                name, t = self.program.q.rep[op.name], op.outputs[0]
                c, recompute = f.clusters.of[name], which.get((name, self.program.q.segment[op.name]))
                for s, made in enumerate(f.clusters.made[name]):
                    nbytes = RANDOM_BYTES * t.numel * (made[0].share(self.mesh) if made[0] is not None else 1.0)
                    at = self.life.position[op.name]
                    self.add(("x", c, s), nbytes, at, at)
                    if recompute is not None and op.name in self.life.earliest and self.chains is None:
                        self.add(("r", recompute, s), nbytes, self.life.earliest[op.name], self.life.earliest[op.name])


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
