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

from autopar.cost import Cost
from autopar.cost.memory import is_view
from autopar.graph.graph import DTYPE_BYTES, MUST_RECOMPUTE, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.planner.formulation.accounts import ACCOUNTS, STAGES, account
from autopar.planner.formulation.clusters import Clusters, clusters, narrowed
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.memory_rows import rows, step_row
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.parameter_storage import storages
from autopar.planner.formulation.program import Program
from autopar.planner.formulation.recompute import Recomputable
from autopar.planner.formulation.symmetry import SymmetryClasses
from autopar.planner.formulation.times import Times
from autopar.planner.formulation.training import TrainingConfig, optimizer_s
from autopar.planner.formulation.wires import Wires
from autopar.planner.storage import batch_placements
from autopar.rules.grammar import Rule
from autopar.solver.problem import Choice, End, Problem, Rerun
from autopar.solver.watch import check


def formulate(q: SymmetryClasses, rules: Mapping[str, Rule], mesh: Mesh, cost: Cost, training: TrainingConfig) -> tuple[Problem, Names]:
    """rules: of every operator of `q.graph`."""
    return Formulator(q, rules, mesh, cost, training).run()


class Formulator:
    """Goes through a program once and makes its choices, values and reruns. only: of every choice the one strategy that is left (policies are then all that is
    decided)."""

    def __init__(
        self,
        q: SymmetryClasses,
        rules: Mapping[str, Rule],
        mesh: Mesh,
        cost: Cost,
        training: TrainingConfig,
        only: Sequence[int] | None = None,
    ) -> None:
        self.mesh, self.cost, self.training, self.only = mesh, cost, training, only
        self.program = Program(q, rules, training.trainable)
        self.recomputable = Recomputable(self.program)
        self.choices: list[tuple[str, tuple[str, ...], list[dict[int, float]]]] = []
        found = clusters(q.classes, rules, mesh)
        self.names = Names(q, found, mesh)
        self.take(found if only is None else narrowed(found, [(s,) for s in only[: len(found.clusters)]]))

    def take(self, found: Clusters) -> None:
        """`found` are the clusters from here on, and there is no value yet."""
        self.clusters = self.names.clusters = found
        self.times = Times(self.program, found, self.cost, self.mesh)
        self.wires = Wires(self.program, found, self.mesh, self.cost, self.training, self.names, self.only is not None)

    def formulated(self) -> Formulated:
        """What was made, behind `run`."""
        return Formulated(
            self.program, self.mesh, self.cost, self.training, self.clusters, self.names, self.wires.all, self.recomputable, self.times, self.fixed,
            self.only is not None,
        )  # fmt: skip

    # ---- the whole ---------------------------------------------------------------------------------------------

    def run(self, room_s: float = math.inf, trim: Callable[[Problem], Problem] = lambda p: p) -> tuple[Problem, Names]:
        """room_s: strategies that take so much more than the fastest of their cluster are left out; trim: leaves out what else it will
        before memory rows are made."""
        g = self.program.graph
        self.cluster_choices()
        self.drop(room_s)
        self.fixed = self.choice("fixed", ("",), [{}])
        self.inputs_choice()
        for t in (*g.buffers.values(), *g.tangents, *self.program.constants):
            self.wires.supply(t, self.fixed, [Placement.of(t.shape)], both=True)
        self.storage_choices()
        reruns: list[tuple[Op, int]] = []
        for op in self.program.q.classes.ops:
            check()
            for copy in self.program.copies[op.name]:
                self.op(copy)
            if op.direction == "forward" and not self.program.is_chained(op, self.clusters):
                reruns += [
                    (op, segment) for segment in sorted({self.program.q.segment[copy.name] for copy in self.program.copies[op.name]})
                ]
        for name in dict.fromkeys([*g.outputs, *g.buffer_updates.values()]):
            if name:
                self.wires.demand(g.tensors[name], self.fixed, [Placement.of(g.tensors[name].shape)], 0)
        self.names.value_of = {n: i for i, n in enumerate(self.wires.all)}
        recomputed_calls = [self.rerun(op, segment) for op, segment in reruns]
        values = [self.wires.value(w) for w in self.wires.all.values()]
        names = list(self.wires.all)
        recomputed_calls = [self.wires.remapped(r, names) for r in recomputed_calls]
        self.names.merged = frozenset(self.wires.renamed)
        self.names.nodes = [list(w.nodes) for w in self.wires.all.values()]
        choices = tuple(Choice(n, labels, tuple(times)) for n, labels, times in self.choices)
        problem = Problem(STAGES, ACCOUNTS, choices, tuple(values), tuple(recomputed_calls), (), self.training.budget_bytes)
        return rows(self.formulated(), trim(problem)) if self.training.counts else trim(problem), self.names

    def at_the_step(self, problem: Problem) -> Problem:
        """`problem`, which `run` made and was given to trim, with the memory of the optimizer's step alone."""
        return step_row(self.formulated(), problem) if self.training.counts else problem

    def drop(self, room_s: float) -> None:
        kept: list[list[int]] = []
        for i, (name, labels, times) in enumerate(self.choices):
            busy = [sum(t for a, t in spent.items() if ACCOUNTS[a].resource == "compute") for spent in times]
            kept.append([s for s, t in enumerate(busy) if t - min(busy) <= room_s])
            self.choices[i] = (name, tuple(labels[s] for s in kept[i]), [times[s] for s in kept[i]])
        self.kept = kept
        if any(len(k) < c.size for k, c in zip(kept, self.clusters.clusters, strict=True)):
            self.take(narrowed(self.clusters, kept))

    def all_strategies(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """`chosen`, of the strategies that were not dropped, as indices of all."""
        return tuple(self.kept[c][s] if c < len(self.kept) else s for c, s in enumerate(chosen))

    def of_all(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """As `all_strategies`, also where one alone was left of every choice."""
        return self.all_strategies(chosen) if self.only is None else tuple(self.only)

    def choice(self, name: str, labels: Sequence[str], times: list[dict[int, float]]) -> int:
        self.choices.append((name, tuple(labels), times))
        return len(self.choices) - 1

    # ---- choices -------------------------------------------------------------------------------------------------

    def cluster_choices(self) -> None:
        by_name = {op.name: op for op in self.program.q.classes.ops}
        for c in self.clusters.clusters:
            check()
            times: list[dict[int, float]] = [defaultdict(float) for _ in range(c.size)]
            for name in c.members:
                op = by_name[name]
                stages = [int(op.direction == "backward")]
                if op.direction == "forward" and self.program.is_chained(op, self.clusters) and self.is_read_in_backward(op.out.name):
                    stages.append(1)  # what follows from a parameter is made again
                for stage in stages:
                    for s, spent in enumerate(self.times.of(op, stage)):
                        for a, t in spent.items():
                            times[s][a] += t
            self.choice(c.leader, c.labels, [dict(t) for t in times])

    def is_read_in_backward(self, rep: str) -> bool:
        """Whether an operator of backward reads a tensor of this class, also through what is made of it."""
        for op in self.program.q.classes.ops:
            if any(t.name == rep for t in op.inputs):
                if op.direction == "backward":
                    return True
                if self.program.is_chained(op, self.clusters) and self.is_read_in_backward(op.out.name):
                    return True
        return False

    def inputs_choice(self) -> None:
        parents = [p for p, n in self.mesh.parents.items() if n > 1]
        options: dict[tuple[Placement, ...], tuple[str, ...]] = {}
        for mask in reversed(range(2 ** len(parents))):
            data = tuple(c for i, p in enumerate(parents) if mask >> i & 1 for c in self.mesh.children(p) if self.mesh.axis_size(c) > 1)
            options[batch_placements(self.program.graph.inputs, data, self.mesh)] = data  # the fewest axes that split the batch so
        if self.only is not None:
            options = dict([list(options.items())[self.only[len(self.choices)]]])
        c = self.choice("inputs", [" ".join(d) or "R" for d in options.values()], [{} for _ in options])
        self.names.inputs, self.names.input_options = c, list(options.values())
        for i, t in enumerate(self.program.graph.inputs):
            self.wires.supply(t, c, [p[i] for p in options], both=True)

    def storage_choices(self) -> None:
        for name, t in self.program.q.classes.params.items():
            options = storages(t, self.mesh)
            if self.only is not None:
                options = [options[self.only[len(self.choices)]]]
            a = account(2, "compute")
            trained = t.name in self.program.trained
            times = []
            for o in options:
                mine = math.prod(o.placement.local_shape(self.mesh))
                times.append({a: self.program.q.count(t.name) * optimizer_s(self.cost, self.training, mine)} if trained else {})
            c = self.choice(f"storage of {name}", [o.label for o in options], times)
            self.names.storage[t.name] = (c, options)
            wire = self.wires.wire(t)
            wire.gathered = True
            end = End(c, tuple(wire.node(o.placement) for o in options))
            wire.supplies[0][end] = wire.supplies[1][end] = None

    # ---- values --------------------------------------------------------------------------------------------------

    def op(self, op: Op) -> None:
        if self.program.is_chained(op, self.clusters):
            return
        name = self.program.q.rep[op.name]
        c = self.clusters.of[name]
        direction = int(op.direction == "backward")
        for i, t in enumerate(op.inputs):
            self.wires.demand(t, c, [w[i] for w in self.clusters.want[name]], direction)
        for i, out in enumerate(op.outputs):
            if out is None:
                continue
            places = [m[i] for m in self.clusters.made[name]]
            wire = self.wires.wire(out)
            wire.supplies[direction][End(c, self.wires.nodes(wire, [p for p in places if p is not None]))] = None
            # A view is made again for nothing from what it is a view of; that is what is kept. What must be made again is not kept, if it can be.
            gone = op.tag(i) == MUST_RECOMPUTE and self.recomputable.recomputes(op, i)
            wire.policies = direction == 0 and not is_view(op, self.program.rules[op.name]) and not gone
            for p in self.program.params_of_grad.get(out.name, ()):
                choice, options = self.names.storage[self.program.q.group[self.program.graph.params[p].name]]
                wire.reduces = True
                wire.nbytes = out.numel * self.grad_bytes(p)
                wire.demands[direction][End(choice, tuple(wire.node(o.placement) for o in options))] = None

    def grad_bytes(self, param: str) -> int:
        dtype = self.training.reduce or self.program.graph.params[param].dtype
        return DTYPE_BYTES[dtype]

    def rerun(self, op: Op, segment: int) -> Rerun:
        """All operators of a class and segment run again, or none. Of a dropout whose mask alone is needed, no operand is."""
        c = self.clusters.of[op.name]
        reads: dict[tuple[int, tuple[int, ...]], None] = {}
        makes: dict[tuple[int, tuple[int, ...]], None] = {}
        for copy in self.program.copies[op.name]:
            if self.program.q.segment[copy.name] != segment:
                continue
            for i, t in enumerate(() if self.recomputable.needs_mask_alone(copy) else copy.inputs):
                if self.clusters.chain.get(self.program.q.tensor_rep[t.name], ("", ()))[1]:
                    continue  # parameters are at hand in backward; the chain is made again with its reader
                for wire in {w.name: w for w in map(self.wires.wire, (t, *self.recomputable.twins(copy, t)))}.values():
                    nodes = tuple(wire.node(w[i]) for w in self.clusters.want[op.name])
                    if (self.names.value_of[wire.name], nodes) not in reads:
                        wire.reads.append((len(self.names.reruns), nodes))
                        reads[self.names.value_of[wire.name], nodes] = None
            for i, out in enumerate(copy.outputs):
                if out is not None and self.recomputable.recomputes(copy, i):
                    wire = self.wires.wire(out)
                    places = [m[i] for m in self.clusters.made[op.name]]
                    made = tuple(wire.node(p) for p in places if p is not None)
                    assert len(made) == len(places), "an output is a tensor under every strategy"
                    makes[self.names.value_of[wire.name], made] = None
        self.names.reruns.append((op.name, segment))
        times, least = self.times.recompute(op, segment)
        return Rerun(op.name, c, times, tuple(reads), tuple(makes), relaxed_times=least)
