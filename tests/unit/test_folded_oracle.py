"""Plans of folded programs against an oracle that does not fold, on random small models.

The oracle's problem is of the graph as it was captured: every layer's operators, tensors and bytes for themselves, no multiplicities, no
copy that stands for others. Of the fold it takes only what decides together: the clusters, and that equal layers decide alike. Then it goes
through all answers: strategies, what runs again, what is kept where, which redistributions. Sizes are those of real layers, on the meta
device, since the solver counts memory in gigabytes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from ortools.math_opt.python import mathopt
from torch import nn

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.cost import Cost
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.best_cut import WORTH
from autopar.planner.formulation import clusters as together
from autopar.planner.formulation.largest_positions import LargestPositions
from autopar.planner.formulation.lower_bound import lower_bound_problem
from autopar.planner.formulation.memory_rows import rows
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.symmetry import SymmetryClasses, symmetry
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.stages import Stages
from autopar.rules import lookup
from autopar.solver.evaluate import Price, evaluate, tidy
from autopar.solver.fold import Folded, fold, folded
from autopar.solver.frontier import Relaxation
from autopar.solver.model import Options, Program
from autopar.solver.problem import BACKWARD, DEVICE, FORWARD, NONE, Decision, End, Key, Problem, Times, Value
from autopar.solver.shrink import Shrunk, shrink
from autopar.solver.solve import Infeasible, Limits, Solution, smallest, solve
from tests.wide import cases

MESH = Mesh.of({"dp": 2})
CHUNKS, MODELS = 8, 3
JOINT, REPEATS = 12, 5  # so many strategies of a whole model, and operators that may run again, are left to choose from
PLENTY = 1e15

# ---- random models -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What `steps` say, in order; some steps have a parameter."""

    def __init__(self, steps: Sequence[str], width: int, wide: int) -> None:
        super().__init__()
        self.steps = tuple(steps)
        made: dict[str, nn.Module] = {}
        for i, step in enumerate(steps):
            if step in ("linear", "widen", "narrow"):
                shape = {"linear": (width, width), "widen": (width, wide), "narrow": (wide, width)}[step]
                made[str(i)] = nn.Linear(*shape, bias=False)
            elif step == "norm":
                made[str(i)] = nn.LayerNorm(width)
            elif step in ("bias", "gate"):
                made[str(i)] = nn.ParameterList([nn.Parameter(torch.empty(width))])
        self.made = nn.ModuleDict(made)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        start, act = x, {"gelu": nn.functional.gelu, "relu": torch.relu, "square": torch.square}
        for i, step in enumerate(self.steps):
            if step in act:
                x = act[step](x)
            elif step == "bias":
                x = x + self.made[str(i)][0]
            elif step == "gate":
                x = x * self.made[str(i)][0]
            elif step == "shared":
                x = x * shared
            elif step == "residual":
                x = x + start
            else:
                x = self.made[str(i)](x)
        return x


class Model(nn.Module):
    def __init__(self, g: random.Random) -> None:
        super().__init__()
        width, wide, classes = (1024 * g.choice((1, 2)), 1024 * g.choice((2, 4)), 1024 * g.choice((4, 8)))
        steps = random_steps(g)
        self.start = nn.Embedding(classes, width) if g.random() < 0.6 else nn.Linear(1024, width)
        self.layers = nn.ModuleList(Layer(steps, width, wide) for _ in range(g.randint(4, 7)))
        self.end = nn.Linear(width, classes, bias=g.random() < 0.3)
        self.norm = nn.LayerNorm(width) if g.random() < 0.3 else None
        self.squared = g.random() < 0.3  # loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        shared = torch.sigmoid(x)
        for layer in self.layers:
            x = layer(x, shared)
        x = self.end(x if self.norm is None else self.norm(x))
        return x.square().mean() if self.squared else nn.functional.cross_entropy(x.flatten(0, -2), y.flatten())


def random_steps(g: random.Random) -> list[str]:
    """Two to five steps, one of which has a parameter; between widening and narrowing only what needs no parameter."""
    pool = ["linear", "bias", "gelu", "relu", "norm", "residual", "gate", "shared", "square", "mlp"]
    while True:
        drawn = [g.choice(pool) for _ in range(g.randint(2, 5))]
        if {"linear", "mlp", "bias", "norm", "gate"} & set(drawn) and sum(x in ("linear", "mlp") for x in drawn) <= 2:
            break
    return [y for x in drawn for y in (("widen", g.choice(("gelu", "relu", "square")), "narrow") if x == "mlp" else (x,))]


def captured(g: random.Random) -> Graph:
    batch = (g.choice((4096, 8192)),) if g.random() < 0.6 else (4, 2048)
    with torch.device("meta"):
        model = Model(g).train()
        x = torch.zeros(batch, dtype=torch.int64) if isinstance(model.start, nn.Embedding) else torch.zeros((*batch, 1024))
        y = torch.zeros(batch, dtype=torch.int64)
    call = Call.of((), {"x": x, "y": y})
    return describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))


