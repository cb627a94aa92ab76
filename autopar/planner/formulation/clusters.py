"""Ops whose choice follows another's are one cluster: the integer program chooses once for all of them.

- A cheap op follows the operand it mostly reads, if it can run on every placement that operand may have, without communication.
- The products of a backward follow their forward product: the same loops, split the same way.
- Products of one operand with weights of one shape (gate and up, key and value) are alike: the second follows the first.
- A sum of gradients decides where a Partial is reduced; one that goes on with such a sum follows it; one of which no operand is
  ever Partial is a cheap op like others.
- A row product's bias follows the residual that it goes into: behind a Partial product there would be nothing else than to add it whole.
- Views and casts of parameters follow who uses them; so does what is made of constants alone (masks, tables of positions), if all who use
  it want it alike: any part of it can be made anywhere.
All else leads a cluster of its own, with every strategy its rule allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.planner.formulation.causal_balance import balancing_cuts, in_rings
from autopar.planner.formulation.composite_dims import letter_cuts
from autopar.planner.formulation.matching_loops import Loops
from autopar.planner.formulation.strategies import OpStrategy, strategies
from autopar.rules.grammar import Rule
from autopar.rules.strategy import follows, is_legal, letter_at, placements

DEPTH = 6  # how many cheap ops a reduction is looked for


@dataclass
class Cluster:
    """leader: the op that names it; size: how many strategies; members: op -> its strategy under each of the cluster's."""

    leader: str
    size: int
    labels: tuple[str, ...]
    members: dict[str, list[OpStrategy]] = field(default_factory=dict)


@dataclass(frozen=True)
class Clusters:
    """of: op -> index of its cluster. want, made: op -> per strategy, placements of operands and outputs.

    chain: tensors that follow from one parameter alone -> (the parameter's tensor, ops from it). maker: tensor -> (op, which output).
    """

    clusters: list[Cluster]
    of: dict[str, int]
    want: dict[str, list[tuple[Placement, ...]]]
    made: dict[str, list[tuple[Placement | None, ...]]]
    chain: dict[str, tuple[str, tuple[Op, ...]]]
    maker: dict[str, tuple[str, int]]


