"""Graph + mesh + costs -> the solver's Problem, and back from its Decision to names.

Time. An op's local work goes to the compute account of its direction. A redistribution of an activation blocks: its seconds go to compute and
to its link. Gathers of parameters and reductions of gradients are issued one layer early or awaited one layer late (`passes.prefetch`,
`passes.defer`): theirs go to the link alone, but for what the cluster's `contention` says that compute loses beside them.

Memory. A row for every position where something is made, forward and backward, and one for the optimizer step:
parameters and optimizer state as stored, what is kept for backward, what lives at that position, gradients finished so far.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost import Cost
from autopar.cost.memory import is_view
from autopar.formulate.again import Again
from autopar.formulate.away import fates
from autopar.formulate.clusters import clusters, narrowed
from autopar.formulate.memory import rows
from autopar.formulate.names import Names, moved
from autopar.formulate.quotient import Quotient
from autopar.formulate.setting import Setting, optimizer_s
from autopar.formulate.storage import storages
from autopar.formulate.times import Times
from autopar.graph import DTYPE_BYTES, MUST_RECOMPUTE, Op, Tensor
from autopar.mesh import Mesh
from autopar.placement import Placement
from autopar.rules.grammar import Rule
from autopar.rules.strategy import letter_at, right_of
from autopar.solver.problem import Account, Arc, Choice, End, Fate, Flow, Problem, Rerun, Value
from autopar.storage import batch_placements

RESOURCES = ("compute", "intra", "inter", "d2h", "h2d", "nvme_write", "nvme_read")
STAGES = ("forward", "backward", "optimizer")


def formulate(q: Quotient, rules: Mapping[str, Rule], mesh: Mesh, cost: Cost, setting: Setting) -> tuple[Problem, Names]:
    """rules: of every operator of `q.graph`."""
    return Formulator(q, rules, mesh, cost, setting).run()


@dataclass
class _Wire:
    """A value being assembled: its nodes, who touches it, and how many tensors of the program it is."""

    name: str
    nbytes: float
    count: int = 1
    nodes: dict[Placement, int] = field(default_factory=dict)
    supplies: dict[int, dict[End, None]] = field(default_factory=lambda: {0: {}, 1: {}})
    demands: dict[int, dict[End, None]] = field(default_factory=lambda: {0: {}, 1: {}})
    reads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    overlaps: bool = False
    reduces: bool = False  # a gradient, which goes to its parameter's storage
    fates: bool = False

    def node(self, p: Placement) -> int:
        return self.nodes.setdefault(p, len(self.nodes))


class Formulator:
    """only: of every choice the one strategy that is left (fates are then all that is decided)."""

    def __init__(
        self, q: Quotient, rules: Mapping[str, Rule], mesh: Mesh, cost: Cost, setting: Setting, only: Sequence[int] | None = None
    ) -> None:
        self.q, self.graph, self.rules, self.mesh, self.cost, self.setting, self.only = q, q.graph, rules, mesh, cost, setting, only
        graph = q.graph
        self.cl = clusters(q.classes, rules, mesh)
        if only is not None:
            self.cl = narrowed(self.cl, [(s,) for s in only[: len(self.cl.clusters)]])
        self.accounts = [Account(s, r) for s in range(len(STAGES)) for r in RESOURCES]
        self.wires: dict[str, _Wire] = {}
        self.choices: list[tuple[str, tuple[str, ...], list[dict[int, float]]]] = []
        self.names = Names(q, self.cl, mesh)
        self.known_sent: dict[tuple[Placement, Placement, float], list[tuple[str, float]] | None] = {}
        self.known: dict[Placement, Placement] = {}  # equal placements are one object: tables find it without comparing
        self.param_of = {t.name: n for n, t in graph.params.items()}
        self.params_of_grad: dict[str, list[str]] = defaultdict(list)
        for p, grad in graph.grads.items():
            self.params_of_grad[grad].append(p)
        self.renamed: dict[str, list[int]] = {}
        self.readers: dict[str, list[Op]] = defaultdict(list)
        for op in graph.ops:
            for t in dict.fromkeys(op.inputs):
                self.readers[t.name].append(op)
        self.trained = {q.tensor_rep[t.name] for n, t in graph.params.items() if n in setting.trainable}
        self.copy_of = {n: (s, k) for s, stack in enumerate(q.stacks) for k, names in enumerate(stack.forward) for n in names}
        self.by_name = {op.name: op for op in graph.ops}
        self.copies: dict[str, list[Op]] = defaultdict(list)  # class -> its operators
        for op in graph.ops:
            self.copies[q.rep[op.name]].append(op)
        self.again, self.time = Again(self), Times(self)

    def account(self, stage: int, resource: str) -> int:
        return stage * len(RESOURCES) + RESOURCES.index(resource)

    # ---- the whole ---------------------------------------------------------------------------------------------

    def run(self, room_s: float = math.inf, trim: Callable[[Problem], Problem] = lambda p: p) -> tuple[Problem, Names]:
        """room_s: strategies that take so much more than the fastest of their cluster are left out; trim: leaves out what else it will
        before memory rows are made."""
        g = self.graph
        self.cluster_choices()
        self.drop(room_s)
        self.fixed = self.choice("fixed", ("",), [{}])
        self.inputs_choice()
        for t in (*g.buffers.values(), *g.tangents, *self.constants()):
            self.supply(t, self.fixed, [Placement.of(t.shape)], both=True)
        self.storage_choices()
        reruns: list[tuple[Op, int]] = []
        for op in self.q.classes.ops:
            for copy in self.copies[op.name]:
                self.op(copy)
            if op.direction == "forward" and not self.is_chained(op):
                reruns += [(op, segment) for segment in sorted({self.q.segment[copy.name] for copy in self.copies[op.name]})]
        for name in dict.fromkeys([*g.outputs, *g.buffer_updates.values()]):
            if name:
                wire = self.wires[self.q.group[name]]
                wire.demands[0][End(self.fixed, (wire.node(Placement.of(g.tensors[name].shape)),))] = None
        self.names.value_of = {n: i for i, n in enumerate(self.wires)}
        made_again = [self.rerun(op, segment) for op, segment in reruns]
        values = [self.value(w) for w in self.wires.values()]
        names = list(self.wires)
        made_again = [self.remapped(r, names) for r in made_again]
        self.names.merged = frozenset(self.renamed)
        self.names.nodes = [list(w.nodes) for w in self.wires.values()]
        choices = tuple(Choice(n, labels, tuple(times)) for n, labels, times in self.choices)
        problem = Problem(STAGES, tuple(self.accounts), choices, tuple(values), tuple(made_again), (), self.setting.budget_bytes)
        return rows(self, trim(problem)) if self.setting.counts else trim(problem), self.names

    def drop(self, room_s: float) -> None:
        kept: list[list[int]] = []
        for i, (name, labels, times) in enumerate(self.choices):
            busy = [sum(t for a, t in spent.items() if self.accounts[a].resource == "compute") for spent in times]
            kept.append([s for s, t in enumerate(busy) if t - min(busy) <= room_s])
            self.choices[i] = (name, tuple(labels[s] for s in kept[i]), [times[s] for s in kept[i]])
        self.kept = kept
        if any(len(k) < c.size for k, c in zip(kept, self.cl.clusters, strict=True)):
            self.cl = self.names.clusters = narrowed(self.cl, kept)

    def all_strategies(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """`chosen`, of the strategies that were not dropped, as indices of all."""
        return tuple(self.kept[c][s] if c < len(self.kept) else s for c, s in enumerate(chosen))

    def choice(self, name: str, labels: Sequence[str], times: list[dict[int, float]]) -> int:
        self.choices.append((name, tuple(labels), times))
        return len(self.choices) - 1

    def constants(self) -> list[Tensor]:
        made = {t.name for op in self.graph.ops for t in op.outputs if t is not None}
        given = {t.name for t in (*self.graph.inputs, *self.graph.tangents, *self.graph.params.values(), *self.graph.buffers.values())}
        return [t for n, t in self.graph.tensors.items() if n not in made and n not in given]

    # ---- choices -------------------------------------------------------------------------------------------------

    def cluster_choices(self) -> None:
        by_name = {op.name: op for op in self.q.classes.ops}
        for c in self.cl.clusters:
            times: list[dict[int, float]] = [defaultdict(float) for _ in range(c.size)]
            for name in c.members:
                op = by_name[name]
                stages = [int(op.direction == "backward")]
                if op.direction == "forward" and self.is_chained(op) and self.is_read_in_backward(op.out.name):
                    stages.append(1)  # what follows from a parameter is made again
                for stage in stages:
                    for s, spent in enumerate(self.time.of(op, stage)):
                        for a, t in spent.items():
                            times[s][a] += t
            self.choice(c.leader, c.labels, [dict(t) for t in times])

    def is_read_in_backward(self, rep: str) -> bool:
        """Whether an operator of backward reads a tensor of this class, also through what is made of it."""
        for op in self.q.classes.ops:
            if any(t.name == rep for t in op.inputs):
                if op.direction == "backward":
                    return True
                if self.is_chained(op) and self.is_read_in_backward(op.out.name):
                    return True
        return False

    def inputs_choice(self) -> None:
        parents = [p for p, n in self.mesh.parents.items() if n > 1]
        options: dict[tuple[Placement, ...], tuple[str, ...]] = {}
        for mask in reversed(range(2 ** len(parents))):
            data = tuple(c for i, p in enumerate(parents) if mask >> i & 1 for c in self.mesh.children(p) if self.mesh.axis_size(c) > 1)
            options[batch_placements(self.graph.inputs, data, self.mesh)] = data  # the fewest axes that split the batch so
        if self.only is not None:
            options = dict([list(options.items())[self.only[len(self.choices)]]])
        c = self.choice("inputs", [" ".join(d) or "R" for d in options.values()], [{} for _ in options])
        self.names.inputs, self.names.input_options = c, list(options.values())
        for i, t in enumerate(self.graph.inputs):
            self.supply(t, c, [p[i] for p in options], both=True)

    def storage_choices(self) -> None:
        for name, t in self.q.classes.params.items():
            options = storages(t, self.mesh)
            if self.only is not None:
                options = [options[self.only[len(self.choices)]]]
            a = self.account(2, "compute")
            trained = t.name in self.trained
            times = []
            for o in options:
                mine = math.prod(o.placement.local_shape(self.mesh))
                times.append({a: self.q.count(t.name) * optimizer_s(self.cost, self.setting, mine)} if trained else {})
            c = self.choice(f"storage of {name}", [o.label for o in options], times)
            self.names.storage[t.name] = (c, options)
            wire = self.wire(t)
            wire.overlaps = True
            end = End(c, tuple(wire.node(o.placement) for o in options))
            wire.supplies[0][end] = wire.supplies[1][end] = None

    # ---- wires ---------------------------------------------------------------------------------------------------

    def wire(self, t: Tensor) -> _Wire:
        name = self.q.group[t.name]
        if name not in self.wires:
            self.wires[name] = _Wire(name, t.nbytes, self.q.count(name))
        return self.wires[name]

    def supply(self, t: Tensor, choice: int, places: Sequence[Placement], both: bool = False) -> None:
        wire = self.wire(t)
        end = End(choice, self.nodes(wire, places))
        wire.supplies[0][end] = None
        if both:
            wire.supplies[1][end] = None

    def is_chained(self, op: Op) -> bool:
        return op.outputs[0] is not None and self.q.tensor_rep[op.outputs[0].name] in self.cl.chain

    def op(self, op: Op) -> None:
        if self.is_chained(op):
            return
        name = self.q.rep[op.name]
        c = self.cl.of[name]
        direction = int(op.direction == "backward")
        for i, t in enumerate(op.inputs):
            self.demand(t, c, [w[i] for w in self.cl.want[name]], direction)
        for i, t in enumerate(op.outputs):
            if t is None:
                continue
            places = [m[i] for m in self.cl.made[name]]
            wire = self.wire(t)
            wire.supplies[direction][End(c, self.nodes(wire, [p for p in places if p is not None]))] = None
            # A view is made again for nothing from what it is a view of; that is what is kept. What must be made again is not kept, if it can be.
            gone = op.tag(i) == MUST_RECOMPUTE and self.again.makes_again(op, i)
            wire.fates = direction == 0 and not is_view(op, self.rules[op.name]) and not gone
            for p in self.params_of_grad.get(t.name, ()):
                choice, options = self.names.storage[self.q.group[self.graph.params[p].name]]
                wire.overlaps = wire.reduces = True
                wire.nbytes = t.numel * self.grad_bytes(p)
                wire.demands[direction][End(choice, tuple(wire.node(o.placement) for o in options))] = None

    def grad_bytes(self, param: str) -> int:
        dtype = self.setting.reduce or self.graph.params[param].dtype
        return DTYPE_BYTES[dtype]

    def demand(self, t: Tensor, choice: int, places: Sequence[Placement], direction: int) -> None:
        """What a chain of views makes of a parameter is asked of the parameter itself."""
        rep = self.q.tensor_rep[t.name]
        if rep in self.cl.chain and self.cl.chain[rep][1]:
            base, ops = self.cl.chain[rep]
            for op in reversed(ops):
                # Each link may follow another reader (a weight that two clusters multiply with): its own placements are those of its own cluster.
                if self.cl.of[op.name] == choice and [m[0] for m in self.cl.made[op.name]] == list(places):
                    places = [w[0] for w in self.cl.want[op.name]]
                else:
                    places = [self.back(op, p) for p in places]
            t = self.graph.tensors[base]
        wire = self.wire(t)
        wire.demands[direction][End(choice, self.nodes(wire, places))] = None

    def nodes(self, wire: _Wire, places: Sequence[Placement]) -> tuple[int, ...]:
        return tuple(wire.node(self.known.setdefault(p, p)) for p in places)

    def back(self, op: Op, p: Placement) -> Placement:
        """What `op`, of one operand, reads to make its output at `p`: the digits that its loops carry over, all else whole."""
        rule, where = self.rules[op.name], {}
        outs = rule.outputs[0]
        assert outs is not None
        for axis, at in p.where.items():
            found = letter_at(outs, at, self.mesh.axis_size(axis), rule)
            if found is not None:
                x, stride = found
                d = next((d for d, group in enumerate(rule.inputs[0]) if x in group), None)
                if d is not None:
                    where[axis] = (d, stride * right_of(rule.inputs[0][d], x, rule))
        return Placement.of(op.inputs[0].shape, where)

    # ---- values --------------------------------------------------------------------------------------------------

    def rerun(self, op: Op, segment: int) -> Rerun:
        """All operators of a class and segment run again, or none. Of a dropout whose mask alone is needed, no operand is."""
        c = self.cl.of[op.name]
        reads: dict[tuple[int, tuple[int, ...]], None] = {}
        makes: dict[tuple[int, tuple[int, ...]], None] = {}
        for copy in self.copies[op.name]:
            if self.q.segment[copy.name] != segment:
                continue
            for i, t in enumerate(() if self.again.needs_mask_alone(copy) else copy.inputs):
                if self.cl.chain.get(self.q.tensor_rep[t.name], ("", ()))[1]:
                    continue  # parameters are at hand in backward; the chain is made again with its reader
                for wire in {w.name: w for w in map(self.wire, (t, *self.again.twins(copy, t)))}.values():
                    nodes = tuple(wire.node(w[i]) for w in self.cl.want[op.name])
                    if (self.names.value_of[wire.name], nodes) not in reads:
                        wire.reads.append((len(self.names.reruns), nodes))
                        reads[self.names.value_of[wire.name], nodes] = None
            for i, t in enumerate(copy.outputs):
                if t is not None and self.again.makes_again(copy, i):
                    wire = self.wire(t)
                    made = tuple(wire.node(m[i]) for m in self.cl.made[op.name])  # type: ignore[arg-type]
                    makes[self.names.value_of[wire.name], made] = None
        self.names.reruns.append((op.name, segment))
        times, least = self.time.again(op, segment)
        return Rerun(op.name, c, times, tuple(reads), tuple(makes), loose_times=least)

    def value(self, w: _Wire) -> Value:
        self.merge(w)
        demanded = {d: {n for end in w.demands[d] for n in end.nodes} for d in (0, 1)}
        demanded[1] |= {n for _, nodes in w.reads for n in nodes}
        supplied = {d: {n for end in w.supplies[d] for n in end.nodes} for d in (0, 1)}
        places = list(w.nodes)
        ways: tuple[Fate, ...] = ()
        if demanded[1] and not w.fates:
            supplied[1] |= supplied[0]  # a view, made again where it was made
        if w.fates and demanded[1]:
            keepable = sorted(n for n in supplied[0] | demanded[0] if not places[n].partial or n in demanded[1])
            ways = fates(self, {n: w.nbytes * places[n].share(self.mesh) for n in keepable}, w.count)
            supplied[1] |= set(keepable) | supplied[0]
        forward = Flow(self.arcs(w, supplied[0], demanded[0] | {way.node for way in ways}, 0), tuple(w.supplies[0]), tuple(w.demands[0]))
        backward = None
        if demanded[1]:
            backward = Flow(self.arcs(w, supplied[1], demanded[1], 1), tuple(w.supplies[1]), tuple(w.demands[1]))
        return Value(w.name, tuple(map(str, places)), forward, backward, ways)

    def merge(self, w: _Wire) -> None:
        """A value that one cluster makes and reads in one placement moves nowhere: only its size matters, so nodes of one size become one."""
        ends = [e for d in (0, 1) for e in (*w.supplies[d], *w.demands[d])]
        maps = {(e.choice, e.nodes) for e in ends} | {(self.cl.of[self.names.reruns[i][0]], nodes) for i, nodes in w.reads}
        if len(maps) != 1 or any(p.partial for p in w.nodes):
            return
        places = list(w.nodes)
        first: dict[int, Placement] = {}
        for p in places:
            first.setdefault(math.prod(p.local_shape(self.mesh)), p)
        kept = list(dict.fromkeys(first.values()))
        self.renamed[w.name] = new = [kept.index(first[math.prod(p.local_shape(self.mesh))]) for p in places]
        w.nodes = {p: i for i, p in enumerate(kept)}

        def rename(nodes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(new[n] for n in nodes)

        for d in (0, 1):
            w.supplies[d] = {End(e.choice, rename(e.nodes)): None for e in w.supplies[d]}
            w.demands[d] = {End(e.choice, rename(e.nodes)): None for e in w.demands[d]}
        w.reads = [(i, rename(nodes)) for i, nodes in w.reads]

    def remapped(self, r: Rerun, names: Sequence[str]) -> Rerun:
        """`r` on the nodes that merging left."""

        def fix(pairs: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
            return tuple((v, tuple(self.renamed[names[v]][n] for n in nodes) if names[v] in self.renamed else nodes) for v, nodes in pairs)

        return replace(r, reads=fix(r.reads), makes=fix(r.makes))

    def arcs(self, w: _Wire, have: set[int], want: set[int], stage: int) -> tuple[Arc, ...]:
        places = [self.known.setdefault(p, p) for p in w.nodes]
        itemsize = self.names.itemsize[w.name] = w.nbytes / max(1, math.prod(places[0].shape)) if places else 0.0
        out = []
        for src in sorted(have):
            for dst in sorted(want):
                if src != dst:
                    sent = self.sent(places[src], places[dst], itemsize)
                    if sent is not None:
                        out.append(Arc(src, dst, self.times(sent, w, stage)))
        return tuple(out)

    def sent(self, src: Placement, dst: Placement, itemsize: float) -> list[tuple[str, float]] | None:
        """The link and the seconds of every collective from `src` to `dst`."""
        key = (src, dst, itemsize)
        if key not in self.known_sent:
            steps = moved(src, dst, self.mesh)
            costs = (self.cost.collective(s.kind, s.axes, s.wire_bytes(self.mesh, 1) * itemsize) for s in steps or () if s.kind != "slice")
            self.known_sent[key] = None if steps is None else [(c.link, c.seconds) for c in costs]
        return self.known_sent[key]

    def times(self, sent: Sequence[tuple[str, float]], w: _Wire, stage: int) -> dict[int, float]:
        out: dict[int, float] = {}
        often = w.count / (self.setting.micro_batches if w.reduces else 1)
        waits = self.cost.cluster.contention if w.overlaps else 1.0
        for link, seconds in sent:
            for resource, share in ((link, 1.0), ("compute", waits)):
                if share:
                    a = self.account(stage, resource)
                    out[a] = out.get(a, 0.0) + often * seconds * share
        return out