def random_cluster(g: random.Random) -> Cluster:
    """Made-up speeds. What a product, a pass over memory and a transfer take is within a factor of ten of one another."""
    c = Cluster.of("h100:2" if g.random() < 0.5 else "h100:2x1")
    around = lambda x: x * 10 ** g.uniform(-1, 1)  # noqa: E731
    late = g.random() < 0.5
    links = {
        k: getattr(c, k).model_copy(update={"bandwidth_Bps": around(2e11), "latency_s": g.uniform(0, 1e-3) if late else 0.0})
        for k in ("intra", "inter")
    }
    flops = c.device.peak_flops.model_copy(update={"float32": around(3e14)})
    device = {"peak_flops": flops, "memory_bandwidth_Bps": around(2e12), "launch_s": g.uniform(0, 1e-4) if late else 0.0}
    return c.model_copy(update={**links, "device": c.device.model_copy(update=device)})


# ---- the folded problem and the one that is not folded -----------------------------------------------------------


def formulator(
    q: SymmetryClasses, cluster: Cluster, training: TrainingConfig, only: Sequence[int] | None = None, mesh: Mesh = MESH
) -> Formulator:
    rules = {op.name: lookup(op) for op in q.graph.ops}
    return Formulator(q, rules, mesh, Cost.compiled(cluster, mesh, q.graph, rules), training, only)


@dataclass
class Whole:
    """The problem of the captured graph. like: choice -> the folded problem's choice whose strategy it takes. values, reruns: groups that
    decide alike."""

    formulator: Formulator
    problem: Problem
    names: Names
    like: list[int]
    values: list[list[int]]
    reruns: list[list[int]]


def whole(f: Folded, small: Formulator, cluster: Cluster, training: TrainingConfig, only: Sequence[int] | None = None) -> Whole:
    """small: of `f`, folded. only: of the folded problem's choices the strategies that are left."""
    q = small.program.q  # layers that are alike but no copies decide alike too
    rep, tensor_rep = {n: q.rep[r] for n, r in f.rep.items()}, {n: q.tensor_rep[r] for n, r in f.tensor_rep.items()}
    # Where layers are is told all the same: what a layer hands on is not made again, what it gathers lives from the layer before.
    alone = formulator(replace(symmetry(shrink(folded(f.graph, (), ())), patterns=False), stacks=f.stacks), cluster, training)
    copy_of = {
        n: (s, k) for s, stack in enumerate(f.stacks) for copies in (stack.forward, stack.backward) for k, c in enumerate(copies) for n in c
    }
    # Every copy of a layer has clusters of its own.
    cl, like, of = small.clusters, list[int](), dict[str, int]()
    left = [range(k.size) if only is None else (only[i],) for i, k in enumerate(cl.clusters)]
    index: dict[tuple[int, tuple[int, int] | None], int] = {}
    apart: list[together.Cluster] = []
    for op in f.graph.ops:
        i = cl.of[rep[op.name]]
        key = i, copy_of.get(op.name)
        if key not in index:
            index[key] = len(apart)
            like.append(i)
            apart.append(together.Cluster(op.name, len(left[i]), tuple(cl.clusters[i].labels[s] for s in left[i])))
        of[op.name] = index[key]
        apart[index[key]].members[op.name] = [cl.clusters[i].members[rep[op.name]][s] for s in left[i]]
    want, made = (
        {op.name: [places[rep[op.name]][s] for s in left[cl.of[rep[op.name]]]] for op in f.graph.ops} for places in (cl.want, cl.made)
    )
    names = small.names
    like += [len(cl.clusters), names.inputs, *(names.storage[tensor_rep[t.name]][0] for t in f.graph.params.values())]
    if only is not None:
        alone.only = [only[c] for c in like]
    alone.take(together.Clusters(apart, of, want, made, alone.clusters.chain, alone.clusters.maker))
    problem, names = alone.run()
    assert [len(c.labels) for c in problem.choices] == [1 if only else len(small.choices[c][1]) for c in like]
    # Tensors of a class that are read alike decide alike; so do all operators of a class.
    read: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for op in f.graph.ops:
        for i, t in enumerate(op.inputs):
            read[t.name].add((rep[op.name], i))
    for param, grad in f.graph.grads.items():
        read[grad].add((tensor_rep[f.graph.params[param].name], -1))
    values: dict[object, list[int]] = defaultdict(list)
    for v, value in enumerate(problem.values):
        t = value.name
        values[tensor_rep[t], frozenset(read[t]), t in f.graph.outputs].append(v)
    reruns: dict[str, list[int]] = defaultdict(list)
    for r, (op, _) in enumerate(names.reruns):
        reruns[rep[op]].append(r)
    return Whole(alone, problem, names, like, list(values.values()), list(reruns.values()))


def policy_at(value: Value, node: int) -> int:
    """How `value` is kept on the device at `node`."""
    return next(k for k, policy in enumerate(value.policies) if policy.node == node and policy.medium == DEVICE)


