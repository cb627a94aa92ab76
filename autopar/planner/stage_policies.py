"""Policies of a pipeline's stages: what each keeps for backward and what it makes again, by the micro-batches that it has in flight.

A plan of a stage's mesh (`staged.py`) has the same policies on all stages, those of the rank that holds most. Here, at the strategies of that plan, the program of all layers is solved under several
budgets, each with one policy for all layers; layers are dealt to stages with two of these policies each (`dealing.py`); the layers of every stack are cut into segments accordingly, and what comes of it is
priced, and its memory counted, as any other plan's, rank by rank (`layer_figures.py`).

What is kept away from the device is the same on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from autopar.pipeline import Lists, Times, replay
from autopar.plan.plan import Plan
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.dealing import Dealing, Dealt, Policy, hull
from autopar.planner.formulation.apply import used_arcs
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.symmetry import SymmetryClasses
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.layer_figures import Copies, LayerFigures, stacks_of
from autopar.planner.merged_decision import Merged
from autopar.planner.planning import Planned, plan_of
from autopar.planner.staged import of_a_stage
from autopar.planner.views import View
from autopar.solver.evaluate import evaluate, tidy
from autopar.solver.fold import Folded
from autopar.solver.problem import Problem, Value
from autopar.solver.solve import NoAnswer, Solution, whole

# What a rank holds, of the activations of all layers of a micro-batch, for which a policy is looked for; and the memory in which any would do.
SHARES, MOST = (1.6, 1.25, 1.0, 0.7, 0.4), 64
OFTEN = 3  # dealt again with less memory, where what came of it does not fit


@dataclass(frozen=True)
class Unit:
    """Layers that are dealt together: a copy of a stack, or a layer of none. layers: their numbers; stack: its name, "" for none."""

    layers: tuple[int, ...]
    stack: str = ""


@dataclass(frozen=True)
class Option:
    """One policy for all layers: an answer of the program whose layers are not cut."""

    solution: Solution
    figures: LayerFigures


@dataclass(frozen=True)
class ByStage:
    """plan: of all layers on a stage's mesh; stages: the layers of each, by number."""

    plan: Plan
    figures: LayerFigures
    stages: tuple[tuple[int, ...], ...]


def units_of(layers: Sequence[str], stacks: Sequence[Copies]) -> list[Unit] | None:
    """In the layers' order; None where copies of a stack are not neighbouring layers."""
    number = {layer: i for i, layer in enumerate(layers)}
    found = [Unit(tuple(number[layer] for layer in copy), s.name) for s in stacks for copy in s.layers]
    inside = {i for u in found for i in u.layers}
    found += [Unit((i,)) for i in range(len(layers)) if i not in inside]
    found.sort(key=lambda u: u.layers)
    return found if [i for u in found for i in u.layers] == list(range(len(layers))) else None


