"""The memory rows: bytes live at every position of forward, backward and the optimizer step, as sums over the program's variables.

Throughout: parameters and optimizer state as stored, buffers, this device's part of the batch.
Transient: what a position's own direction made and still reads, at the placement it was made in, and versions brought elsewhere from first to
last use. Kept: from where it is made to its last use in backward, by what runs again too. Made again: from first to last use in backward, and, where strategies are
fixed, from when what reads it runs again (`chains`).
What an operator takes up while it runs (`workspace`) is there at its position. Gathered parameters live from a stretch before their use, unreduced gradients to a stretch after they are made (`windows`). Under gradient
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost import experts, loss_head, ring
from autopar.cost.compute import local_sizes
from autopar.graph.graph import DTYPE_BYTES
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.largest_positions import At, LargestPositions
from autopar.planner.formulation.lifetimes import RANDOM_BYTES, Lifetimes
from autopar.planner.formulation.live_bytes import Columns, Spans
from autopar.planner.formulation.offload import in_flight, limits
from autopar.planner.formulation.recompute_chains import Chains
from autopar.planner.formulation.relaxed_rows import RowRelaxation
from autopar.planner.storage import batch_placements
from autopar.solver.patterns import layers_of
from autopar.solver.problem import DEVICE, Key, Problem, Row
from autopar.solver.watch import check

IN_STEP = "optimizer step"  # the row of what lives while the optimizer steps
BROUGHT = "b"  # (.., value, direction, 0 or 1): all that is brought elsewhere of a value, by the size that arrives, or that is sent


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


def step_row(f: Formulated, problem: Problem) -> Problem:
    """`problem` with the row of what lives while the optimizer steps alone, as a relaxed one."""
    r = Rows(Lifetimes(f, problem))
    return replace(problem, relaxed_rows=(r.in_step(*r.parameters()),), rests=tuple(r.relaxation.rests))


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
        self.sums: dict[Key, Key] = {}
        # What lives in every call, and what in one that reduces gradients; all of them do where there is one micro-batch.
        self.always = self.last_call = Spans()
        self.chained = Spans()
        if self.f.training.micro_batches > 1:
            self.last_call = Spans()

    def add(self, key: Key, nbytes: float, first: int, last: int, tensor: str = "", grows: bool = False, last_call: bool = False) -> None:
        """As `Columns.add`; last_call: only where gradients are reduced."""
        self.columns.add(self.last_call if last_call else self.always, key, nbytes, first, last, tensor, grows)

    def parameters(self) -> tuple[dict[Key, float], dict[Key, float]]:
        """What always lives, and what does while the optimizer steps."""
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
        return static, step

    def in_step(self, static: dict[Key, float], step: dict[Key, float]) -> Row:
        return self.row(IN_STEP, {}, self.relaxation.row(_sum(static, step), False))

    def rows(self) -> tuple[Row, ...]:
        f, s = self.f, self.f.training
        static, step = self.parameters()
        for v in range(len(self.problem.values)):
            check()
            self.value(v)
        if not self.is_bound:
            self.workspace()
        for key, nbytes, first, last in self.chains.stand() if self.chains else ():
            self.chained.plain.append((self.columns.of(key), first, last, nbytes))
        spans = {"": self.always if s.micro_batches == 1 else self.always + self.last_call}
        if s.micro_batches > 1:
            spans[", accumulating"] = self.always
        largest = LargestPositions(self.columns, {said: mine + self.chained for said, mine in spans.items()})
        outside, ends, between = self.candidates(largest)
        outside, ends = largest.undominated(outside), largest.undominated(ends)
        # Those outside of the layers are relaxed rows too: none is left out for one inside.
        inside = largest.undominated([*ends, *between], outside)
        shared: dict[At, tuple[dict[Key, float], dict[Key, float]]] = {}
        groups = self.groups([*outside, *dict.fromkeys([*([] if f.is_decided else ends), *inside])])
        for group, (common, own) in zip(groups, largest.split(groups), strict=True):
            shared |= {at: (common, mine) for at, mine in zip(group, own, strict=True)}
        if not f.is_decided:
            self.relaxed_rows = [self.in_step(static, step)]
            self.relaxed_rows += [*self.relaxed(outside, static, shared, False), *self.relaxed(ends, static, shared, True)]
        found = [self.row(self.name(at), _sum(static, shared[at][0]), shared[at][1]) for at in (*outside, *inside)]
        return *found, self.row(IN_STEP, {}, _sum(static, step)), *self.of_calls(spans, static)

    def relaxed(
        self, of: Sequence[At], static: dict[Key, float], shared: Mapping[At, tuple[dict[Key, float], dict[Key, float]]], within: bool
    ) -> Iterator[Row]:
        """Relaxed rows; within: of layers. shared: what a position has in common with others, and what not."""
        relaxed: dict[int, dict[Key, float]] = {}
        for at in of:
            common, mine = shared[at]
            if id(common) not in relaxed:
                relaxed[id(common)] = self.relaxation.row(_sum(static, common), within)
            yield self.row(self.name(at), relaxed[id(common)], self.relaxation.row(mine, within))

    def candidates(self, largest: LargestPositions) -> tuple[list[At], list[At], list[At]]:
        """Where something is written and memory may be largest: outside of layers, in the last two copies of layers, in others. What relaxed rows are made of is
        not left out for other rows."""
        q, ops = self.program.q, self.program.graph.ops
        layers = {n for stack in q.stacks for copies in (stack.forward, stack.backward) for names in copies for n in names}
        ends = {n for stack in q.stacks for copies in (stack.forward, stack.backward) for names in copies[-2:] for n in names}
        parts: list[list[int]] = [[], [], []]
        for i, op in enumerate(ops):
            if self.life.writes(op):
                parts[1 if op.name in ends else 2 if op.name in layers else 0] += self.columns.at(i)
        out: list[list[At]] = []
        for columns in parts:
            found: list[At] = []
            groups: dict[tuple[str, str], list[At]] = defaultdict(list)
            for said in largest.spans:
                for at in sorted(largest.peaks(said, columns), key=lambda at: (self.columns.first_of(at), at)):
                    rep = q.rep[ops[self.columns.first_of(at)].name]
                    (groups[said, rep] if rep in q.patterned else found).append((said, at))
            out.append([*found, *largest.corners(list(groups.values()))])
        return out[0], out[1], out[2]

    def groups(self, of: Sequence[At]) -> list[list[At]]:
        """Positions that have most in common: of one copy of a layer, or next to each other outside of layers."""
        q, ops = self.program.q, self.program.graph.ops
        home = {
            n: (s, k)
            for s, stack in enumerate(q.stacks)
            for part in (stack.forward, stack.backward)
            for k, names in enumerate(part)
            for n in names
        }
        layer = layers_of(self.program.graph)
        found: dict[tuple[object, ...], list[At]] = defaultdict(list)
        for said, at in of:
            op = ops[self.columns.first_of(at)]
            found[said, op.direction, home.get(op.name), layer.get(op.name), at > self.life.end].append((said, at))
        return list(found.values())

    def name(self, at: At) -> str:
        op = self.program.graph.ops[self.columns.first_of(at[1])]
        return f"{op.direction}{at[0]} at {op.name}"

    def of_calls(self, spans: Mapping[str, Spans], static: dict[Key, float]) -> Iterator[Row]:
        """Where strategies are decided, there are rows for calls that run again too: what they have in common with others of their position, and what not."""
        if self.chains is None:
            return
        before = {said: self.columns.live(mine, list(self.columns.before.values())) for said, mine in spans.items()}
        calls: dict[int, list[tuple[str, dict[Key, float]]]] = defaultdict(list)
        for i, op, during in self.chains.calls():
            calls[i].append((op.name, during))
        for i, found in calls.items():
            kept = _undominated(found)
            for said in spans:
                for at in self.columns.at(i):
                    base = _sum(static, before[said][self.columns.before[at]])
                    for name, during in kept:
                        again = f"backward{said}, {name} again{', last' * (at != i)}, at {self.program.graph.ops[i].name}"
                        yield self.row(again, base, during)

    def row(self, name: str, common: dict[Key, float], own: dict[Key, float]) -> Row:
        """common: what many rows have in common and is added up once. What is brought elsewhere of a value in one direction lives and goes together: it is a
        sum by itself too."""
        check()
        rests, terms = self.relaxation.rests, defaultdict[Key, float](float)
        positive = {key: nbytes for key, nbytes in common.items() if key[0] != "s" and nbytes > 0}
        for key, nbytes in own.items() if len(positive) < 2 else (*own.items(), *((k, n) for k, n in common.items() if k not in positive)):
            terms[self.brought(key)] += nbytes
        if len(positive) > 1:
            summed = defaultdict[Key, float](float)
            for key, nbytes in positive.items():
                summed[self.brought(key)] += nbytes
            terms["s", rests.setdefault(tuple(sorted(summed.items())), len(rests)), 0] += 1.0
        else:
            for key, nbytes in common.items():
                terms[self.brought(key)] += nbytes
        return Row(name, 0.0, tuple(sorted(terms.items())))

    def brought(self, key: Key) -> Key:
        """The sum that a key of what is brought elsewhere stands for; any other key as it is."""
        if key[0] != BROUGHT or len(key) != 4:
            return key
        if key not in self.sums:
            rests = self.relaxation.rests
            self.sums[key] = "s", rests.setdefault(self.arcs_of(key), len(rests)), 0
        return self.sums[key]

    def arcs_of(self, brought: Key) -> tuple[tuple[Key, float], ...]:
        """What is brought elsewhere, one by one, with its bytes."""
        _, v, direction, of_source = brought  # type: ignore[misc]  # a key of four
        flow, size = (self.problem.values[v].forward, self.problem.values[v].backward)[direction], self.life.sizes(v)
        arcs = enumerate(flow.arcs if flow is not None else ())
        return tuple((("e", v, direction, a), size[arc.src if of_source else arc.dst]) for a, arc in arcs if arc.times)

    def accumulated(self, grad: str, times: int) -> None:
        """The buffers of a gradient's `times` copies, in front of its reduction or on the way. Adding to one, the old and the new one live."""
        v = self.f.names.value_of[self.program.q.group[grad]]
        share = self.f.training.accumulated_share
        stored = self.f.training.master_bytes / share  # which is a share already
        value, size, made = self.problem.values[v], {n: share * b for n, b in self.life.sizes(v).items()}, self.life.grad_made(grad)
        for end in flow.supplies if (flow := value.backward or value.forward) else ():
            for s, n in enumerate(end.nodes):
                k = self.columns.of(("x", end.choice, s))
                self.always.plain.append((k, 0, self.life.end - 1, times * size[n]))
                self.add(("x", end.choice, s), size[n], made, made)
                self.add(("x", end.choice, s), -size[n], made + 1, self.life.end - 1, grad, grows=True, last_call=True)
        for a, arc in enumerate(value.backward.arcs if value.backward is not None else ()):
            if arc.way:  # it is added up where there is less of it
                key: Key = ("e", v, 1, a)
                less = share * self.f.names.accumulated_bytes(v, arc, value.name, stored) - size[arc.src]
                self.always.plain.append((self.columns.of(key), 0, self.life.end - 1, times * less))
                self.add(key, less, made, made)
                self.add(key, -less, made + 1, self.life.end - 1, grad, grows=True, last_call=True)

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
            if tensor in self.program.param_of:  # from where forward has read it last
                if users[0] and users[1]:
                    self.add(("y", v, k), size[policy.node], max(users[0]) + 1, max(users[1]), tensor)
                continue
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
            if any(arc.times for arc in flow.arcs):
                self.add((BROUGHT, v, direction, 0), 1.0, first, last)
            self.staying(v, tensor, first, last)
        if tensor in self.program.params_of_grad and value.backward is not None and any(arc.times for arc in value.backward.arcs):
            self.add((BROUGHT, v, 1, 1), 1.0, max([made, *users[1]]) + 1, self.life.windows.awaited(made))
        if value.backward is not None and tensor in self.life.written_by_recompute and users[1]:
            for i, nodes in self.life.remade[v]:
                for s, n in enumerate(nodes):
                    self.add(("r", i, s), size[n], min(users[1]), max(users[1]))

    def staying(self, v: int, tensor: str, first: int, last: int) -> None:
        """What the first micro-batch gathered of a parameter: there in all of them. first, last: where it is counted as brought."""
        times, share, size = self.program.q.tensor_times[tensor], self.f.training.accumulated_share, self.life.sizes(v)
        for a, arc in enumerate(self.problem.values[v].forward.arcs):
            if arc.stays:
                key: Key = ("e", v, 0, a)
                self.always.plain.append((self.columns.of(key), 0, self.life.end - 1, times * share * size[arc.dst]))
                self.add(key, -size[arc.dst], first, last)

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
        """What operators make on the way to their results: random ones where they are run call by call, heads without logits, rings and routed experts anywhere."""
        f = self.f
        which = {key: i for i, key in enumerate(f.names.reruns)}
        for op in self.program.graph.ops:
            if loss_head.is_loss_head(op) or experts.is_experts(op) or self.program.rules[op.name].alongside:
                rule, c = self.program.rules[op.name], f.clusters.of[self.program.q.rep[op.name]]
                for s, chosen in enumerate(f.clusters.clusters[c].members[self.program.q.rep[op.name]]):
                    split = dict(chosen.split)
                    n = local_sizes(rule, split, self.mesh)
                    if experts.is_experts(op):
                        nbytes = experts.workspace_bytes(op, rule, split, n, self.mesh, f.cost.imbalance)
                    elif rule.alongside:
                        nbytes = ring.workspace_bytes(op, rule, split, n, self.mesh)
                    else:
                        nbytes = loss_head.workspace_bytes(op, n, loss_head.in_triton(op, f.cost.cluster.device))
                    if nbytes:
                        self.add(("x", c, s), nbytes, self.life.position[op.name], self.life.position[op.name])
            elif f.cost.fused is None and self.program.rules[op.name].kind == "random" and op.outputs[0] is not None:
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