def spread(f: Folded, s: Shrunk, small: Problem, names: Names, d: Decision, w: Whole) -> Decision:
    """`d`, of the problem `small` of the folded graph `s`, as a decision of the whole."""
    q, p = names.symmetry, w.problem
    index = {value.name: v for v, value in enumerate(small.values)}
    x = tuple(d.strategies[c] for c in w.like)
    kept: dict[int, frozenset[int]] = {}
    arcs: dict[tuple[int, int], frozenset[int]] = {}
    for v, value in enumerate(p.values):
        op, dot, output = value.name.partition(".")
        name = s.image[op] + dot + output if op in s.image else f.tensor_rep[value.name]
        mine = index[q.group[name]]
        theirs = small.values[mine]
        if mine in d.kept:
            (k,) = d.kept[mine]
            n = theirs.policies[k].node
            if theirs.name in names.merged:  # its nodes stand for sizes: it is kept where it is made
                (n,) = {end.nodes[x[end.choice]] for end in value.forward.supplies}
            else:
                n = value.nodes.index(theirs.nodes[n])
            kept[v] = frozenset({policy_at(value, n)})
        for direction, here, there in ((FORWARD, theirs.forward, value.forward), (BACKWARD, theirs.backward, value.backward)):
            used = d.arcs.get((mine, direction), frozenset())
            if used:
                assert here is not None and there is not None
                wanted = {(theirs.nodes[here.arcs[a].src], theirs.nodes[here.arcs[a].dst]) for a in used}
                found = frozenset(a for a, arc in enumerate(there.arcs) if (value.nodes[arc.src], value.nodes[arc.dst]) in wanted)
                assert len(found) == len(wanted)
                arcs[v, direction] = found
    again = {names.reruns[i] for i in d.rerun}
    rerun = frozenset(r for r, (op, _) in enumerate(w.names.reruns) if (q.rep[s.image[op]], q.segment[s.image[op]]) in again)
    return Decision(x, kept, rerun, arcs)


# ---- the oracle --------------------------------------------------------------------------------------------------

Label = str  # of a placement
Labels = frozenset[Label]
Arcs = frozenset[tuple[Label, Label]]
Made = frozenset[tuple[int, Label]]  # reruns, by class, and where they make or read a value


@cache
def least_arcs(arcs: Arcs, have: Labels, wanted: Labels) -> tuple[Arcs, ...]:
    """The sets of arcs that bring what is wanted, one to each of its nodes, from where it is or from another that is wanted."""
    into = [[a for a in sorted(arcs) if a[1] == n] for n in sorted(wanted - have)]
    found: list[Arcs] = []
    for some in itertools.product(*into):
        there = set(have)
        for _ in some:
            there |= {dst for src, dst in some if src in there}
        if wanted <= there:
            found.append(frozenset(some))
    return tuple(found)


@dataclass(frozen=True)
class Option:
    """What becomes in one direction of values that decide alike."""

    takes: np.ndarray
    direction: int
    kept: Label | None
    arcs: Arcs


@dataclass(frozen=True)
class Answer:
    """rerun: classes that run again. lists: groups of values and what may become of them; picks: which of it does."""

    seconds: float
    peak_bytes: float
    strategies: tuple[int, ...]
    rerun: frozenset[int]
    lists: list[tuple[int, list[Option]]]
    picks: np.ndarray


@dataclass(frozen=True)
class Backward:
    """Where the values of a group are at hand in backward, where they are read, and where they could be kept."""

    have: Labels
    wanted: Labels
    remade: Made
    reread: Made
    keepable: Labels


