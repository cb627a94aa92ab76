"""One folded step on one mesh while it is being planned: what is formulated of it, what is told of it, and the time that is left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.lower_bound import lower_bound_problem
from autopar.planner.formulation.more_often import Bounding
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.merged_axes import axes_said
from autopar.planner.views import View, view
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.problem import Problem
from autopar.solver.solve import Limits, Solution
from autopar.text.stages import Begun, Note
from autopar.text.times import format_time

FIRST_S = 2.0  # of the solver, for a first answer, whatever the time
LAST = 0.75  # of the time: then the whole program is given up for one that has an answer soon
OnProgress = Callable[[str, float], None]
Restrict = Callable[[Problem, Names, Mapping[str, Rule], Mesh], Problem]


class Attempt:
    """One folded step on one mesh. restrict: takes strategies away (a layout). since: when planning began (`time.perf_counter`), if before."""

    def __init__(
        self,
        folded: Folded,
        mesh: Mesh,
        cluster: Cluster,
        training: TrainingConfig,
        limits: Limits | None = None,
        on_progress: OnProgress | None = None,
        restrict: Restrict | None = None,
        since: float | None = None,
    ) -> None:
        self.folded, self.mesh, self.cluster, self.training = folded, mesh, cluster, training
        self.limits, self.on_progress, self.restrict = limits or Limits(), on_progress or (lambda stage, seconds: None), restrict
        self.start = time.perf_counter() if since is None else since
        self.is_started = since is not None
        self.has_answer = self.is_first = False
        self.bounds_more = False  # whether what was solved is to bound plans of more micro-batches too
        self.last: tuple[Mesh, Formulator, Problem] | None = None  # what was formulated last, of all that may be decided
        # Programs whose relaxations bound all plans: of all axes; and what the coarse bound is made of.
        self.bounding: Bounding | None = None
        self.bounding_more: Bounding | None = None  # of as many micro-batches and more
        self.coarse: tuple[Formulated, Problem, Formulator] | None = None
        self.coarse_problems: dict[Instead | None, Problem] = {}

    def view(self, segments: Mapping[str, Sequence[int]] | None = None) -> View:
        """Of the graph with its layers cut so; without, the same one each time."""
        return view(self.folded, self.mesh, self.cluster, self.training.fuses, self.training.imbalance, segments)

    def formulated(
        self,
        v: View,
        mesh: Mesh,
        only: Sequence[int] | None = None,
        room_s: float = math.inf,
        trim: Callable[[Problem], Problem] = lambda p: p,
        training: TrainingConfig | None = None,
    ) -> tuple[Formulator, Problem]:
        began = time.perf_counter()
        if only is None:
            self.begin(f"formulate {axes_said(mesh)}")
        f = Formulator(v.q, v.rules, mesh, v.cost, training or self.training, only)
        problem, names = f.run(room_s, trim)
        if self.restrict is not None and only is None:
            problem = self.restrict(problem, names, v.rules, mesh)
        if only is None:
            if room_s == math.inf and training is None:
                self.last = mesh, f, problem
            self.on_progress(f"formulate {axes_said(mesh)}", time.perf_counter() - began)
        return f, problem

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        self.begin(stage)
        try:
            yield
        finally:
            self.on_progress(stage, time.perf_counter() - began)

    def coarse_problem(self, instead: Instead | None = None) -> Problem:
        """The program of the coarse bound (`autopar.planner.formulation.lower_bound`), or that of the step's other form."""
        assert self.coarse is not None
        if instead not in self.coarse_problems:
            f, merged, whole = self.coarse
            graph = self.view().shrunk.graph
            made = lower_bound_problem(f, merged, whole, () if instead is None else instead.choices(whole.names, graph))
            self.coarse_problems[instead] = made if instead is None else instead.problem(made, f.names, graph)
        return self.coarse_problems[instead]

    def begin(self, stage: str) -> None:
        self.on_progress(Begun(stage), 0.0)

    def so_far(self, mesh: Mesh, bound_s: float, best: Found | None) -> None:
        """Tells what is known of the step on `mesh`, whose axes may be merged: no plan takes less than the one, the other is the best that was found."""
        on = "" if mesh.parents == self.mesh.parents else f"on {axes_said(mesh)} "
        each = " a micro-batch" if self.training.micro_batches > 1 else ""
        bound = f"{on}no plan takes less than {format_time(bound_s)}{each}" if math.isfinite(bound_s) and bound_s > 0 else "no bound yet"
        if best is None or not isinstance(best.answer, Solution):
            self.on_progress(Note(f"{bound}; none was found yet"), 0.0)
        else:
            gap = max(0.0, 1 - bound_s / best.answer.objective_s) if bound_s > 0 else 1.0
            self.on_progress(Note(f"{bound}; the best so far {format_time(best.answer.objective_s)}, within {gap:.2%}"), 0.0)

    @property
    def left(self) -> Limits:
        """For a call of the solver. Until there is an answer, some time in any case, unless the attempt may fail."""
        return replace(
            self.limits, seconds=max(0.0 if self.has_answer or self.limits.may_fail else FIRST_S, self.until - time.perf_counter())
        )

    @property
    def until(self) -> float:
        """What is tried first leaves some time for what is soon found."""
        return self.start + self.limits.seconds * (LAST if self.is_first and not self.has_answer else 1.0)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.until