class StagePolicies:
    """planned: of all layers, at whose strategies policies are looked for; training: of the step, for the whole of a device's memory; figures: what layers take by a plan."""

    def __init__(
        self,
        planned: Planned,
        folded: Folded,
        training: TrainingConfig,
        layers: Sequence[str],
        figures: Callable[[Plan, float], LayerFigures | None],
        ranks: int,
    ) -> None:
        self.planned, self.folded, self.training, self.layers, self.figures = planned, folded, training, layers, figures
        self.stages, self.done = planned.step.stages, planned.found
        self.stacks = tuple(stacks_of(folded, layers))
        # As much of the state as a rank has on average: else the optimizer's step on all of it would be what needs the most.
        self.part = 1 / ranks
        self.of_part = of_a_stage(training, ranks, 1, 1)

    def find(self, lists: Lists, hop_s: tuple[float, ...], weight: Sequence[float]) -> ByStage | None:
        """The stages by `lists`, with policies of their own; None where there are none, or the layers do not allow it. hop_s: by rank; weight: by stage, of its backward what no other stage waits for."""
        units, options = self.units, self.options
        if units is None or not options or len(units) < lists.stages:
            return None

        def price(dealt: Sequence[Dealt]) -> float:
            backward = tuple(d.backward_s for d in dealt)
            times = Times(
                tuple(d.forward_s for d in dealt), backward, hop_s, weight_s=tuple(w * b for w, b in zip(weight, backward, strict=True))
            )
            return replay(lists, times).total_s

        budget = self.training.budget_bytes
        with without_garbage_collection():
            for _ in range(OFTEN):
                dealt = Dealing(*self.dealt_from(options, units), lists, budget, price).best()
                made = None if dealt is None else self.made(options, units, dealt)
                if made is None:
                    return None
                stage_of = [s for i in range(len(self.layers)) for s, mine in enumerate(made.stages) if i in mine]
                most = max(made.figures.rank_bytes(stage_of, lists))
                if most <= self.training.budget_bytes:
                    return made
                budget -= 1.05 * (most - self.training.budget_bytes)
        return None

    @cached_property
    def units(self) -> list[Unit] | None:
        return units_of(self.layers, self.stacks) if self.stacks and self.done.strategies else None

    @cached_property
    def uncut(self) -> tuple[Formulator, Problem]:
        return self.formulated(self.stages.view())

    def formulated(self, view: View) -> tuple[Formulator, Problem]:
        return self.stages.formulated(
            view, self.done.mesh, only=self.done.strategies, trim=lambda p: moved_as(p, view.q, self.done), training=self.of_part
        )

    # ---- policies for all layers -----------------------------------------------------------------------------------

    @cached_property
    def options(self) -> list[Option]:
        """The one that keeps least first; each keeps more than the one before and is faster."""
        with without_garbage_collection():
            first = self.option(MOST * self.training.budget_bytes)
            if first is None:
                return []
            state, transient = self.part * sum(first.figures.state_bytes), max(first.figures.transient_bytes)
            room = max(0.0, self.training.budget_bytes - state - transient)
            more = (self.option(state + transient + room / share) for share in (*SHARES, self.part))
            found = [first, *(o for o in more if o is not None)]
        kinds = list({(tuple(sorted(o.solution.decision.kept.items())), o.solution.decision.rerun): o for o in found}.values())
        points = [(sum(o.figures.kept_bytes), sum(o.figures.both_s)) for o in kinds]
        return [kinds[k] for k in hull(points)]

    def option(self, budget_bytes: float) -> Option | None:
        f, problem = self.uncut
        problem = replace(problem, budget_bytes=budget_bytes)
        try:
            answer = whole(problem, self.stages.left)
        except NoAnswer:
            return None
        if answer is None:
            return None
        view = self.stages.view()
        found = Found(self.done.mesh, problem, f.names, view.shrunk, view.rules, answer, f.formulated(), self.done.strategies)
        figures = self.figures(plan_of(self.planned.step, found, budget_bytes), self.part)
        return None if figures is None else Option(answer, figures)

    def dealt_from(self, options: Sequence[Option], units: Sequence[Unit]) -> tuple[list[Policy], list[float]]:
        def by_unit(of: Sequence[float], joined: Callable[[list[float]], float] = sum) -> tuple[float, ...]:
            return tuple(joined([of[i] for i in u.layers]) for u in units)

        made = [
            Policy(by_unit(f.forward_s), by_unit(f.backward_s), by_unit(f.kept_bytes), by_unit(f.transient_bytes, max))
            for f in (o.figures for o in options)
        ]
        return made, list(by_unit(options[0].figures.state_bytes))

    # ---- policies by stage ---------------------------------------------------------------------------------------------

    def made(self, options: Sequence[Option], units: Sequence[Unit], dealt: Sequence[Dealt]) -> ByStage | None:
        """The plan with layers as they were dealt."""
        f, problem = self.uncut
        policy: list[int] = []  # of each unit
        for d in dealt:
            start = len(policy)
            policy += [d.first] * d.light + [d.rest] * (d.end - start - d.light)
        runs = {s.name: _runs([p for p, u in zip(policy, units, strict=True) if u.stack == s.name]) for s in self.stacks}
        view = self.stages.view({name: [n for n, _ in mine] for name, mine in runs.items() if len(mine) > 1})
        g, cut = self.formulated(view)
        of_segment = {name: [p for _, p in mine] for name, mine in runs.items()}
        decision = Merged(
            f.formulated(), problem, [o.solution.decision for o in options], g.formulated(), cut, of_segment, (policy[0], policy[-1])
        ).run()
        if decision is None:
            return None
        decision = tidy(cut, decision)
        price = evaluate(cut, decision)
        if price.unmet:
            return None
        # The bound is that of the plan whose stages are alike: an option's is of its strategies alone.
        answer = replace(
            self.planned.solution, decision=decision, price=price, bound_s=min(self.planned.solution.bound_s, price.objective_s)
        )
        found = Found(self.done.mesh, cut, g.names, view.shrunk, view.rules, answer, g.formulated(), self.done.strategies)
        plan = plan_of(self.planned.step, found, self.training.budget_bytes)
        ends = [0, *(d.end for d in dealt)]
        stages = tuple(tuple(i for u in units[a:b] for i in u.layers) for a, b in pairwise(ends))
        figures = self.figures(plan, self.part)
        return None if figures is None else ByStage(plan, figures, stages)


def _runs(policy: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of one policy: how many, and which."""
    out: list[tuple[int, int]] = []
    for p in policy:
        out = [*out[:-1], (out[-1][0] + 1, p)] if out and out[-1][1] == p else [*out, (1, p)]
    return out


def moved_as(problem: Problem, q: SymmetryClasses, done: Found) -> Problem:
    """`problem` with parameters gathered as often, and gradients added up where they are in `done`: all layers share that. What stays gathered there may stay."""
    assert isinstance(done.answer, Solution)
    decision, rep = done.answer.decision, done.formulated.program.q.tensor_rep
    names = [rep[value.name] for value in done.problem.values]
    kept = {names[v] for v in decision.kept}
    stays, ways = set[str](), dict[str, set[int]]()
    for v, direction, arc in used_arcs(done.problem, decision):
        if direction == 0 and arc.stays:
            stays.add(names[v])
        elif direction == 1:
            ways.setdefault(names[v], set()).add(arc.way)

    def as_there(value: Value) -> Value:
        name, forward, backward, policies = q.tensor_rep[value.name], value.forward, value.backward, value.policies
        if name in done.names.storage:
            forward = replace(forward, arcs=tuple(a for a in forward.arcs if not a.stays or name in stays))
            policies = policies if name in kept else ()
        if backward is not None and name in ways:
            backward = replace(backward, arcs=tuple(a for a in backward.arcs if a.way in ways[name]))
        return replace(value, forward=forward, backward=backward, policies=policies)

    return replace(problem, values=tuple(map(as_there, problem.values)))