class Oracle:
    """Every answer in which equal layers decide alike, as what it takes: seconds of every account, then bytes at every position.

    Given strategies and what runs again, values have nothing to do with one another: each is looked at by itself. Of a value's options, and
    of sums of them, those are left out that take no less of anything than another.
    """

    def __init__(self, w: Whole, allowed: Sequence[Sequence[int]], again: frozenset[int]) -> None:
        """allowed: strategies of the folded problem's choices. again: the classes that may run again."""
        p = self.problem = w.problem
        self.whole, self.allowed, self.recompute = w, allowed, again
        self.width = len(p.accounts) + len(p.rows)
        self.stages = [[i for i, a in enumerate(p.accounts) if a.stage == s] for s in range(len(p.stages))]
        self.bytes: dict[Key, np.ndarray] = {}
        for i, row in enumerate(p.rows):
            for key, k in spread_out(p, row.terms):
                assert k >= 0 and not row.constant
                self.bytes.setdefault(key, np.zeros(self.width))[len(p.accounts) + i] += k
        self.class_of = {r: c for c, members in enumerate(w.reruns) for r in members}
        self.known: dict[object, list[Option]] = {}
        self.found: list[Answer] = []

    def takes(self, key: Key, times: Times | None = None) -> np.ndarray:
        out = self.bytes[key].copy() if key in self.bytes else np.zeros(self.width)
        for a, t in (times or {}).items():
            out[a] += t
        return out

    def answers(self) -> list[Answer]:
        """The best answer to every budget."""
        for chosen in itertools.product(*self.allowed):
            self.at(tuple(chosen[c] for c in self.whole.like))
        return self.found

    def at(self, x: tuple[int, ...]) -> None:
        p, w = self.problem, self.whole
        base = sum((self.takes(("x", i, x[i]), c.times[x[i]]) for i, c in enumerate(p.choices)), np.zeros(self.width))
        remade: dict[int, set[tuple[int, Label]]] = defaultdict(set)
        reread: dict[int, set[tuple[int, Label]]] = defaultdict(set)
        spent = [np.zeros(self.width) for _ in w.reruns]
        for r, rerun in enumerate(p.reruns):
            s, c = x[rerun.choice], self.class_of[r]
            spent[c] += self.takes(("r", r, s), rerun.times[s])
            for into, pairs in ((reread, rerun.reads), (remade, rerun.makes)):
                for v, nodes in pairs:
                    into[v].add((c, p.values[v].nodes[nodes[s]]))
        ahead: list[tuple[int, list[Option]]] = []
        behind: dict[int, Backward] = {}
        for g, members in enumerate(w.values):
            every = {self.places(v, x, frozenset(remade[v]), frozenset(reread[v])) for v in members}
            assert len(every) == 1, "equal layers that are not read alike"
            ((have, wanted, back),) = every
            ahead.append((g, self.options(g, FORWARD, have, wanted, frozenset())))
            if back is not None:
                behind[g] = back
        for rerun in self.reruns(behind):
            taken = base + sum((spent[c] for c in rerun), np.zeros(self.width))
            again = {("r", r) for r in range(len(p.reruns)) if self.class_of[r] in rerun}
            for k, e in enumerate(p.events):
                if again >= set(e.every) and (not e.one or again & set(e.one)) and not again & set(e.no):
                    again.add(("z", k))
                    taken += self.takes(("z", k, 0))
            lists = list(ahead)
            for g, b in behind.items():
                have, wanted = (known | {n for c, n in more if c in rerun} for known, more in ((b.have, b.remade), (b.wanted, b.reread)))
                if not wanted <= have:
                    lists.append((g, self.options(g, BACKWARD, have, wanted, b.keepable)))
            found = [*self.found, *self.sums(x, rerun, taken, lists)]
            if len(found) > len(self.found):
                left = _fastest(np.array([a.seconds for a in found]), np.array([a.peak_bytes for a in found]))
                self.found = [found[i] for i in left]

    def places(self, v: int, x: tuple[int, ...], remade: Made, reread: Made) -> tuple[Labels, Labels, Backward | None]:
        value = self.problem.values[v]

        def at(ends: Sequence[End]) -> Labels:
            return frozenset(value.nodes[e.nodes[x[e.choice]]] for e in ends if e.nodes[x[e.choice]] != NONE)

        have, wanted = at(value.forward.supplies), at(value.forward.demands)
        if value.backward is None:
            return have, wanted, None
        keepable = (have | wanted) & {value.nodes[policy.node] for policy in value.policies}
        return have, wanted, Backward(at(value.backward.supplies), at(value.backward.demands), remade, reread, keepable)

    def reruns(self, behind: Mapping[int, Backward]) -> Iterator[frozenset[int]]:
        """Sets of classes that run again, each of which makes something that is read: by backward, or by a later class that runs again."""
        makes, reads = (
            [{g for g, b in behind.items() if any(c == mine for c, _ in getattr(b, what))} for mine in range(len(self.whole.reruns))]
            for what in ("remade", "reread")
        )

        def go(c: int, wanted: set[int], taken: frozenset[int]) -> Iterator[frozenset[int]]:
            if c < 0:
                yield taken
                return
            mine = makes[c] & wanted
            if all(behind[g].have or behind[g].keepable for g in mine):  # not so for a view, which is never kept
                yield from go(c - 1, wanted, taken)
            if mine and c in self.recompute:
                yield from go(c - 1, wanted | reads[c], taken | {c})

        yield from go(len(self.whole.reruns) - 1, {g for g, b in behind.items() if b.wanted}, frozenset())

    def options(self, g: int, direction: int, have: Labels, wanted: Labels, keepable: Labels) -> list[Option]:
        key = g, direction, have, wanted, keepable
        if key not in self.known:
            found = []
            for kept in (None, *sorted(keepable)):
                there = have if kept is None else have | {kept}
                for arcs in least_arcs(frozenset(self.arcs(self.whole.values[g][0], direction)), there, wanted):
                    found.append(Option(self.taken(g, direction, kept, arcs), direction, kept, arcs))
            self.known[key] = [found[i] for i in _undominated(np.array([o.takes for o in found]))] if found else []
        return self.known[key]

    def taken(self, g: int, direction: int, kept: Label | None, arcs: Arcs) -> np.ndarray:
        out = np.zeros(self.width)
        for v in self.whole.values[g]:
            value = self.problem.values[v]
            if kept is not None:
                k = policy_at(value, value.nodes.index(kept))
                out += self.takes(("y", v, k), value.policies[k].times)
            for labels, (a, times) in self.arcs(v, direction).items():
                if labels in arcs:
                    out += self.takes(("e", v, direction, a), times)
        return out

    def arcs(self, v: int, direction: int) -> dict[tuple[Label, Label], tuple[int, Times]]:
        value = self.problem.values[v]
        flow = value.forward if direction == FORWARD else value.backward
        return {(value.nodes[arc.src], value.nodes[arc.dst]): (a, arc.times) for a, arc in enumerate(flow.arcs)} if flow else {}

    def sums(self, x: tuple[int, ...], rerun: frozenset[int], taken: np.ndarray, lists: list[tuple[int, list[Option]]]) -> list[Answer]:
        """The answers with one option of every list that are faster than all that hold no more."""
        if not all(options for _, options in lists):
            return []
        one = [options[0].takes for _, options in lists if len(options) == 1]
        several = [i for i, (_, options) in enumerate(lists) if len(options) > 1]
        table, picks = (taken + sum(one, np.zeros(self.width)))[None], np.zeros((1, len(lists)), int)
        ((seconds,), (peak,)) = self.price(table)
        if any(a.seconds <= seconds and a.peak_bytes <= peak for a in self.found):
            return []  # and more is only added
        for i in several:
            n, options = len(table), lists[i][1]
            table = (table[:, None] + np.array([o.takes for o in options])).reshape(-1, self.width)
            picks = np.repeat(picks, len(options), 0)
            picks[:, i] = np.tile(np.arange(len(options)), n)
            if len(table) > 64:
                left = _undominated(table)
                table, picks = table[left], picks[left]
        prices = self.price(table)
        return [Answer(float(prices[0][i]), float(prices[1][i]), x, rerun, lists, picks[i]) for i in _fastest(*prices)]

    def price(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and peak of every row."""
        seconds = sum((table[:, accounts].max(axis=1) for accounts in self.stages), np.full(len(table), self.problem.constant_s))
        return seconds, table[:, len(self.problem.accounts) :].max(axis=1)

    def decision(self, a: Answer) -> Decision:
        kept: dict[int, frozenset[int]] = {}
        arcs: dict[tuple[int, int], frozenset[int]] = {}
        for (g, options), pick in zip(a.lists, a.picks, strict=True):
            option = options[pick]
            for v in self.whole.values[g]:
                if option.kept is not None:
                    value = self.problem.values[v]
                    kept[v] = frozenset({policy_at(value, value.nodes.index(option.kept))})
                if option.arcs:
                    known = self.arcs(v, option.direction)
                    arcs[v, option.direction] = frozenset(known[labels][0] for labels in option.arcs)
        return Decision(a.strategies, kept, frozenset(r for r, c in self.class_of.items() if c in a.rerun), arcs)


def spread_out(p: Problem, terms: Sequence[tuple[Key, float]]) -> Iterator[tuple[Key, float]]:
    """A row's terms, and in place of sums that it has in common with others those of the sums."""
    for key, k in terms:
        if key[0] == "s":
            yield from ((inner, k * n) for inner, n in spread_out(p, p.rests[key[1]]))
        else:
            yield key, k


def _fastest(seconds: np.ndarray, peaks: np.ndarray) -> list[int]:
    """Those that are faster than all that hold no more, by what they hold."""
    order = np.lexsort((seconds, peaks))
    before = np.minimum.accumulate(np.concatenate([[math.inf], seconds[order]]))[:-1]
    return [int(i) for i in order[seconds[order] < before]]


def _undominated(table: np.ndarray) -> list[int]:
    """Rows that are not everywhere at least another one."""
    left: list[int] = []
    for i in np.argsort(table.sum(axis=1), kind="stable"):
        if not left or not (table[left] <= table[i]).all(axis=1).any():
            left.append(int(i))
    return left


# ---- cases -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A random model on a random cluster. allowed: of the folded problem's choices the strategies that are left to choose from; recompute: the
    classes that may run again, as the whole numbers them, views among them; answers: the best ones of the whole; budgets: to be tried."""

    folded: Folded
    small: Shrunk
    cluster: Cluster
    training: TrainingConfig
    formulator: Formulator
    problem: Problem
    whole: Whole
    allowed: list[list[int]]
    recompute: frozenset[int]
    views: frozenset[int]
    oracle: Oracle
    answers: list[Answer]
    budgets: list[float]

    def restricted(self, problem: Problem) -> Problem:
        left = {(c, s) for c, mine in enumerate(self.allowed) for s in mine}
        return replace(problem, forbidden=frozenset((c, s) for c, k in enumerate(problem.choices) for s in range(len(k.labels))) - left)

    @property
    def rerun(self) -> frozenset[int]:
        """`recompute`, as the folded problem numbers them."""
        classes = {self.folded.rep[self.whole.names.reruns[self.whole.reruns[c][0]][0]] for c in self.recompute}
        return frozenset(r for r, (op, _) in enumerate(self.formulator.names.reruns) if op in classes)


def case(seed: int) -> Case:
    g = random.Random(seed)
    f, cluster = fold(captured(g)), random_cluster(g)
    small, training = shrink(f), TrainingConfig(frozenset(f.graph.params))
    made = formulator(symmetry(small), cluster, training)
    problem, _ = made.run()
    w = whole(f, made, cluster, training)
    sizes = [len(c.labels) for c in problem.choices]
    left = [1] * len(sizes)
    for c in g.sample(range(len(sizes)), len(sizes)):
        k = g.randint(min(2, sizes[c]), min(3, sizes[c]))
        left[c] = k if math.prod(left) * k <= JOINT else 1
    allowed = [sorted(g.sample(range(n), k)) for n, k in zip(sizes, left, strict=True)]
    # Views, which are never kept, run again wherever they are read.
    kept = [any(w.problem.values[v].policies for r in members for v, _ in w.problem.reruns[r].makes) for members in w.reruns]
    others = [c for c, k in enumerate(kept) if k]
    views = frozenset(c for c, k in enumerate(kept) if not k)
    again = views | set(g.sample(others, min(REPEATS, len(others))))
    oracle = Oracle(w, allowed, again)
    answers = oracle.answers()
    return Case(f, small, cluster, training, made, problem, w, allowed, again, views, oracle, answers, random_budgets(g, answers))


def random_budgets(g: random.Random, answers: Sequence[Answer]) -> list[float]:
    """Plenty; too little; some between what one answer holds and the next, not so near to either that the solver's tolerance decides."""
    peaks = [a.peak_bytes for a in answers]
    gaps = [(lo, hi) for lo, hi in itertools.pairwise([*peaks, 1.05 * max(peaks, default=1e9)]) if hi > 1.001 * lo]
    between = [lo + (hi - lo) * g.uniform(0.1, 0.9) for lo, hi in g.sample(gaps, min(3, len(gaps)))]
    return [PLENTY, 0.99 * min(peaks, default=1e9), *between]


def best(answers: Sequence[Answer], budget: float) -> Answer | None:
    return min((a for a in answers if a.peak_bytes <= budget), key=lambda a: a.seconds, default=None)


def solved(problem: Problem, rerun: frozenset[int]) -> Decision | None:
    """The program with whole policies, to the end."""
    program = Program(problem, Options(policies="binary", rerun=rerun))
    model = mathopt.Model.from_model_proto(program.proto())
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(relative_gap_tolerance=1e-9))
    if result.termination.reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return None
    assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
    values = result.variable_values()
    return tidy(problem, program.decision([values[v] for v in model.variables()])[0])


