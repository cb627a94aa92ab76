"""When tensors live: where they are made, who reads them, and until where they are needed, at what size. Positions are those of the graph's operators.

What a position's own direction reads, through views; what backward reads; and what it reads if some of forward runs again.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from autopar.graph.graph import Op
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.materialized import materialized
from autopar.solver.problem import Problem

# Bytes per element that drawing random numbers from counters takes on the way, run call by call: 64-bit words (measured: tests/spmd/test_memory.py).
RANDOM_BYTES = 27.0


class Lifetimes:
    """ideal: `problem` is the relaxed one of `autopar.planner.formulation.lower_bound`, where everything is split over all devices."""

    def __init__(self, f: Formulated, problem: Problem, is_bound: bool = False) -> None:
        self.f, self.program, self.problem, self.mesh, self.is_bound = f, f.program, problem, f.mesh, is_bound
        ops = self.program.graph.ops
        self.turn = next((i for i, op in enumerate(ops) if op.direction == "backward"), len(ops))
        self.position = {op.name: i for i, op in enumerate(ops)}
        self.end = len(ops)
        self.windows = self.program.windows
        self.materialized, self.written_ahead, self.written_by_recompute = materialized(self.program, f.cost)
        self.remade: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # value -> reruns that make it, at which nodes
        for i, rerun in enumerate(problem.reruns):
            for v, nodes in rerun.makes:
                self.remade[v].append((i, nodes))
        self.known_sizes: dict[int, dict[int, float]] = {}

    def writes(self, op: Op) -> bool:
        """Whether anything is in memory once `op` has run that was not before: what is read elsewhere, or may be kept."""
        return any(t is not None and (t.name in self.materialized or t.name in self.may_be_kept) for t in op.outputs)

    @cached_property
    def may_be_kept(self) -> set[str]:
        members = self.program.q.members
        return {t for value in self.problem.values if value.policies for t in members[value.name]}

    def sizes(self, v: int) -> dict[int, float]:
        """Bytes of one tensor of value `v`, per node."""
        if v not in self.known_sizes:
            wire = self.f.wires[self.problem.values[v].name]
            whole = {n: p.share(self.mesh) for n, p in enumerate(wire.nodes)}
            shares = {0: 1 / self.mesh.size} if self.is_bound else whole
            self.known_sizes[v] = {n: wire.nbytes * share for n, share in shares.items()}
        return self.known_sizes[v]

    @cached_property
    def earliest(self) -> dict[str, int]:
        """Operator of forward -> the position at which backward first needs something that follows from it in its layer and may be made again (what
        a layer hands on is not)."""
        f, found = self.f, dict[str, int]()
        for op in reversed(self.program.graph.ops):
            if op.direction == "forward":
                mine = [t.name for t in op.outputs if t is not None and not f.recomputable.leaves_its_copy(op, t)]
                at = [p for t in mine for p in self.users(t, "backward")]
                later = [r for t in mine for r in self.program.readers.get(t, ()) if r.direction == "forward"]
                at += [found[r.name] for r in later if r.name in found and f.recomputable.is_within(op, r)]
                if at:
                    found[op.name] = min(at)
        return found

    def workspace_of(self, op: Op) -> float:
        """What `op`, of whose cluster one strategy is left, makes on the way where it is run by itself."""
        f = self.f
        if f.cost.fused is not None or self.is_bound or self.program.rules[op.name].kind != "random" or op.outputs[0] is None:
            return 0.0
        (made,) = f.clusters.made[self.program.q.rep[op.name]]
        return RANDOM_BYTES * op.outputs[0].numel * (made[0].share(self.mesh) if made[0] is not None else 1.0)

    def made(self, tensor: str) -> int:
        return self.position.get(tensor if tensor in self.position else tensor.split(".")[0], -1)

    def grad_made(self, grad: str) -> int:
        """As `made`; a gradient that backward is given, and does not make, is there from its first position on."""
        return max(self.made(grad), self.turn)

    def first_need(self, tensor: str) -> int:
        """The first position of backward at which it, or what may run again, reads `tensor`."""
        recompute = [self.earliest[r] for r in self.readers_through_views(tensor) if r in self.earliest]
        return min([*self.users(tensor, "backward"), *recompute], default=self.turn)

    def last_need(self, tensor: str) -> int:
        users = self.users(tensor, "backward")
        return max(users) if users else self.read_by_recompute(tensor)

    def stack_of(self, position: int) -> int | None:
        """The repeated stack that an operator is of."""
        return self.program.stack_of.get(self.program.graph.ops[position].name)

    def readers_through_views(self, name: str) -> tuple[str, ...]:
        """Operators of forward that read `name` or a view of it, in order."""
        return tuple(self._readers.get(name, ()))

    @cached_property
    def _readers(self) -> dict[str, dict[str, None]]:
        """Of every tensor, found from the last operator back: ways through views may be many more than operators."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        ops = self.program.graph.ops
        for op in reversed(ops):
            if op.direction == "forward":
                is_view = self.program.rules[op.name].kind == "view"
                beyond = {r for t in op.outputs if t is not None for r in found.get(t.name, ())} if is_view else {op.name}
                for t in op.inputs:
                    found[t.name].update(dict.fromkeys(beyond))
        return {name: dict.fromkeys(sorted(readers, key=self.position.__getitem__)) for name, readers in found.items()}

    def read_by_recompute(self, name: str) -> int:
        """Where backward reads no tensor `name` itself: the last position at which what runs again may read it, at least the turn."""
        readers = (r.name for r in self.program.readers.get(name, ()) if r.name in self.is_recomputed)
        return max((self.is_recomputed[r] for r in readers), default=self.turn)

    @cached_property
    def is_recomputed(self) -> dict[str, int]:
        """Operator of forward -> the last position at which it may run again: before backward reads its result, or with its readers."""
        found: dict[str, int] = {}
        for op in reversed(self.program.graph.ops):
            if op.direction == "forward":
                made = [t.name for t in op.outputs if t is not None]
                direct = [at for t in made for at in self.users(t, "backward")]
                later = [found[r.name] for t in made for r in self.program.readers.get(t, ()) if r.name in found]
                if direct or later:
                    found[op.name] = min(direct) if direct else max(later)
        return found

    def users(self, name: str, direction: str) -> list[int]:
        """Positions of the ops of `direction` that read `name`, through views."""
        return [self.position[op.name] for op in self.program.users(name, direction, self.f.clusters)]
