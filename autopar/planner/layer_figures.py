"""What each layer of a plan takes: seconds of forward and of backward, bytes that it keeps for backward, bytes of its state, and what else is there while it runs.

They are read off the plan's timeline, which knows the layers of repeated stacks one by one, also where they have policies of their own. What is in no stack is shared out: seconds by the work of
its operators, memory to the layers of no stack that are next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.graph.graph import Graph
from autopar.pipeline import Lists
from autopar.plan.plan import Plan
from autopar.planner.cuts import LAYER, producers
from autopar.solver.fold import Folded, numbered
from autopar.timeline.expand import Timeline, expand, layer_of
from autopar.timeline.replay import COMPUTE

KEPT = "kept for backward"
OWN, GRADIENTS = ("parameters", "optimizer"), "gradients"


@dataclass(frozen=True)
class Copies:
    """Of a repeated stack: the layers of each copy."""

    name: str
    layers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LayerFigures:
    """By layer of the model, in order, of one micro-batch on a device of a stage's mesh. transient: the most that is there besides state and what is kept; stepping_bytes: of all layers, what the
    optimizer's step adds to their state."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    state_bytes: tuple[float, ...]
    transient_bytes: tuple[float, ...]
    stepping_bytes: float

    @staticmethod
    def of(
        plan: Plan,
        folded: Folded,
        layers: Sequence[str],
        work: tuple[Sequence[float], Sequence[float]],
        held: Sequence[float],
        part: float = 1.0,
    ) -> LayerFigures:
        """plan: with a profile, of all layers on one mesh. layers: of the model; work: FLOPs of each in forward and in backward; held: of each, elements of its parameters on a device; part:
        of the state that the profile has (`staged.of_a_stage`)."""
        assert plan.profile is not None
        timeline = expand(plan.profile)
        stacks = tuple(stacks_of(folded, layers))
        number = {layer: i for i, layer in enumerate(layers)}
        seconds = [
            _seconds(timeline, direction, stacks, number, mine) for direction, mine in zip(("forward", "backward"), work, strict=True)
        ]
        kept, transient, state, stepping = _memory(timeline, stacks, number)
        whole = sum(held) or 1.0
        return LayerFigures(
            tuple(seconds[0]), tuple(seconds[1]), tuple(kept), tuple(state / part * x / whole for x in held), tuple(transient), stepping / part
        )  # fmt: skip

    @property
    def both_s(self) -> list[float]:
        return [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]

    def rank_bytes(self, stage_of: Sequence[int], lists: Lists) -> list[float]:
        """The most that each rank of a pipeline holds. stage_of: by layer."""
        sums = [
            [sum(x for x, s in zip(of, stage_of, strict=True) if s == stage) for stage in range(lists.stages)]
            for of in (self.kept_bytes, self.state_bytes)
        ]
        transient = [
            max((x for x, s in zip(self.transient_bytes, stage_of, strict=True) if s == stage), default=0.0)
            for stage in range(lists.stages)
        ]
        state, total = sums[1], sum(self.state_bytes) or 1.0
        found = []
        for rank in range(len(lists.ranks)):
            mine = lists.of_rank(rank)
            own = sum(state[s] for s in mine)
            running = max((sum(n * sums[0][s] for s, n in held.items()) for held in lists.fullest(rank)), default=0.0) + max(
                (transient[s] for s in mine), default=0.0
            )
            found.append(own + max(running, self.stepping_bytes * own / total))
        return found


def stacks_of(folded: Folded, layers: Sequence[str]) -> Iterator[Copies]:
    """The repeated stacks whose copies are whole layers of the model, as the whole program has them."""
    known = set(layers)
    for stack, copies in zip(folded.stacks, folded.copies, strict=True):
        ways = list(numbered(folded.graph, stack).values())
        if not ways:
            continue
        before, step = max(((w.before, w.step) for w in ways), key=[(w.before, w.step) for w in ways].count)
        first = min(w.first for w in ways if (w.before, w.step) == (before, step))
        found = tuple(tuple(f"{before}{first + k * step + j}" for j in range(step)) for k in range(copies))
        if all(layer in known for copy in found for layer in copy):
            yield Copies(stack.name, found)


def held_elements(plan: Plan, graph: Graph, layers: Sequence[str], unit: Mapping[str, int], last: int) -> list[float]:
    """By layer, elements of parameters that a device stores. What is of no layer is with the first or the last one, as it is read there; with both where both read it. unit: operator of forward -> number
    of its captured layer, of which the last is `last`."""
    number = {layer: i for i, layer in enumerate(layers)}
    found = [0.0] * len(layers)
    ends = _read_at_ends(graph, unit, last)
    for name, c in plan.params.items():
        local = float(math.prod(c.storage.local_shape(plan.mesh)))
        layer = LAYER.match(name)
        if layer and layer[1] in number:
            found[number[layer[1]]] += local
        elif layers:
            for at in ends.get(name, (0,)):
                found[at] += local
    return found