def check_same_price(mine: Price, theirs: Price, where: str) -> None:
    """Of an answer of the folded problem, and of the same done in every layer of the whole."""
    assert mine.feasible and theirs.feasible, (where, mine.unmet[:3], theirs.unmet[:3], theirs.over_bytes)
    assert theirs.objective_s == pytest.approx(mine.objective_s, rel=1e-9), where
    assert max(theirs.row_bytes) == pytest.approx(max(mine.row_bytes), rel=1e-9), where


def check_rows(s: Shrunk, small: Formulator, problem: Problem, d: Decision, w: Whole, everywhere: Decision, where: str) -> None:
    """The bytes at every position, whether some other row has more or not: a copy that stands for several has rows for the first and the
    last of them, those between hold no more."""
    mine, theirs = every_row(small, problem, d), every_row(w.formulator, w.problem, everywhere)
    members: dict[str, list[str]] = defaultdict(list)
    for op in w.formulator.program.graph.ops:
        members[s.image[op.name]].append(op.name)
    for op, bytes_at in mine.items():
        held = [theirs[n][0] for n in members.get(op, [op])]
        ends = [held[0], held[-1]] if len(bytes_at) == 2 else [held[-1]]
        assert bytes_at == pytest.approx(ends, rel=1e-9), (where, op)
        assert max(held) <= max(bytes_at) * (1 + 1e-9), (where, op)
    assert set(theirs) == {n for op in mine for n in members.get(op, [op])}, where


