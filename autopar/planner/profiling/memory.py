"""Memory by kind over the step: the rows of the integer program (`autopar.planner.formulation.memory_rows`) at the decision that was made, told apart by what holds it.

The same spans are added up, those of variables that are on: so the largest sum is the predicted peak. Of a copy in the middle of a stack, what the copies before it
keep and what those behind it have made is a slope (`Growth`): bytes are affine in the copy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.formulation.memory_rows import BROUGHT, Rows
from autopar.planner.profiling.places import Places
from autopar.planner.storage import batch_placements
from autopar.solver.evaluate import variables_on
from autopar.solver.problem import DEVICE, Decision, Key
from autopar.timeline.profile import KINDS, REPEATS, RUN, Growth, Sample, Spot

PARAMETERS, OPTIMIZER, GRADIENTS, BUFFERS, GATHERED, KEPT, AGAIN_MADE, IN_USE, MOVING = range(len(KINDS))


@dataclass(frozen=True)
class Held:
    """Bytes of a kind from one position to another. times: copies of the program that hold as much, one behind the other; middle: which of the places that stand for
    several they are of (-1: none); grows: held from where it is made in backward to the end. reloaded: it comes back from another medium. last_call: only where gradients
    are reduced; chained: made again for something else that is made again."""

    kind: int
    nbytes: float
    first: int
    last: int
    times: int = 1
    middle: int = -1
    grows: bool = False
    reloaded: bool = False
    last_call: bool = False
    chained: bool = False


class Memory(Rows):
    """samples, growths: of a profile."""

    def find(self, decision: Decision, places: Places) -> tuple[list[Sample], list[Growth]]:
        self.decision, self.places = decision, places
        self.held: list[Held] = []
        self.known: dict[tuple[int, ...], np.ndarray] = {}
        self.tensor_now, self.value_now = "", -1
        problem = self.problem
        self.on = variables_on(problem, decision)
        self.static, step = self._static()
        for name, t in self.program.graph.params.items():
            grad = self.program.graph.grads.get(name)
            if self.program.q.tensor_rep[t.name] in self.program.trained and grad is not None:
                c, options = self.f.names.storage[self.program.q.group[t.name]]
                n = math.prod(options[decision.strategies[c]].placement.local_shape(self.mesh))
                self.tensor_now = grad
                nbytes, made = n * self.f.training.master_bytes, self.life.grad_made(grad)
                self.add(("x", c, decision.strategies[c]), nbytes, made, self.life.end - 1, t.name, True, True)
                if self.f.training.micro_batches > 1:
                    self.accumulated(grad, self.program.q.tensor_times[t.name])
        for v in range(len(problem.values)):
            self.value_now = v
            self.value(v)
        self.value_now, self.tensor_now = -1, ""
        self.workspace()
        during = self._again()
        names = list(self.columns.index)
        for k, first, last, nbytes in self.always.plain:  # what `accumulated` and `staying` add by themselves
            if self.on(names[k]):
                self._hold(GATHERED if names[k][:1] == ("e",) and names[k][2] == 0 else GRADIENTS, nbytes, first, last)
        found = self._samples(step, during), self._growths()
        if self.f.training.micro_batches > 1:
            # Of the calls for one step of the optimizer the last reduces gradients, the others add to them: the one that needs more is shown.
            whole, self.held = self.held, [h for h in self.held if not h.last_call]
            other = self._samples(step, during), self._growths()
            found = max(found, other, key=_peak)
            self.held = whole
        return found

    # ---- what is held ------------------------------------------------------------------------------------------------

    def tensor(self, v: int, tensor: str) -> None:
        self.tensor_now = tensor
        super().tensor(v, tensor)

    def add(self, key: Key, nbytes: float, first: int, last: int, tensor: str = "", grows: bool = False, last_call: bool = False) -> None:
        if key[0] == BROUGHT:
            for arc, size in self.arcs_of(key):
                self.add(arc, nbytes * size, first, last, tensor, grows, last_call)
        elif last >= first and nbytes and self.on(key):
            kind = GRADIENTS if grows else self._kind(key, first)
            self._hold(kind, nbytes, first, last, tensor, grows, kind == MOVING, last_call)

    def _hold(
        self,
        kind: int,
        nbytes: float,
        first: int,
        last: int,
        tensor: str = "",
        grows: bool = False,
        moving: bool = False,
        last_call: bool = False,
    ) -> None:
        times = self.program.q.tensor_times[tensor] if tensor else 1
        middle = self.columns.middle_of.get(tensor.split(".")[0], self.columns.middle_of.get(tensor, -1)) if tensor else -1
        last = min(last, self.life.end - 1)
        self.held.append(
            Held(kind, nbytes, first, last, times if middle >= 0 else 1, middle if times > 1 else -1, grows, moving, last_call)
        )

    def _kind(self, key: Key, first: int) -> int:
        if self.tensor_now in self.program.param_of:
            return GATHERED
        if self.tensor_now in self.program.params_of_grad:
            return GRADIENTS
        if key[0] == "y":
            return KEPT if self.problem.values[key[1]].policies[key[2]].medium == DEVICE else MOVING
        if key[0] == "r":
            return AGAIN_MADE
        kept = self.value_now >= 0 and any(
            self.problem.values[self.value_now].policies[k].medium == DEVICE for k in self.decision.kept.get(self.value_now, ())
        )
        return KEPT if key[0] == "x" and kept and first < self.life.turn else IN_USE

    def _static(self) -> tuple[dict[int, float], dict[int, float]]:
        """What is there throughout, and what the optimizer's step adds."""
        s, x, program = self.f.training, self.decision.strategies, self.program
        static: dict[int, float] = defaultdict(float)
        step: dict[int, float] = defaultdict(float)
        for t in program.graph.params.values():
            c, options = self.f.names.storage[program.q.group[t.name]]
            n = program.q.tensor_times[t.name] * math.prod(options[x[c]].placement.local_shape(self.mesh))
            static[PARAMETERS] += n * s.master_bytes
            if program.q.tensor_rep[t.name] in program.trained:
                static[OPTIMIZER] += n * s.state_bytes
                step[GRADIENTS] += n * s.master_bytes
                step[OPTIMIZER] += n * s.step_bytes
        static[BUFFERS] += sum(t.nbytes for t in program.graph.buffers.values())
        placed = batch_placements(program.graph.inputs, self.f.names.input_options[x[self.f.names.inputs]], self.mesh)
        static[BUFFERS] += sum(t.nbytes * p.share(self.mesh) for t, p in zip(program.graph.inputs, placed, strict=True))
        return static, step

    def _again(self) -> list[tuple[int, str, float]]:
        """What runs again: its spans are held; of calls that need room of their own, (position, operator, bytes that live during it besides what lives before)."""
        if self.chains is None:
            return []
        stand = list(self.chains.stand())
        calls = list(self.chains.calls())
        problem = replace(self.problem, events=tuple(self.chains.events.known))
        on = variables_on(problem, self.decision)
        for key, nbytes, first, last in stand:
            if on(key):
                self.held.append(Held(AGAIN_MADE, nbytes, first, min(last, self.life.end - 1), chained=True))
        return [(p, op.name, sum(n for key, n in live.items() if on(key))) for p, op, live in calls if _runs(self, op.name)]

    # ---- as samples --------------------------------------------------------------------------------------------------

    def _samples(self, step: dict[int, float], during: list[tuple[int, str, float]]) -> list[Sample]:
        graph, places = self.program.graph, self.places
        whole, starting = self._by_position()
        out = []
        for i, op in enumerate(graph.ops):
            if self.life.writes(op):
                home = places.home(op.name)
                out.append(Sample(home.first, home.times, places.spot(home, i, RUN), _whole(dict(enumerate(whole[:, i])))))
        for p, name, live in during:
            home = places.home(graph.ops[p].name)
            held = dict(enumerate(whole[:, p] - starting[:, p]))
            held[AGAIN_MADE] += live
            out.append(Sample(home.first, home.times, places.spot(home, p, REPEATS, self.life.position[name]), _whole(held)))
        total = {k: self.static.get(k, 0.0) + step.get(k, 0.0) for k in {*self.static, *step}}
        out.append(Sample(0, 1, Spot(len(places.regions) - 1, 0, 0, RUN), _whole(total)))
        return out

    def _by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Kind x position: bytes, in a middle place those of the copy that comes first; and what of them is not there, or is counted otherwise, while something is made
        again for that position."""
        end = self.life.end
        whole, starting = np.zeros((len(KINDS), end + 1)), np.zeros((len(KINDS), end + 1))
        for h in self.held:
            whole[h.kind, h.first] += h.nbytes
            whole[h.kind, h.last + 1] -= h.nbytes
            if h.chained:
                starting[h.kind, h.first : h.last + 1] += h.nbytes
            elif not h.reloaded:
                starting[h.kind, h.first] += h.nbytes
        whole = np.cumsum(whole, axis=1)
        for h in self.held:
            if h.middle >= 0:
                whole[h.kind] += (h.times - 1) * h.nbytes * self._others(h.middle, h.grows, h.first, h.last)
        for k, n in self.static.items():
            whole[k] += n
        return whole, starting

    def _others(self, middle: int, grows: bool, first: int, last: int) -> np.ndarray:
        """Where the other copies of the first one in a middle place hold what it does: 1 or 0 by position."""
        forward, backward = self.columns.middle[middle]
        key = (middle, grows) if backward else (middle, grows, first, last)
        if key not in self.known:
            at = np.zeros(self.life.end + 1)
            if grows:
                at[max(backward, default=first) + 1 :] = 1.0
                at[backward] = 1.0
            else:
                at[min(forward) : max(backward, default=last) + 1] = 1.0
                at[[*forward, *backward]] = 0.0
            self.known[key] = at
        return self.known[key]

    def _growths(self) -> list[Growth]:
        """The sample of the first copy (g = 1) has what all copies behind it have made; in forward, nothing of them."""
        out = []
        for m, (forward, backward) in enumerate(self.columns.middle):
            kept: dict[int, float] = defaultdict(float)
            grown: dict[int, float] = defaultdict(float)
            for h in self.held:
                if h.middle == m:
                    (grown if h.grows else kept)[h.kind] += h.nbytes
            for positions in (forward, backward):
                if positions:
                    region = self.places.region_of[positions[0]]
                    home = self.places.home(self.program.graph.ops[positions[0]].name)
                    mine = grown if positions is backward else {}
                    out.append(Growth(region, home.first, home.times, _whole(kept), _whole(mine)))
        return out


def _runs(memory: Memory, name: str) -> bool:
    """Whether an operator of forward is among those that run again."""
    q = memory.program.q
    return (q.rep[name], q.segment[name]) in {memory.f.names.reruns[i] for i in memory.decision.rerun}


def _peak(found: tuple[list[Sample], list[Growth]]) -> int:
    """Bytes are affine in the copy, so the most lies at the first or at the last."""
    slopes = {(g.region, g.first): sum(g.before.values()) - sum(g.behind.values()) for g in found[1]}
    return max(sum(s.nbytes.values()) + max(0, (s.times - 1) * slopes.get((s.at.region, s.first), 0)) for s in found[0])


def _whole(sizes: dict[int, float]) -> dict[int, int]:
    return {k: round(n) for k, n in sorted(sizes.items()) if round(n)}