def _read_at_ends(graph: Graph, unit: Mapping[str, int], last: int) -> dict[str, tuple[int, ...]]:
    """Parameter -> 0 and -1: that the first and the last layer read it, through what is of no layer."""
    reads: dict[str, set[int]] = defaultdict(set)
    of = {t.name: {n} for n, t in graph.params.items()}
    for op in graph.ops:
        if op.direction != "forward":
            continue
        if op.name in unit:
            for name in {p for t in op.inputs for p in of.get(t.name, of.get(t.name.split(".")[0], ()))}:
                reads[name].add(unit[op.name])
        elif mine := {p for t in op.inputs for p in of.get(t.name, ())} | {p for a in producers(op) for p in of.get(a, ())}:
            of[op.name] = mine
    return {name: tuple(dict.fromkeys(0 if 2 * at < last else -1 for at in sorted(found))) for name, found in reads.items()}


def _copies_by_label(stacks: Sequence[Copies], timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """What the timeline calls a copy -> its layers."""
    per_copy = {s.name: len(s.layers[0]) for s in stacks if s.layers}
    return {layer_of(s.name, per_copy[s.name], k): copy for s in stacks for k, copy in enumerate(s.layers)}


def _seconds(timeline: Timeline, direction: str, stacks: Sequence[Copies], number: Mapping[str, int], work: Sequence[float]) -> list[float]:
    """Of compute, and of what it waits for."""
    by_copy: dict[str, float] = defaultdict(float)
    outside = 0.0
    known = _copies_by_label(stacks, timeline)
    for e in timeline.events:
        if e.stage != direction:
            continue
        busy = e.exposed_s + (e.seconds if e.slowdown or e.what.stream == COMPUTE else 0.0)
        if e.layer in known:
            by_copy[e.layer] += busy
        else:
            outside += busy
    found, rest = [0.0] * len(number), list(work)
    for s in stacks:
        # What a layer of a stack does besides, such as the embedding in front of the first, is more than the least of its kind.
        least = [min(work[number[copy[j]]] for copy in s.layers) for j in range(len(s.layers[0]))] if s.layers else []
        whole = sum(least) or 1.0
        for copy in s.layers:
            takes = by_copy.get(next((label for label, of in known.items() if of is copy), ""), 0.0)
            for layer, w in zip(copy, least, strict=True):
                found[number[layer]] += takes * w / whole
                rest[number[layer]] = max(0.0, rest[number[layer]] - w)
    total = sum(rest)
    for i, w in enumerate(rest):
        found[i] += outside * (w / total if total else 1 / len(rest))
    return found


def _memory(timeline: Timeline, stacks: Sequence[Copies], number: Mapping[str, int]) -> tuple[list[float], list[float], float, float]:
    """By layer, what it keeps and what else there is; then the state of all layers, and what the optimizer's step adds to it."""
    known = _copies_by_label(stacks, timeline)
    inside = {number[layer] for s in stacks for copy in s.layers for layer in copy} or {0}

    def beside(i: int, by: int) -> list[int]:
        """The layers of no stack next to a layer of one, in a direction; itself where there are none."""
        found: list[int] = []
        while 0 <= (i + by * (len(found) + 1)) < len(number) and i + by * (len(found) + 1) not in inside:
            found.append(i + by * (len(found) + 1))
        return found or [i]

    kept, transient = [0.0] * len(number), [0.0] * len(number)
    running = [m for m in timeline.moments if m.stage != "optimizer"]
    stays = min((m.nbytes.get("gathered parameters", 0) for m in running), default=0)
    # Gradients that wait for the optimizer; what is there beside them is on its way.
    waiting = max((m.nbytes.get(GRADIENTS, 0) for m in (*running[:1], *running[-1:])), default=0)
    state = float(max((sum(m.nbytes.get(kind, 0) for kind in OWN) for m in running), default=0) + waiting + stays)
    # What is of no stack comes before the first layer of one, then behind the last that was run; in backward the other way round.
    outside = {"forward": beside(min(inside), -1), "backward": beside(max(inside), 1)}
    at, last = outside["forward"], 0.0
    for m in running:
        mine, here = known.get(m.layer), float(m.nbytes.get(KEPT, 0))
        now = outside[m.stage] if mine is None else [number[layer] for layer in mine]
        if mine is not None:
            outside[m.stage] = beside(max(now), 1) if m.stage == "forward" else beside(min(now), -1)
        if m.stage == "forward":
            for i in at:  # what is kept since the moment before
                kept[i] += (here - last) / len(at)
            at, last = now, here
        own = sum(m.nbytes.get(kind, 0) for kind in OWN) + min(waiting, m.nbytes.get(GRADIENTS, 0)) + stays
        besides = float(m.total - here - own)
        for i in now:
            transient[i] = max(transient[i], besides)
    turn = next((float(m.nbytes.get(KEPT, 0)) for m in running if m.stage == "backward"), last)
    for i in at:
        kept[i] += max(0.0, turn - last) / len(at)
    stepping = max((float(m.total) for m in timeline.moments if m.stage == "optimizer"), default=state) - state
    return [max(0.0, k) for k in kept], transient, state, max(0.0, stepping)
