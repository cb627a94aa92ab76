"""The calls of a solved program, each where it runs: what `Problem` adds up by account, taken apart again.

Collectives of activations block: compute waits where they are issued. Gathers of parameters are issued a stretch before their use, reductions of gradients awaited a
stretch after (`autopar.planner.formulation.overlap_windows`); so are copies to the host and back. What runs again does so right before backward first needs it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.cost.buckets import Company, shared
from autopar.cost.compute import compute_dtype, flops
from autopar.cost.memory import base_name
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.plan.text import LAYER
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.apply import used_arcs
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.planner.formulation.offload import in_flight
from autopar.planner.formulation.recompute_chains import Chains
from autopar.planner.formulation.where_kept import LINKS, besides
from autopar.planner.profiling.places import OUTSIDE, Home, Places
from autopar.solver.evaluate import variables_on
from autopar.solver.problem import DEVICE, Decision, Problem
from autopar.timeline.profile import AHEAD, BEHIND, MADE, READ, REPEATS, RUN, Call, Spot, What

COMPUTE = "compute"
ATTENTION_STEP = (
    3.0  # of attention's forward, forward and backward together: what backward makes again is not the model's (as `autopar.predict` counts)
)


class Calls:
    """found: the calls, in no order; whats: what they are."""

    def __init__(self, f: Formulated, problem: Problem, decision: Decision, life: Lifetimes, chains: Chains | None, places: Places) -> None:
        self.f, self.problem, self.decision, self.life, self.chains, self.places = f, problem, decision, life, chains, places
        self.program, self.q, self.graph, self.x = f.program, f.program.q, f.program.graph, decision.strategies
        self.found: list[Call] = []
        self.whats: dict[What, int] = {}
        self.recompute = {f.names.reruns[i] for i in decision.rerun}
        self.kept_s = self._kept_s()
        self.runs_at = self._when_again()
        self.by_flops: dict[str, float] = {}
        for i, op in enumerate(self.graph.ops):
            self._operator(i, op)
        for v, direction, arc in used_arcs(problem, decision):
            steps = [(k, s) for k, s in enumerate(f.names.steps(v, arc), 1) if s.kind != "slice"]
            early = sum(k <= arc.way for k, _ in steps)
            for tensor in self.q.members[problem.values[v].name] if steps else ():
                self._brought(v, direction, tensor, [(s.kind, s.axes, s.wire_bytes(f.mesh, 1)) for _, s in steps], early, arc.stays)
        for v, kept in decision.kept.items():
            for k in kept:
                for tensor in self.q.members[problem.values[v].name] if problem.values[v].policies[k].medium != DEVICE else ():
                    self._moved(v, k, tensor)
        stepping = sum(choice.times[self.x[c]].get(account(2, COMPUTE), 0.0) for c, choice in enumerate(problem.choices))
        self._emit(OUTSIDE, What("optimizer step", "", COMPUTE), stepping, 0.0, Spot(len(places.regions) - 1, 0, 0, RUN))

    @property
    def model_flops(self) -> float:
        return sum(self.by_flops.values())

    # ---- operators -------------------------------------------------------------------------------------------------

    def _when_again(self) -> dict[str, int]:
        """Operator of forward that runs again -> the position of backward that it runs for."""
        q, found = self.q, dict[str, int]()
        chains = self.chains
        on = variables_on(replace(self.problem, events=tuple(chains.events.known)), self.decision) if chains else None
        for op in self.graph.ops:
            if op.direction != "forward" or (q.rep[op.name], q.segment[op.name]) not in self.recompute:
                continue
            run = chains.runs.get(op.name) if chains else None
            if run is not None and on is not None:
                ran = [(p, m) for p, m in zip(run.at, run.ran, strict=True) if m[0] == "r" or on(("z", m[1], 0))]
                if ran:
                    found[op.name] = ran[0][0]
                    continue
            if op.name in self.life.earliest:
                found[op.name] = self.life.earliest[op.name]
        return found

    def _kept_s(self) -> dict[str, float]:
        """By operator, what it takes longer because values are kept: forward's write them, backward's read them."""
        found: dict[str, float] = defaultdict(float)
        for v, policies in self.decision.kept.items():
            value = self.problem.values[v]
            for k in policies:
                size = self.life.sizes(v)[value.policies[k].node]
                for tensor in self.q.members[value.name]:
                    for beside, count in besides(self.program, self.f.cost, tensor, size):
                        found[beside.op] += beside.seconds * count / self.q.times[beside.op]
        return found

    def _operator(self, i: int, op: Op) -> None:
        home = self.places.home(op.name)
        self._count_flops(op, home)
        self._run(op, home, i, RUN, 0, False)
        if op.direction == "forward" and self.f.is_chained(op):
            users = self.life.users(op.out.name, "backward")  # what follows from a parameter is made again
            if users:
                self._run(op, home, min(users), AHEAD, i, False)
        elif op.name in self.runs_at:
            self._run(op, home, self.runs_at[op.name], REPEATS, i, True)

    def _run(self, op: Op, home: Home, position: int, phase: int, sub: int, recompute: bool) -> None:
        f, name = self.f, self.q.rep[op.name]
        c = f.clusters.of[name]
        s = self.x[c]
        rule, split = self.program.rules[op.name], dict(f.clusters.clusters[c].members[name][s].split)
        want, made = f.clusters.want[name][s], f.clusters.made[name][s]
        cost = f.cost.op(op, rule, split, want, made, recompute)
        at = self.places.spot(home, position, phase, sub)
        self._emit(
            home, What(base_name(op), self._module(op, home), COMPUTE, self._stack(home), recompute=recompute),
            cost.seconds + (self.kept_s.get(op.name, 0.0) if phase == RUN else 0.0), cost.bytes, at,
        )  # fmt: skip
        there = at if phase != RUN else replace(at, phase=MADE)
        for kind, axes, sent, beside in f.cost.inside(op, rule, split, want):
            taken = f.cost.collective(kind, axes, sent)  # of one that runs beside its own operator: what the device waits for
            waits_s = f.cost.waits_s(taken.seconds, beside * cost.seconds)
            self._emit(home, What(kind, self._maker(op, home), taken.link, self._stack(home), "activation", axes), waits_s, sent, there)

    def _count_flops(self, op: Op, home: Home) -> None:
        rule = self.program.rules[op.name]
        whole = flops(op, rule, {}, Mesh.of({}))
        if rule.kind == "attention":
            whole *= 0.0 if op.direction == "backward" else ATTENTION_STEP
        if whole:
            dtype = compute_dtype(op)
            self.by_flops[dtype] = self.by_flops.get(dtype, 0.0) + home.times * whole

    def _module(self, op: Op, home: Home) -> str:
        return self._starred(op.module, home)

    def _starred(self, path: str, home: Home) -> str:
        """The numbers of repeated layers are starred, also where a part of one is not folded: how many there are depends on the capture."""
        if home.stack >= 0:
            return LAYER.sub("*", path)
        for name in (s.name for s in self.q.stacks):
            if path.startswith(f"{name}."):
                return name + LAYER.sub("*", path[len(name) :], count=1)
        return path

    def _stack(self, home: Home) -> str:
        return self.q.stacks[home.stack].name if home.stack >= 0 else ""

    def _maker(self, op: Op, home: Home) -> str:
        """What a result is called: its module, or the operator where that is of none, as a loss."""
        return self._module(op, home) or base_name(op)

    # ---- what is brought and moved -----------------------------------------------------------------------------------

    def _brought(
        self, v: int, direction: int, tensor: str, steps: list[tuple[str, tuple[str, ...], float]], early: int, stays: bool
    ) -> None:
        """early: how many of the steps a gradient takes in every micro-batch; stays: the first of a call takes them for all."""
        f, life, wire = self.f, self.life, self.f.wires[self.problem.values[v].name]
        home, itemsize = self.places.home(tensor), f.names.itemsize[self.problem.values[v].name]
        users = life.users(tensor, ("forward", "backward")[direction])
        sized = tuple((kind, axes, n * itemsize) for kind, axes, n in steps)
        companies = wire.companies[direction]
        if wire.reduces and tensor in self.program.params_of_grad:
            made = life.grad_made(tensor)
            name = self.program.params_of_grad[tensor][0]
            wait = self.places.spot(home, life.windows.awaited(made), BEHIND)
            self._collectives(
                home, self._leaf(name, home), "gradient", sized, self.places.spot(home, made, MADE, 1), wait, companies, early
            )
        elif wire.overlaps and tensor in self.program.param_of and (reads := users or self._read_again(tensor)):
            first = min(reads)
            name, at = self.program.param_of[tensor], self.places.spot(home, life.windows.issued(first), AHEAD, -1)
            read = self.places.spot(home, first, READ)
            self._collectives(home, self._leaf(name, home), "parameter", sized, at, read, companies, stays=stays)
        else:
            maker = self.program.by_name.get(tensor.split(".")[0])
            said = self._maker(maker, home) if maker is not None else self._leaf(self.program.param_of.get(tensor, tensor), home)
            self._collectives(home, said, "activation", sized, self._before_readers(tensor, direction, home, users), companies=companies)

    def _before_readers(self, tensor: str, direction: int, home: Home, users: list[int]) -> Spot:
        """Where an activation is brought: in front of the first that reads it; of what nobody reads (but the user), behind its making."""
        if users:
            return self.places.spot(home, min(users), READ)
        if direction == 0:
            return self.places.spot(home, self.life.made(tensor), MADE)
        recompute = self._read_again(tensor)
        if recompute:
            first = min(recompute)
            order = min(self.life.position[r] for r, p in self.runs_at.items() if p == first)
            return self.places.spot(home, first, REPEATS, order)
        return self.places.spot(home, max(self.life.made(tensor), self.life.turn), MADE)

    def _read_again(self, tensor: str) -> list[int]:
        """Positions of backward for which something runs again that reads `tensor`, also through views and casts."""
        found, todo = [], [tensor]
        while todo:
            for op in self.program.readers.get(todo.pop(), ()):
                if op.name in self.runs_at:
                    found.append(self.runs_at[op.name])
                elif op.direction == "forward" and (self.program.rules[op.name].kind == "view" or self.f.is_chained(op)):
                    todo += [t.name for t in op.outputs if t is not None]
        return found

    def _leaf(self, name: str, home: Home) -> str:
        return self._starred(name.split("~")[0] if home.stack >= 0 else name, home)

    def _collectives(
        self,
        home: Home,
        module: str,
        serves: str,
        steps: tuple[tuple[str, tuple[str, ...], float], ...],
        at: Spot,
        wait: Spot | None = None,
        companies: tuple[Company, ...] = (),
        early: int = 0,
        stays: bool = False,
    ) -> None:
        """companies: what it is joined with in one bucket; early: so many of a gradient's steps are taken in every micro-batch; stays: they are taken once in a call."""
        for k, (kind, axes, sent) in enumerate(steps):
            often = self.f.training.micro_batches if serves == "gradient" and k >= early else self.f.training.in_a_row if stays else 1
            c = shared(self.f.cost, kind, axes, sent, companies)
            self._emit(home, What(kind, module, c.link, self._stack(home), serves, axes), c.seconds / often, sent, at, wait)

    def _moved(self, v: int, k: int, tensor: str) -> None:
        """To where it is kept away from the device, and back."""
        life, policy, home = self.life, self.problem.values[v].policies[k], self.places.home(tensor)
        size, maker = life.sizes(v)[policy.node], self.program.by_name[tensor.split(".")[0]]
        leaving, back = in_flight(life, tensor)
        for resource, direction in LINKS[policy.medium]:
            what = What(
                ("to " if direction == 0 else "from ") + policy.medium, self._maker(maker, home), resource, self._stack(home), "activation"
            )
            at, wait = (
                (self.places.spot(home, life.made(tensor), MADE, 2), self.places.spot(home, leaving[1], BEHIND))
                if direction == 0
                else (self.places.spot(home, back[0], AHEAD, -2), self.places.spot(home, life.first_need(tensor), AHEAD))
            )
            self._emit(home, what, self.f.cost.transfer_s(resource, size), size, at, wait)

    def _emit(self, home: Home, what: What, seconds: float, nbytes: float, at: Spot, wait: Spot | None = None) -> None:
        if seconds > 0:
            index = self.whats.setdefault(what, len(self.whats))
            self.found.append(Call(index, seconds, round(nbytes), home.first, home.times, at, wait))
