"""Relaxed rows. Policies stand for all layers of a segment; where layers may each have their own, a policy between 0 and 1 is their mean, and a row holds for it
only as far as it does not depend on whose policy it is. Outside of the layers it does not, but for what is on its way from or to the device: that is one
layer's, which may keep nothing so. In the last two layers, of a tensor that k of the n have freed
the others keep at least n y - k, and at least nothing; what a layer makes again or brings from where it is kept may be nothing. Of what layers hand on one
fewer is needed than layers run again: the first reads what comes from outside. And what runs again takes as long as in the layer where it takes least
(`Rerun.relaxed_times`). So much is a bound for any policies (`autopar.planner.stages`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.solver.problem import DEVICE, Key


class RowRelaxation:
    """Makes relaxed rows of `rows`'. rests: of `Problem.rests`, with their places."""

    def __init__(self, life: Lifetimes) -> None:
        self.life = life
        self.rests: dict[tuple[tuple[Key, float], ...], int] = {}

    def row(self, terms: dict[Key, float], inside: bool) -> dict[Key, float]:
        """What a row outside of the layers, or of the last ones (inside), says of policies that are means over all layers. (Of others it says little.)"""
        out: dict[Key, float] = defaultdict(float)
        freed: dict[int, float] = defaultdict(float)  # value -> of how many layers it is gone, or need not be kept
        gone: dict[int, float] = {}
        for key in terms:
            if key[0] == "y" and key[1] in self.handed_on:
                freed[key[1]] = 1.0
        if not inside:
            out.update((key, nbytes) for key, nbytes in terms.items() if not self.is_one_layers(key))
        for key, nbytes in terms.items() if inside else ():
            if key[0] == "x" or (key[0] in ("e", "b") and (key[2] == 0 or key[1] in self.same_for_all_layers)):
                out[key] += nbytes
            elif key[0] == "y":
                value = self.life.problem.values[key[1]]
                policy = value.policies[key[2]]
                times, each = self.life.program.q.count(value.name), self.life.sizes(key[1])[policy.node]
                if policy.medium == DEVICE and nbytes > (times - 2.001) * each:
                    out[key] = times * each
                    gone[key[1]] = max(gone.get(key[1], 0.0), times - nbytes / each)
        for v, n in gone.items():
            freed[v] += n
        kept: dict[int, dict[Key, float]] = defaultdict(dict)
        for key in [key for key in out if key[0] == "y" and key[1] in freed]:
            kept[key[1]][key] = out.pop(key)
        for v, n in freed.items():
            forward, sizes, rest = self.life.problem.values[v].forward, self.life.sizes(v), kept[v]
            if n <= 1e-3 or not rest:
                out.update(rest)
                continue
            places = {policy.node for policy in self.life.problem.values[v].policies}
            for end in dict.fromkeys((*forward.supplies, *forward.demands)):  # it was kept at one of these
                for s, node in enumerate(end.nodes):
                    if node in places:
                        rest["x", end.choice, s] = rest.get(("x", end.choice, s), 0.0) - n * sizes[node]
            # Not kept at all, it has freed nothing that others hold.
            which = self.rests.setdefault(tuple(sorted(rest.items())), len(self.rests))
            out["s", which, 0] = 1.0
        return out

    def is_one_layers(self, key: Key) -> bool:
        """Whether `key` is of what is on its way from or to the device, at some position one tensor alone of those that layers keep so."""
        if key[0] != "y":
            return False
        value = self.life.problem.values[key[1]]
        return value.policies[key[2]].medium != DEVICE and self.life.program.q.count(value.name) > 1

    @cached_property
    def handed_on(self) -> set[int]:
        """Values that layers hand on to the next. What runs again in the first layer reads what comes from outside instead, so of them one fewer is
        needed than layers run again."""
        f = self.life.f
        value_of = f.names.value_of
        tensors = (
            t
            for op in f.program.graph.ops
            if op.direction == "forward"
            for t in op.outputs
            if t is not None and f.recomputable.leaves_its_copy(op, t)
        )
        return {value_of[f.program.q.group[t.name]] for t in tensors if f.program.q.group[t.name] in value_of}

    @cached_property
    def same_for_all_layers(self) -> set[int]:
        """Values of which backward brings the same whatever is made again: they are not kept, and reruns read them as backward does."""
        flows = {v: value.backward for v, value in enumerate(self.life.problem.values) if not value.policies and v not in self.life.remade}
        present = {v: {(end.choice, end.nodes) for end in flow.demands} for v, flow in flows.items() if flow is not None}
        other = {v for r in self.life.problem.reruns for v, nodes in r.reads if (r.choice, nodes) not in present.get(v, ())}
        return present.keys() - other