def every_row(f: Formulator, problem: Problem, d: Decision) -> dict[str, list[float]]:
    """Operator (or the optimizer's step) -> bytes at it."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr("autopar.planner.formulation.memory_rows._undominated", list)
        m.setattr(LargestPositions, "peaks", lambda self, said, columns: list(columns))
        m.setattr(LargestPositions, "corners", lambda self, groups: list(itertools.chain(*groups)))
        m.setattr(LargestPositions, "undominated", lambda self, of, given=(): list(of))
        problem = rows(f.formulated(), problem)
    out: dict[str, list[float]] = defaultdict(list)
    for row, nbytes in zip(problem.rows, evaluate(problem, d).row_bytes, strict=True):
        out[row.name.rpartition(" ")[2]].append(nbytes)
    return out


def check_program(c: Case, budget: float, where: str) -> bool:
    """Whether there is an answer."""
    found, want = solved(replace(c.restricted(c.problem), budget_bytes=budget), c.rerun), best(c.answers, budget)
    assert (found is None) == (want is None), where
    if found is None or want is None:
        return False
    mine = evaluate(replace(c.problem, budget_bytes=budget), found)
    everywhere = spread(c.folded, c.small, c.problem, c.formulator.names, found, c.whole)
    check_same_price(mine, evaluate(replace(c.whole.problem, budget_bytes=budget), everywhere), where)
    assert mine.objective_s == pytest.approx(want.seconds, rel=1e-6), where
    check_rows(c.small, c.formulator, c.problem, found, c.whole, everywhere, where)
    return True


def check_plan(c: Case, budget: float, where: str) -> None:
    training = replace(c.training, budget_bytes=budget)
    found = Stages(c.folded, MESH, c.cluster, training, Limits(gap=1e-9), restrict=lambda problem, *_: c.restricted(problem)).run()
    want = best(c.answers, budget)

    def alike(only: Sequence[int]) -> tuple[Whole, float]:
        """The whole at these strategies, where more is known of how long things live, and its best with policies alike."""
        w = whole(c.folded, c.formulator, c.cluster, training, only)
        answer = best(Oracle(w, [[0]] * len(only), c.recompute).answers(), budget)
        return w, math.inf if answer is None else answer.seconds

    if isinstance(found.answer, Infeasible):
        assert want is None or alike([want.strategies[c.whole.like.index(i)] for i in range(len(c.allowed))])[1] == math.inf, where
        return
    d, choices = found.answer.decision, found.problem.choices
    narrow = all(len(k.labels) == 1 for k in choices)  # policies were all that was left to decide
    only = [k.labels.index(choices[i].labels[0]) if narrow else d.strategies[i] for i, k in enumerate(c.problem.choices)]
    w, limit = alike(only) if narrow else (c.whole, math.inf)
    theirs = evaluate(replace(w.problem, budget_bytes=budget), spread(c.folded, found.shrunk, found.problem, found.names, d, w))
    check_same_price(found.answer.price, theirs, where)
    if want is not None and (budget == PLENTY or not narrow):
        limit = min(limit, want.seconds)
    assert found.answer.objective_s <= limit * (1 + WORTH), where
    assert found.answer.bound_s <= min(found.answer.objective_s, math.inf if want is None else want.seconds) * (1 + 1e-9), where


@pytest.mark.parametrize("chunk", cases(range(CHUNKS), range(1, 3)))
def test_folded_answers_are_the_best_of_the_whole(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every budget the folded program's optimum is the oracle's, and there is none where the oracle has none. Done in every layer,
    its answer takes as long and holds as much as it said.

    Plans, where layers may be cut into segments with policies of their own: the same; never below their bound, and not above the best of their
    strategies without segments.
    """
    kinds = Counter[str]()
    for seed in range(MODELS * chunk, MODELS * (chunk + 1)):
        c = case(seed)
        kinds["folded"] += bool(c.folded.stacks) and max(c.folded.copies) > 3
        for a in c.answers:  # that the oracle can add
            price = evaluate(c.whole.problem, c.oracle.decision(a))
            assert not price.unmet, (seed, price.unmet[:3])
            assert (price.objective_s, max(price.row_bytes)) == pytest.approx((a.seconds, a.peak_bytes), rel=1e-9), seed
        for budget in c.budgets:
            with monkeypatch.context() as m:
                m.setattr("autopar.solver.model.TIE", 0.0)  # it gives away a hundred-thousandth for less traffic
                feasible = check_program(c, budget, f"model {seed}, {budget / 1e6:.3f} MB")
            kinds["feasible" if feasible else "infeasible"] += 1
            answer = best(c.answers, budget)
            kinds["binds"] += answer is not None and answer.seconds > c.answers[-1].seconds * (1 + 1e-6)
            kinds["runs again"] += answer is not None and not answer.rerun <= c.views
        for budget in (*c.budgets[:1], *c.budgets[2:3]):
            check_plan(c, budget, f"model {seed}, {budget / 1e6:.3f} MB")
    # The comparison means something.
    assert all(kinds[k] for k in ("folded", "feasible", "infeasible", "binds", "runs again")), kinds