def clusters(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> Clusters:
    """graph: one operator per class; an operator may read what is made further on (by the copy before it)."""
    return _Builder(graph, rules, mesh).run()


def narrowed(c: Clusters, only: Sequence[Sequence[int]]) -> Clusters:
    """`c` with strategies `only[i]` of cluster i alone."""
    fewer = [
        Cluster(k.leader, len(kept), tuple(k.labels[s] for s in kept), {op: [chosen[s] for s in kept] for op, chosen in k.members.items()})
        for k, kept in zip(c.clusters, only, strict=True)
    ]
    want = {op: [places[s] for s in only[c.of[op]]] for op, places in c.want.items()}
    made = {op: [places[s] for s in only[c.of[op]]] for op, places in c.made.items()}
    return Clusters(fewer, c.of, want, made, c.chain, c.maker)


class _Builder:
    def __init__(self, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> None:
        self.graph, self.rules, self.mesh = graph, rules, mesh
        self.cuts = letter_cuts(graph, rules, balancing_cuts(graph, rules, mesh))
        self.in_rings = in_rings(graph, rules, mesh)
        self.maker = {t.name: (op, i) for op in graph.ops for i, t in enumerate(op.outputs) if t is not None}
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops:
            for t in dict.fromkeys(op.inputs):
                self.readers.setdefault(t.name, []).append(op)
        self.chain: dict[str, tuple[str, tuple[Op, ...]]] = {t.name: (t.name, ()) for t in graph.params.values()}
        for op in graph.ops:
            if self.is_chain(op):
                param, ops = self.chain[op.inputs[0].name]
                self.chain[op.out.name] = (param, (*ops, op))
        self.loops = Loops(graph, rules, self.maker, self.readers, self.chain)
        self.clusters: list[Cluster] = []
        self.of: dict[str, int] = {}
        self.want: dict[str, list[tuple[Placement, ...]]] = {}
        self.made: dict[str, list[tuple[Placement | None, ...]]] = {}
        self.constant: set[str] = set()
        self.known: dict[Any, dict[OpStrategy, tuple[tuple[Placement, ...], tuple[Placement | None, ...]]]] = {}
        self.given = {n.split(".")[0] for n in (*graph.outputs, *graph.grads.values(), *graph.buffer_updates.values())}
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.forward_heavy = [op for op in graph.ops if op.direction == "forward" and rules[op.name].is_heavy]

    def run(self) -> Clusters:
        waiting = [ops[-1] for _, ops in self.chain.values() if ops]
        free = self.made_of_constants()
        self.constant = {op.name for op in free}
        self.for_all = self.made_for_all()
        chained = {op.name for op in waiting} | self.constant
        for op in self.graph.ops:
            if op.name not in chained and op.direction == "forward" and self.is_carried(op):
                self.lead(op)
        early: list[Op] = []  # they read only what is made further on, by the copy before theirs in backward
        for op in self.graph.ops:
            if op.name not in chained and op.name not in self.of:
                if op.direction == "backward" and self.rules[op.name].kind in ("cheap", "view") and self.reads_ahead(op):
                    early.append(op)
                else:
                    self.place(op)
        for op in early:
            self.place(op)
        for op in reversed(self.graph.ops):
            if op.name not in chained and (self.rules[op.name].kind == "view" or self.is_copy_of_more(op) or self.is_bias_of_stream(op)):
                self.move_to_reader(op)
        for op in reversed(free):
            self.follow_all_readers(op)
        for op in reversed(waiting):
            self.follow_reader(op)
        return Clusters(self.clusters, self.of, self.want, self.made, self.chain,
                        {t: (op.name, i) for t, (op, i) in self.maker.items()})  # fmt: skip

    def made_of_constants(self) -> list[Op]:
        known = {t.name for t in self.graph.buffers.values()}
        found = []
        for op in self.graph.ops:
            rule = self.rules[op.name]
            cheap = rule.kind in ("cheap", "view") and not rule.is_fallback and len(op.outputs) == 1 and op.outputs[0] is not None
            if cheap and all(t.name in known for t in op.inputs) and op.out.name not in self.chain:
                known.add(op.out.name)
                found.append(op)
        return found

    def made_for_all(self) -> dict[str, Op]:
        """Forward's heavy operators that read no input: what they make (learned positions) is the same for every sample, and every rank may make it."""
        known = {t.name for t in self.graph.params.values()} | {t.name for t in self.graph.buffers.values()}
        for op in self.graph.ops:
            if op.direction == "forward" and all(t.name in known for t in op.inputs) and self.rules[op.name].kind != "random":
                known |= {t.name for t in op.outputs if t is not None}
        return {op.name: op for op in self.forward_heavy if all(t.name in known for t in op.inputs)}

    def is_carried(self, op: Op) -> bool:
        """Whether an operator further up reads what `op` makes: the next copy of a layer. It leads, so that they can follow it."""
        at = self.position[op.name]
        return any(self.position[r.name] <= at for t in op.outputs if t is not None for r in self.readers.get(t.name, ()))

    def reads_ahead(self, op: Op) -> bool:
        makers = [self.maker[t.name][0].name for t in op.inputs if t.name in self.maker]
        return bool(makers) and all(m not in self.of and m not in self.constant for m in makers)

    def is_chain(self, op: Op) -> bool:
        rule = self.rules[op.name]
        return (
            len(op.inputs) == 1 and op.inputs[0].name in self.chain and len(op.outputs) == 1 and op.outputs[0] is not None
            and rule.kind in ("view", "cheap") and not rule.is_fallback and not any(f.reduce for f in rule.factors.values())
        )  # fmt: skip

    # ---- members ---------------------------------------------------------------------------------------------

    def place(self, op: Op) -> None:
        rule = self.rules[op.name]
        if rule.is_heavy or rule.kind in ("loss", "norm"):
            if op.direction == "backward" and (
                self.tie(op) or (not rule.is_heavy and any(self.follow(op, i) for i in self.leaders_of(op)))
            ):
                return
            if op.direction == "forward" and self.is_like(op):
                return
            self.lead(op)
            return
        if not self.joins_streams(op) or self.goes_on(op):
            if op.direction == "backward" and self.follow_twin(op):
                return
            for i in self.leaders_of(op):
                if self.follow(op, i):
                    return
        self.lead(op)

    def joins_streams(self, op: Op) -> bool:
        """A sum of tensors of different clusters (a residual, a gradient): where a Partial is reduced is decided here."""
        rule = self.rules[op.name]
        made = {
            self.of.get(self.maker[t.name][0].name)
            for t in op.inputs
            if t.name in self.maker and t.numel > 1 and t.shape == op.inputs[0].shape
        }
        joins = len(op.inputs) > 1 and frozenset(range(len(op.inputs))) in rule.linear and len(made - {None}) > 1
        if not joins or op.direction == "forward":
            return joins
        return any(self.is_partial(t) for t in op.inputs)

    def goes_on(self, op: Op) -> bool:
        """Whether `op` adds to a sum of gradients that is decided already."""
        return op.direction == "backward" and any(self.is_sum(self.maker[t.name][0]) for t in op.inputs if t.name in self.maker)

    def is_sum(self, op: Op) -> bool:
        rule = self.rules[op.name]
        return op.direction == "backward" and len(op.inputs) > 1 and frozenset(range(len(op.inputs))) in rule.linear and op.name in self.of

    def is_partial(self, t: Tensor) -> bool:
        """Whether some strategy leaves `t` Partial."""
        if t.name not in self.maker or self.maker[t.name][0].name not in self.of:
            return False
        maker, i = self.maker[t.name]
        return any((p := m[i]) is not None and p.partial for m in self.made[maker.name])

    def is_like(self, op: Op) -> bool:
        """Follows a product of the same operand with a weight of the same shape."""
        rule = self.rules[op.name]
        if rule.kind != "matmul":
            return False
        mine = [(self.loops.base(t.name), t.shape) for t in op.inputs]
        for other in self.forward_heavy:
            if other.name not in self.of or other.target != op.target or len(other.inputs) != len(op.inputs):
                continue
            theirs = [(self.loops.base(t.name), t.shape) for t in other.inputs]
            params = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a[0] != b[0]]
            if [shape for _, shape in mine] == [shape for _, shape in theirs] and all(
                t.name in self.chain for i in params for t in (op.inputs[i], other.inputs[i])
            ):
                return self.join(op, self.of[other.name], list(self.clusters[self.of[other.name]].members[other.name]))
        return False

    def leaders_of(self, op: Op) -> list[int]:
        """Operands to follow, best first: in backward what forward saved (of the result's shape, else a row statistic), then the largest."""
        seen: list[tuple[int, int, int]] = []
        for i, t in enumerate(op.inputs):
            if t.name in self.maker and self.maker[t.name][0].name in self.of:
                saved = op.direction == "backward" and self.maker[t.name][0].direction == "forward"
                shapes = [o.shape for o in op.outputs if o is not None]
                fit = 2
                if saved and t.shape in shapes:
                    fit = 0
                elif saved and t.numel > 1 and any(t.shape == (*o[:-1], 1) for o in shapes):
                    fit = 1
                seen.append((fit, -t.numel, i))
        return [i for _, _, i in sorted(seen)]

    def follow_twin(self, op: Op) -> bool:
        """A gradient that may be Partial, times a parameter: where forward multiplied by that parameter, so is it here."""
        for i, t in enumerate(op.inputs):
            if self.is_partial(t) and frozenset(range(len(op.inputs))) not in self.rules[op.name].linear:
                for w in op.inputs:
                    for f in self.readers.get(w.name, ()) if w.name in self.chain else ():
                        if f.direction == "forward" and f.name in self.of and f.outputs[0] is not None and f.out.shape == t.shape:
                            return self.follow(op, i, (f, 0))
        return False

    def follow(self, op: Op, index: int, source: tuple[Op, int] | None = None) -> bool:
        """Places `op` as operand `index` is made (or as the output `source` is)."""
        maker, output = source or self.maker[op.inputs[index].name]
        cluster = self.of[maker.name]
        out = []
        for s in range(self.clusters[cluster].size):
            p = self.made[maker.name][s][output]
            found = None if p is None else self.on(op, index, p if self.may_go_on(op, index, p, cluster, s) else p.without_partial())
            if found is None:
                return False
            out.append(found)
        return self.join(op, cluster, out)

    def may_go_on(self, op: Op, index: int, p: Placement, cluster: int, s: int) -> bool:
        """Whether the operands besides `index` can be Partial as that one is at `p`, under strategy `s` of `cluster`: nothing is made Partial that was whole
        (a gradient that comes from outside)."""
        for t in op.inputs:
            if not p.partial or t.name == op.inputs[index].name:
                continue
            if t.name not in self.maker or self.maker[t.name][0].name in self.constant:
                return False
            maker = self.maker[t.name]
            if maker[0].name not in self.of:  # of a copy further on: it will follow
                continue
            made = self.made[maker[0].name]
            places = [made[s]] if self.of[maker[0].name] == cluster else made
            if not any((q := m[maker[1]]) is not None and q.partial == p.partial for m in places):
                return False
        return True

    def on(self, op: Op, index: int, p: Placement) -> OpStrategy | None:
        """How `op` runs on operand `index` placed at `p`, None if it cannot."""
        rule = self.rules[op.name]
        split: dict[str, tuple[str, int]] = {}
        for axis, at in p.where.items():
            found = letter_at(rule.inputs[index], at, self.mesh.axis_size(axis), rule)
            if found is None or not follows(rule, found[0]):
                return None
            if (
                rule.kind != "view"
                and op.direction == "forward"
                and any(o is not None and not any(found[0] in d for d in o) for o in rule.outputs)
            ):
                return None  # a reduction of what forward goes on with: its own decision
            split[axis] = found
        everything = frozenset(range(len(op.inputs)))
        passes = everything in rule.linear and all(r == "sum" for _, r in p.partial) and (len(op.inputs) == 1 or op.direction == "backward")
        return OpStrategy.of(split, {a: everything for a, _ in p.partial} if passes else None)

    def join(self, op: Op, cluster: int, chosen: list[OpStrategy]) -> bool:
        rule = self.rules[op.name]
        if not all(is_legal(rule, dict(s.split), self.mesh) for s in set(chosen)):
            return False
        want, made = self.put(op, chosen)
        self.of[op.name] = cluster
        self.clusters[cluster].members[op.name] = chosen
        self.want[op.name], self.made[op.name] = want, made
        return True

    def put(self, op: Op, chosen: list[OpStrategy]) -> tuple[list[tuple[Placement, ...]], list[tuple[Placement | None, ...]]]:
        rule = self.rules[op.name]
        ins = tuple(t.shape for t in op.inputs)
        outs = tuple(None if t is None else t.shape for t in op.outputs)
        like = (rule.inputs, rule.outputs, tuple((x, f.size, f.reduce) for x, f in rule.factors.items()), ins, outs)
        known = self.known.setdefault(like, {})  # by what operators look like: a layer has dozens of products of one shape with another
        for s in dict.fromkeys(chosen):
            if s not in known:
                known[s] = placements(rule, dict(s.split), ins, outs, dict(s.partial))
        return [known[s][0] for s in chosen], [known[s][1] for s in chosen]

    def lead(self, op: Op) -> None:
        rule = self.rules[op.name]
        passes = frozenset({0}) if self.is_gradient_for_all(op) else frozenset(range(len(op.inputs)))
        over = [self.summed(op.inputs[i].name) for i in sorted(passes)] if op.direction == "backward" and passes in rule.linear else []
        summed = sorted(set.intersection(*over)) if over else ()
        found = strategies(
            op, rule, self.mesh, self.cuts, summed, passes, self.reduced(op), op.name in self.for_all, self.in_rings.get(op.name, 0)
        )
        found = [s for s in found if is_legal(rule, dict(s.split), self.mesh)]
        self.clusters.append(Cluster(op.name, len(found), tuple(s.label for s in found)))
        joined = self.join(op, len(self.clusters) - 1, found)
        assert joined, op

    def summed(self, name: str) -> set[str]:
        """Axes over which a tensor that is made already may be Partial."""
        if name not in self.maker or self.maker[name][0].name not in self.of:
            return set()
        maker, output = self.maker[name]
        return {a for m in self.made[maker.name] if (p := m[output]) is not None for a, r in p.partial if r == "sum"}

    def reduced(self, op: Op) -> frozenset[str]:
        """Letters of a cheap op that a cheap op after it reduces (a norm's mean): split, every rank would wait for a sum."""
        rule = self.rules[op.name]
        if rule.is_heavy or op.direction == "backward":
            return frozenset()
        return frozenset(
            x for x in rule.factors for t, dims in zip(op.outputs, rule.outputs, strict=True) for d, group in enumerate(dims or ())
            if t is not None and group == (x,) and self.is_reduced(t.name, d, DEPTH)
        )  # fmt: skip

    def is_reduced(self, name: str, dim: int, depth: int) -> bool:
        for op in self.readers.get(name, ()) if depth else ():
            rule = self.rules[op.name]
            if op.direction == "backward" or rule.is_heavy or rule.kind == "loss":
                continue
            i = next(i for i, t in enumerate(op.inputs) if t.name == name)
            for x in rule.inputs[i][dim]:
                for t, dims in zip(op.outputs, rule.outputs, strict=True):
                    at = [d for d, group in enumerate(dims or ()) if x in group]
                    if t is not None and (not at or self.is_reduced(t.name, at[0], depth - 1)):
                        return True
        return False

    # ---- backward products follow forward's ------------------------------------------------------------------

    def is_gradient_for_all(self, op: Op) -> bool:
        """Whether `op` makes the gradient of what every rank may make for its own samples. What it reads may come Partial: so it goes on, and need not be summed before."""
        if op.direction != "backward" or not self.for_all:
            return False
        return any(self.loops.letters(op, f) is not None for f in self.loops.forward_of(op, list(self.for_all.values())))

    def tie(self, op: Op) -> bool:
        if self.is_gradient_for_all(op):
            return False
        for f in self.loops.forward_of(op, [f for f in self.forward_heavy if f.name in self.of]):
            letters = self.loops.letters(op, f)
            if letters is None:
                continue
            chosen = []
            for s in self.clusters[self.of[f.name]].members[f.name]:
                mapped = {a: (letters[x], stride) for a, (x, stride) in s.split if x in letters}
                if len(mapped) < len(s.split) or s.partial:
                    break
                chosen.append(OpStrategy.of(mapped))
            else:
                if self.join(op, self.of[f.name], chosen):
                    return True
        return False

    # ---- views -----------------------------------------------------------------------------------------------

    def is_copy_of_more(self, op: Op) -> bool:
        """Whether it only writes out what a view repeated (keys and values for every group of query heads)."""
        if op.target != "aten.clone.default":
            return False
        name = op.inputs[0].name
        while name in self.maker and self.rules[(maker := self.maker[name][0]).name].kind == "view" and len(maker.inputs) == 1:
            if maker.inputs[0].numel < maker.out.numel:
                return True
            name = maker.inputs[0].name
        return False

    def is_bias_of_stream(self, op: Op) -> bool:
        """A bias that is added to what may be Partial, for a residual alone: added where that is, it leaves the reduction to be one that scatters
        (a row product's bias under sequence parallelism)."""
        if op.direction != "forward" or len(op.inputs) != 2 or frozenset({0, 1}) not in self.rules[op.name].linear:
            return False
        into = {self.of.get(r.name) for r in self.readers.get(op.out.name, ())}
        cheap = all(c is not None and not self.rules[self.clusters[c].leader].is_heavy for c in into)
        return cheap and any(a.name in self.chain and self.is_partial(b) for a, b in (op.inputs, op.inputs[::-1]))

    def move_to_reader(self, op: Op) -> None:
        """A view that one cluster reads is made there: what is brought to the readers is then the tensor itself, once for all its views
        (backward's products read a gradient and its transpose), and before a view that repeats it, not behind."""
        readers = self.readers.get(op.out.name, ()) if op.outputs[0] is not None else ()
        into = {self.of.get(r.name) for r in readers}
        (cluster,) = into if len(into) == 1 else (None,)
        if cluster is None or cluster == self.of[op.name] or max(t.numel for t in op.inputs) > op.out.numel:
            return
        if op.name in (self.clusters[self.of[op.name]].leader, *self.given):
            return
        wants = {tuple(w[i] for w in self.want[r.name]) for r in readers for i, t in enumerate(r.inputs) if t.name == op.out.name}
        if len(wants) != 1:
            return
        chosen = [self.pulled(op, p) for p in wants.pop()]
        if all(s is not None for s in chosen):
            old = self.clusters[self.of[op.name]].members.pop(op.name)
            if not self.join(op, cluster, [s for s in chosen if s is not None]):
                self.clusters[self.of[op.name]].members[op.name] = old

    # ---- views of parameters ---------------------------------------------------------------------------------

    def follow_reader(self, op: Op) -> None:
        """A view or cast of a parameter is placed as its first user reads it."""
        for reader in self.readers.get(op.out.name, ()):
            if reader.name not in self.of:
                continue
            i = next(i for i, t in enumerate(reader.inputs) if t.name == op.out.name)
            chosen = [self.pulled(op, w[i]) for w in self.want[reader.name]]
            if all(s is not None for s in chosen) and self.join(op, self.of[reader.name], [s for s in chosen if s is not None]):
                return
        self.lead(op)

    def follow_all_readers(self, op: Op) -> None:
        readers = [r for r in self.readers.get(op.out.name, ()) if r.name in self.of]
        wants = {
            (self.of[r.name], tuple(w[i] for w in self.want[r.name]))
            for r in readers
            for i, t in enumerate(r.inputs)
            if t.name == op.out.name
        }
        if len(wants) == 1 and op.name not in self.given:
            ((cluster, places),) = wants
            chosen = [self.pulled(op, p) for p in places]
            if all(s is not None for s in chosen) and self.join(op, cluster, [s for s in chosen if s is not None]):
                return
        self.lead(op)

    def pulled(self, op: Op, p: Placement) -> OpStrategy | None:
        rule = self.rules[op.name]
        outs = rule.outputs[0]
        assert outs is not None
        split = {}
        for axis, at in p.where.items():
            found = letter_at(outs, at, self.mesh.axis_size(axis), rule)
            if found is None or not follows(rule, found[0]):
                return None
            split[axis] = found
        if p.partial and (frozenset({0}) not in rule.linear or any(r != "sum" for _, r in p.partial)):
            return None
        return OpStrategy.of(split, {a: frozenset({0}) for a, _ in p.partial})
