"""The plan, as people have it: it says itself, is compared, goes to a file and comes from one, and answers why. Torch-free, frozen.

What reads and writes files is imported where it is asked for: most programs look at no plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.plan.answers import Explanation, Frontier
from autopar.plan.decisions import Decisions
from autopar.plan.text import text

if TYPE_CHECKING:
    from autopar.timeline.expand import Timeline

_ASKED = ("_why", "_trace")  # what `explain` and `frontier` ask


@dataclass(frozen=True)
class Plan(Decisions):
    """A decided step on a mesh."""

    def explain(self, op: str, placement: str) -> Explanation:
        """Why this plan does not have `op` at `placement`, or what that would cost (`autopar.explain`, which see): the step is solved again.

        Raises AutoparError for a plan that comes from a file: it does not know the program.
        """
        why: Callable[[str, str], Explanation] | None = self.__dict__.get("_why")
        if why is None:
            raise AutoparError(
                "this plan was read from a file, copied or made by hand: what else there was to choose is not in it",
                fix="ask autopar.explain(model, inputs, cluster, mesh, op=..., placement=...), which plans again",
            )
        return why(op, placement)

    def frontier(self, points: int = 20) -> Frontier[Plan]:
        """Plans of the same step from the fastest, whatever memory it needs, to the one of least memory (`autopar.planner.frontier.Frontier`).

        points: at most so many. Raises AutoparError for a plan that comes from a file: it does not know the program.
        """
        trace: Callable[[int], Frontier[Plan]] | None = self.__dict__.get("_trace")
        if trace is None:
            raise AutoparError(
                "this plan was read from a file, copied or made by hand: it does not know the program, so there is nothing to plan again",
                fix="make the plan with autopar.plan(model, inputs, cluster, mesh) and ask that one, or use `autopar frontier`",
            )
        return trace(points)

    def explained_by(self, why: Callable[[str, str], Explanation], trace: Callable[[int], Frontier[Plan]] | None = None) -> Plan:
        """This plan, with what `explain` and `frontier` ask. It is no part of the plan: files do not have it, nor copies."""
        object.__setattr__(self, "_why", why)
        object.__setattr__(self, "_trace", trace)
        return self

    def answering_as(self, other: Plan) -> Plan:
        """This plan, which answers what `other` does: one of the same program."""
        for key in _ASKED:
            if key in other.__dict__:
                object.__setattr__(self, key, other.__dict__[key])
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all. Raises PlanError where the path cannot be written."""
        from autopar.plan import schema

        schema.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file that `save` or `autopar plan -o` wrote. Raises PlanError for anything else."""
        from autopar.plan import schema

        return schema.load(path, Plan)

    @staticmethod
    def loads(text: str | bytes, where: str = "") -> Plan:
        """The plan that the text of such a file describes. where: what to call the text's source. Raises PlanError for anything else."""
        from autopar.plan import schema

        return schema.loads(text, Plan, where)

    def diff(self, other: Plan) -> str:
        """Line by line what `other` decides otherwise; "" when they are equal."""
        from autopar.plan.diff import diff

        return diff(self, other)

    def timeline(self) -> Timeline:
        """Every call of the step when it runs, and the memory in use meanwhile. Raises AutoparError for a plan without a profile."""
        from autopar.timeline.expand import expand

        if self.profile is None and self.pipeline is not None:
            raise AutoparError(
                "a pipeline's plan has no timeline of its calls",
                fix="to_perfetto() has its ranks and their actions; plan a stage's mesh by itself, without pp, for its calls",
            )
        if self.profile is None:
            raise AutoparError(
                "this plan does not say what its step does in time: it is a hand layout's that was only propagated, or was made by an older autopar",
                fix='make the plan again, with autopar.plan(...) or `autopar plan ... -o FILE`; a hand layout with layout="fsdp"',
            )
        return expand(self.profile)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes `timeline()` as trace-event JSON, which https://ui.perfetto.dev and chrome://tracing open: a track for every resource, an event for every call, counters
        of memory; of a pipeline a track for every rank, and its actions. Raises AutoparError for a plan without a profile, or a path that cannot be written."""
        from autopar.plan.text import merged
        from autopar.timeline.perfetto import save

        title = f"{self.layout} on {self.cluster or 'a cluster'}, mesh {' x '.join(f'{n}={s}' for n, s in self.mesh_axes.items())}"
        if self.pipeline is not None:
            from autopar.plan.pipeline_trace import save as save_pipeline

            return save_pipeline(self, path, f"{title}, pipeline of {self.pipeline.ranks}")
        save(self.timeline(), path, title, lambda axes: " x ".join(merged(axes)))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _ASKED}

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """A block for every kind of layer, then collectives, fallbacks and predictions."""
        return text(self)