@cache
def program(seed: int) -> tuple[Folded, Cluster]:
    g = random.Random(seed)
    return fold(captured(g)), random_cluster(g)


@dataclass
class Segmented:
    """uncut, problem: of a program, with all strategies; shrunk, names, cut: with its layers cut into segments with policies of their own, at the strategies
    `only`; smallest: what has the smallest peak there, `peak_bytes`."""

    seed: int
    folded: Folded
    cluster: Cluster
    uncut: Formulator
    problem: Problem
    only: list[int]
    shrunk: Shrunk
    names: Names
    cut: Problem
    peak_bytes: float
    smallest: Decision


def in_segments(
    cut: tuple[int, ...], mesh: Mesh = MESH, free: bool = False, media: tuple[str, ...] = (), micro_batches: int = 1
) -> Iterator[Segmented]:
    """Programs with as many layers as `cut`, at the first strategy of every choice. free: links take no time; at the strategies with the smallest peak."""
    # In model 113 the first layer takes ten times as long as another to run again; in 0 and 26 it keeps nothing away.
    for seed in (*((0,) if media else ()), 26, *range(30, 42), 113):
        f, cluster = program(seed)
        deep = [s.name for s, n in zip(f.stacks, f.copies, strict=True) if n == sum(cut)]
        if len(deep) != 1:
            continue
        if free:
            links = {k: getattr(cluster, k).model_copy(update={"bandwidth_Bps": 1e30, "latency_s": 0.0}) for k in ("intra", "inter")}
            cluster = cluster.model_copy(update=links)
        training = TrainingConfig(frozenset(f.graph.params), media=media, micro_batches=micro_batches)
        uncut = formulator(symmetry(shrink(f)), cluster, training, mesh=mesh)
        problem, _ = uncut.run()
        least = smallest(problem) if free else None
        only, s = list(least[1].strategies) if least else [0] * len(uncut.choices), shrink(f, {deep[0]: cut})
        in_parts, names = formulator(symmetry(s), cluster, uncut.training, only, mesh).run()
        found = smallest(in_parts, gap=1e-6)
        assert found is not None
        yield Segmented(seed, f, cluster, uncut, problem, only, s, names, in_parts, *found)


