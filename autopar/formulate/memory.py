"""The memory rows: bytes live at every position of forward, backward and the optimizer step, as sums over the program's variables.

Transient: what a position's own direction made and still reads, at the placement it was made in, and versions brought elsewhere from first to
last use. Kept: from where it is made to its last use in backward. Made again: from first to last use in backward. Tensors that fused
kernels never write are not counted. Rows whose terms another row has too, and more, are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from autopar.solver.problem import Key, Problem, Row

if TYPE_CHECKING:
    from autopar.formulate.problem import _Formulator

ADAMW_TEMPORARIES = 1.0  # foreach AdamW holds as many temporary elements as there are parameters (measured on torch 2.13)


def rows(f: _Formulator, problem: Problem) -> tuple[Row, ...]:
    return _Rows(f, problem).rows()


class _Rows:
    def __init__(self, f: _Formulator, problem: Problem) -> None:
        self.f, self.problem, self.mesh = f, problem, f.mesh
        ops = f.graph.ops
        self.turn = next((i for i, op in enumerate(ops) if op.direction == "backward"), len(ops))
        self.position = {op.name: i for i, op in enumerate(ops)}
        self.end = len(ops)
        self.written = self._written()
        self.remade: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # value -> reruns that make it, at which nodes
        for i, rerun in enumerate(problem.reruns):
            for v, nodes in rerun.makes:
                self.remade[v].append((i, nodes))
        self.live: list[dict[Key, float]] = [defaultdict(float) for _ in range(self.end + 1)]

    def _written(self) -> set[str]:
        out = set()
        for op in self.f.graph.ops:
            fused = self.f.cost.fused
            names = {t.name for t in op.outputs if t is not None}
            if fused is not None and op.name in fused and not self.f.rules[op.name].is_heavy:
                names &= fused[op.name][1]
            elif fused is not None and self.f.rules[op.name].kind == "view":
                names = set()
            out |= names
        return out

    def rows(self) -> tuple[Row, ...]:
        static: dict[Key, float] = defaultdict(float)
        step: dict[Key, float] = defaultdict(float)
        s = self.f.setting
        for name, (c, options) in self.f.names.storage.items():
            for i, o in enumerate(options):
                n = math.prod(o.placement.local_shape(self.mesh))
                trained = name in s.trainable
                static["x", c, i] += n * (s.master_bytes + (s.state_bytes if trained else 0.0))
                if trained:
                    step["x", c, i] += n * s.master_bytes * (1 + ADAMW_TEMPORARIES)
                    grad = self.f.graph.grads.get(name)
                    if grad is not None:
                        done = self.position[grad.split(".")[0]]
                        self.add(("x", c, i), n * s.master_bytes, done, self.end)
        for v in range(len(self.problem.values)):
            self.value(v)
        out = {}
        for i, terms in enumerate(self.live):
            if i < self.end and not any(t is not None and t.name in self.written for t in self.f.graph.ops[i].outputs):
                continue
            merged = dict(static)
            for key, k in (step if i == self.end else terms).items():
                merged[key] = merged.get(key, 0.0) + k
            name = "optimizer step" if i == self.end else f"{self.f.graph.ops[i].direction} at {self.f.graph.ops[i].name}"
            out[i] = (name, merged)
        return tuple(Row(name, 0.0, tuple(sorted(terms.items()))) for name, terms in _undominated(list(out.values())))

    def add(self, key: Key, nbytes: float, first: int, last: int) -> None:
        for i in range(first, min(last, self.end - 1) + 1):
            self.live[i][key] += nbytes

    def value(self, v: int) -> None:
        f, value = self.f, self.problem.values[v]
        wire = f.wires[value.name]
        places = list(wire.nodes)
        size = {n: wire.nbytes * math.prod(p.local_shape(self.mesh)) / max(1, math.prod(p.shape)) for n, p in enumerate(places)}
        base = value.name.split(".")[0]
        made = self.position.get(value.name if value.name in self.position else base, -1)
        users = {
            0: [self.position[o] for o in self.users(value.name, "forward")],
            1: [self.position[o] for o in self.users(value.name, "backward")],
        }
        is_param = value.name in f.param_of
        if not is_param and value.name in self.written:
            direction = int(made >= self.turn)
            last = max(users[direction], default=made)
            for end in wire.supplies[direction]:
                for s, n in enumerate(end.nodes):
                    self.add(("x", end.choice, s), size[n], made, last)
            for n in value.fates:
                # While the value is alive in forward its own term counts it.
                self.add(("y", v, n), size[n], max(users[0], default=made) + 1, max(users[1], default=self.turn))
        for direction, flow in ((0, value.forward), (1, value.backward)):
            if flow is None or not users[direction]:
                continue
            for a, arc in enumerate(flow.arcs):
                if direction == 0 and users[0] and arc.times:
                    self.add(("e", v, 0, a), size[arc.dst], min(users[0]), max(users[0]))
                elif direction == 1 and arc.times:
                    self.add(("e", v, 1, a), size[arc.dst], min(users[1]), max(users[1]))
        if value.backward is not None and value.name in self.written and users[1]:
            for i, nodes in self.remade[v]:
                for s, n in enumerate(nodes):
                    self.add(("r", i, s), size[n], min(users[1]), max(users[1]))

    def users(self, name: str, direction: str) -> list[str]:
        """Ops of `direction` that read `name`, through views."""
        out = []
        todo, seen = [name], {name}
        readers = self.f.cl_readers
        while todo:
            for op in readers.get(todo.pop(), ()):
                if op.direction == direction:
                    out.append(op.name)
                if (self.f.rules[op.name].kind == "view" or (name in self.f.param_of and op.name in self.f.chain_ops)) and op.outputs[
                    0
                ] is not None:
                    t = op.outputs[0].name
                    if t not in seen:
                        seen.add(t)
                        todo.append(t)
        return out


def _undominated(rows: list[tuple[str, dict[Key, float]]]) -> list[tuple[str, dict[Key, float]]]:
    """Rows that no other row covers term by term."""
    rows = sorted(rows, key=lambda r: -len(r[1]))
    kept: list[tuple[str, dict[Key, float]]] = []
    for name, terms in rows:
        if not any(all(big.get(k, 0.0) >= x for k, x in terms.items()) for _, big in kept):
            kept.append((name, terms))
    return kept
