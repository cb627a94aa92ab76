"""Values being assembled: who supplies them and who demands them, at which placements, and what moving them from one to another takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cost import Cost
from autopar.cost.buckets import Company, shared
from autopar.graph.graph import Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.least_shape import least_shape
from autopar.planner.formulation.names import Names, hops, ways
from autopar.planner.formulation.program import Program
from autopar.planner.formulation.together import Together
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.formulation.where_kept import policies
from autopar.rules.strategy import letter_at, right_of
from autopar.solver.problem import Arc, End, Flow, Policy, Rerun, Value
from autopar.solver.watch import check

Sent = list[tuple[int, str, float]]


@dataclass
class Wire:
    """A value being assembled: its nodes, who touches it, and how many tensors of the program it is."""

    name: str
    nbytes: float
    count: int = 1
    nodes: dict[Placement, int] = field(default_factory=dict)
    supplies: dict[int, dict[End, None]] = field(default_factory=lambda: {0: {}, 1: {}})
    demands: dict[int, dict[End, None]] = field(default_factory=lambda: {0: {}, 1: {}})
    reads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    reduces: bool = False  # a gradient, which goes to its parameter's storage
    gathered: bool = False  # a parameter
    policies: bool = False
    companies: dict[int, tuple[Company, ...]] = field(
        default_factory=dict
    )  # by stage, what its collectives may be joined with (`together`)

    @property
    def overlaps(self) -> bool:
        return self.reduces or self.gathered

    def node(self, p: Placement) -> int:
        return self.nodes.setdefault(p, len(self.nodes))


class Wires:
    """All values of a program. names: told what the arcs' tensors are. is_decided: of every choice one strategy is left; then nothing is supplied where only another would,
    and what a reader has brought may be taken further."""

    def __init__(
        self, program: Program, clusters: Clusters, mesh: Mesh, cost: Cost, training: TrainingConfig, names: Names, is_decided: bool = False
    ) -> None:
        self.is_decided = is_decided
        self.program, self.clusters, self.mesh, self.cost, self.training, self.names = program, clusters, mesh, cost, training, names
        self.all: dict[str, Wire] = {}
        self.renamed: dict[str, list[int]] = {}  # by value of which nodes were merged: what each became
        self.known_sent: dict[tuple[Placement, Placement, float, tuple[Company, ...]], Sent | None] = {}
        self.together = Together(program, clusters)
        self.same: dict[Placement, Placement] = {}  # equal placements are one object: tables find it without comparing

    # ---- who supplies and who demands -------------------------------------------------------------------------------

    def wire(self, t: Tensor) -> Wire:
        name = self.program.q.group[t.name]
        if name not in self.all:
            self.all[name] = Wire(name, t.nbytes, self.program.q.count(name))
        return self.all[name]

    def supply(self, t: Tensor, choice: int, places: Sequence[Placement], both: bool = False) -> None:
        wire = self.wire(t)
        end = End(choice, self.nodes(wire, places))
        wire.supplies[0][end] = None
        if both:
            wire.supplies[1][end] = None

    def demand(self, t: Tensor, choice: int, places: Sequence[Placement], direction: int) -> None:
        """What a chain of views makes of a parameter is asked of the parameter itself."""
        rep = self.program.q.tensor_rep[t.name]
        if rep in self.clusters.chain and self.clusters.chain[rep][1]:
            base, ops = self.clusters.chain[rep]
            for op in reversed(ops):
                # Each link may follow another reader (a weight that two clusters multiply with): its own placements are those of its own cluster.
                if self.clusters.of[op.name] == choice and [m[0] for m in self.clusters.made[op.name]] == list(places):
                    places = [w[0] for w in self.clusters.want[op.name]]
                else:
                    places = [self.back(op, p) for p in places]
            t = self.program.graph.tensors[base]
        wire = self.wire(t)
        wire.demands[direction][End(choice, self.nodes(wire, places))] = None

    def nodes(self, wire: Wire, places: Sequence[Placement]) -> tuple[int, ...]:
        return tuple(wire.node(self.same.setdefault(p, p)) for p in places)

    def back(self, op: Op, p: Placement) -> Placement:
        """What `op`, of one operand, reads to make its output at `p`: the digits that its loops carry over, all else whole."""
        rule, where = self.program.rules[op.name], {}
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

    # ---- as the program has them --------------------------------------------------------------------------------------

    def value(self, w: Wire) -> Value:
        check()
        self.merge(w)
        demanded = {d: {n for end in w.demands[d] for n in end.nodes} for d in (0, 1)}
        demanded[1] |= {n for _, nodes in w.reads for n in nodes}
        supplied = {d: {n for end in w.supplies[d] for n in end.nodes} for d in (0, 1)}
        places = list(w.nodes)
        ways: tuple[Policy, ...] = ()
        if demanded[1] and not w.policies:
            supplied[1] |= supplied[0]  # a view, made again where it was made
        if w.policies and demanded[1]:
            keepable = sorted(n for n in supplied[0] | demanded[0] if not places[n].partial or n in demanded[1])
            ways = policies(self.program, self.training, self.cost, w.name, {n: w.nbytes * places[n].share(self.mesh) for n in keepable})
            supplied[1] |= set(keepable) | supplied[0]
        if w.gathered and demanded[1] and self.training.keeps_gathered:
            # What forward gathered may stay until backward has read it.
            ways = tuple(Policy(n) for n in sorted(demanded[0]))
            supplied[1] |= demanded[0]
        if self.is_decided:
            supplied = {d: supplied[d] | demanded[d] for d in (0, 1)}
        forward = Flow(self.arcs(w, supplied[0], demanded[0] | {way.node for way in ways}, 0), tuple(w.supplies[0]), tuple(w.demands[0]))
        backward = None
        if demanded[1]:
            backward = Flow(self.arcs(w, supplied[1], demanded[1], 1), tuple(w.supplies[1]), tuple(w.demands[1]))
        return Value(w.name, tuple(map(str, places)), forward, backward, ways)

    def merge(self, w: Wire) -> None:
        """A value that one cluster makes and reads in one placement moves nowhere: only its size matters, so nodes of one size become one."""
        ends = [e for d in (0, 1) for e in (*w.supplies[d], *w.demands[d])]
        maps = {(e.choice, e.nodes) for e in ends} | {(self.clusters.of[self.names.reruns[i][0]], nodes) for i, nodes in w.reads}
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

    def arcs(self, w: Wire, have: set[int], want: set[int], stage: int) -> tuple[Arc, ...]:
        places = list(w.nodes)
        itemsize = self.names.itemsize[w.name] = w.nbytes / max(1, math.prod(places[0].shape)) if places else 0.0
        small, elements = least_shape(places)
        small = [self.same.setdefault(p, p) for p in small]
        found = self.together.companies(w.name, stage, w.reduces) if self.training.joins and w.overlaps else ()
        w.companies[stage] = found
        out = []
        for src in sorted(have):
            for dst in sorted(want):
                if src != dst:
                    sent = self.sent(small[src], small[dst], itemsize * elements, found)
                    if sent is not None:
                        out.append(self.arc(src, dst, sent, w, stage))
                        if w.gathered and stage == 0 and sent and self.training.keeps_gathered and self.training.in_a_row > 1:
                            once = {a: t / self.training.in_a_row for a, t in out[-1].times.items()}
                            out.append(Arc(src, dst, once, stays=True, once=once))
                        if w.reduces and stage == 1 and self.training.micro_batches > 1:
                            out += self.early(w, out[-1], places, sent)
        return tuple(out)

    def early(self, w: Wire, arc: Arc, places: Sequence[Placement], sent: Sent | None = None, often: int = 1) -> list[Arc]:
        """Beside `arc`, which brings a gradient to its parameter: arcs of which the first steps are taken in every micro-batch, and the sum is held behind them.
        sent: what it sends, where that is known; often: of how many micro-batches this is one, at least."""
        if len(w.demands[1]) != 1:  # else one sum would have to be in two places
            return []
        src, dst, itemsize = places[arc.src], places[arc.dst], self.names.itemsize[w.name]
        found = ways(self.names.stops(src, dst), itemsize, self.training.master_bytes, self.mesh)
        if sent is None:
            sent = self.sent(src, dst, itemsize, w.companies[1]) or []
        return [self.arc(arc.src, arc.dst, sent, w, 1, way, often) for way in found]

    def sent(self, src: Placement, dst: Placement, itemsize: float, companies: tuple[Company, ...] = ()) -> Sent | None:
        """Of every collective from `src` to `dst` its number among the steps, from 1, its link and its seconds. companies: what they may be joined with."""
        key = (src, dst, itemsize, companies)
        if key not in self.known_sent:
            found = hops(src, dst, self.mesh)
            costs = ((h.number, shared(self.cost, h.kind, h.axes, h.elements * itemsize, companies)) for h in found or ())
            self.known_sent[key] = None if found is None else [(k, c.link, c.seconds) for k, c in costs]
        return self.known_sent[key]

    def arc(self, src: int, dst: int, sent: Sent, w: Wire, stage: int, way: int = 0, early: int = 1) -> Arc:
        """way: so many of the first steps of a gradient's reduction are taken `early` times in a micro-batch, the others once in all."""
        times: dict[int, float] = {}
        once: dict[int, float] = {}
        waits = self.cost.cluster.contention if w.overlaps else 1.0
        for k, link, seconds in sent:
            is_once = k > way and w.reduces and self.training.micro_batches > 1
            often = w.count * (early if k <= way else 1 / self.training.micro_batches if w.reduces else 1)
            for resource, share in ((link, 1.0), ("compute", waits)):
                if share:
                    a = account(stage, resource)
                    for paid in (times, once) if is_once else (times,):
                        paid[a] = paid.get(a, 0.0) + often * seconds * share
        return Arc(src, dst, times, way, once=once)