@pytest.mark.parametrize("cut", [(2, 2, 1), (1, 3, 1), (3, 2), (1, 2, 2)])
def test_segments_hold_what_the_whole_holds(cut: tuple[int, ...]) -> None:
    """Layers cut into segments with policies of their own, at the smallest peak: done in every layer, everything that is made again finds what it reads,
    and no position holds more. (Copies behind the first of a segment read what their own segment hands on.)"""
    models = 0
    for c in in_segments(cut):
        w = whole(c.folded, c.uncut, c.cluster, c.uncut.training, c.only)
        decision = tidy(c.cut, c.smallest)
        theirs = evaluate(w.problem, spread(c.folded, c.shrunk, c.cut, c.names, decision, w))
        check_same_price(evaluate(c.cut, decision), theirs, f"model {c.seed}")
        models += 1
    assert models >= 2


@pytest.mark.parametrize(
    ("devices", "cut", "media", "micro_batches"),
    [
        *((2, cut, (), 1) for cut in [(1, 3, 1), (3, 2), (4, 1), (1, 1, 1, 1, 1)]),
        (1, (1, 5), (), 4),
        (1, (4, 1), ("host",), 1),
    ],
)
def test_relaxed_rows_allow_what_segments_do(devices: int, cut: tuple[int, ...], media: tuple[str, ...], micro_batches: int) -> None:
    """No answer with policies of their own for each segment is faster than the relaxed rows allow, at any budget; and the rows do say something."""
    checked = Counter[str]()
    for c in in_segments(cut, Mesh.of({"dp": devices}), False, media, micro_batches):
        others = frozenset((i, s) for i, choice in enumerate(c.problem.choices) for s in range(1, len(choice.labels)))
        check_bound(c, Relaxation(replace(c.problem, forbidden=others).relaxed), checked)
    assert checked["all"] >= 12 and checked["binds"] >= 2, checked


def check_bound(c: Segmented, bound: Relaxation, checked: Counter[str]) -> None:
    """Segments are not faster than `bound` says, at any budget."""
    fastest = bound.at(math.inf)
    assert fastest is not None
    for share in (1.0, 1.03, 1.05, 1.1, 1.2, 1.5):
        budget = share * c.peak_bytes * (1 + 1e-9)
        answer, allowed = solve(replace(c.cut, budget_bytes=budget), Limits(gap=1e-6)), bound.at(budget)
        assert isinstance(answer, Solution) and allowed is not None, (c.seed, share)
        assert allowed.tangent.at_s <= answer.objective_s * (1 + 1e-6), (c.seed, share)
        checked["binds"] += allowed.tangent.at_s > fastest.tangent.at_s * (1 + 1e-4)
        checked["all"] += 1


@pytest.mark.parametrize(
    ("devices", "cut", "media"), [(1, (1, 4), ()), (2, (1, 4), ()), (1, (1, 5), ()), (2, (1, 5), ()), (1, (4, 1), ("host",))]
)
def test_the_lower_bound_allows_what_segments_do(devices: int, cut: tuple[int, ...], media: tuple[str, ...]) -> None:
    """Where links take no time, segments come near to the lower bound, and are no faster. What one device does is not divided: there the lower bound allows all that the
    relaxed rows do, and under no budget just that."""
    checked = Counter[str]()
    for c in in_segments(cut, Mesh.of({"dp": devices}), True, media):
        again = formulator(c.uncut.program.q, c.cluster, c.uncut.training, mesh=c.uncut.mesh)
        bound, loose = Relaxation(lower_bound_problem(c.uncut.formulated(), c.problem, again)), Relaxation(c.problem.relaxed)
        check_bound(c, bound, checked)
        for share in (0.9, 1.0, 1.1, 1.3, math.inf) if devices == 1 else ():
            mine, theirs = bound.at(share * c.peak_bytes), loose.at(share * c.peak_bytes)
            assert mine is not None or theirs is None, (c.seed, share)
            if mine is not None and theirs is not None:
                assert mine.tangent.at_s <= theirs.tangent.at_s * (1 + 1e-9), (c.seed, share)
                assert share < math.inf or mine.tangent.at_s == pytest.approx(theirs.tangent.at_s, rel=1e-9), c.seed
    # The lower bound's links carry all that is kept away, so it may well bind nowhere then.
    assert checked["all"] >= 12 and (media or checked["binds"] >= 2), checked
