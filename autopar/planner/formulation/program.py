"""The program that is formulated: the graph, which of its operators stand for each other, and who makes and reads what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from autopar.graph.graph import Op, Tensor
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.overlap_windows import OverlapWindows
from autopar.planner.formulation.symmetry import SymmetryClasses
from autopar.rules.grammar import Rule


class Program:
    """rules: of every operator of `q.graph`; trainable: names of parameters."""

    def __init__(self, q: SymmetryClasses, rules: Mapping[str, Rule], trainable: frozenset[str]) -> None:
        self.q, self.graph, self.rules = q, q.graph, rules
        self.by_name = {op.name: op for op in self.graph.ops}
        self.param_of = {t.name: n for n, t in self.graph.params.items()}
        self.params_of_grad: dict[str, list[str]] = defaultdict(list)
        for p, grad in self.graph.grads.items():
            self.params_of_grad[grad].append(p)
        self.readers: dict[str, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            for t in dict.fromkeys(op.inputs):
                self.readers[t.name].append(op)
        self.trained = {q.tensor_rep[t.name] for n, t in self.graph.params.items() if n in trainable}
        # Operator of a repeated layer -> its stack and copy; class -> its operators.
        self.copy_of = {n: (s, k) for s, stack in enumerate(q.stacks) for k, names in enumerate(stack.forward) for n in names}
        self.copies: dict[str, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            self.copies[q.rep[op.name]].append(op)
        self._clusters: Clusters | None = None  # of which `_users` are
        self._users: dict[tuple[str, str], tuple[Op, ...]] = {}

    @cached_property
    def constants(self) -> list[Tensor]:
        """What no operator makes and nobody gives."""
        g = self.graph
        made = {t.name for op in g.ops for t in op.outputs if t is not None}
        given = {t.name for t in (*g.inputs, *g.tangents, *g.params.values(), *g.buffers.values())}
        return [t for n, t in g.tensors.items() if n not in made and n not in given]

    @cached_property
    def stack_of(self) -> dict[str, int]:
        """Operator -> the repeated stack that it is of."""
        return {n: i for i, s in enumerate(self.q.stacks) for copies in (s.forward, s.backward) for names in copies for n in names}

    @cached_property
    def windows(self) -> OverlapWindows:
        return OverlapWindows(self.graph, self.q.stacks)

    def users(self, name: str, direction: str, clusters: Clusters) -> tuple[Op, ...]:
        """Operators of `direction` that read `name`, through views; of a parameter, through what follows from it alone."""
        if clusters is not self._clusters:
            self._clusters, self._users = clusters, {}
        if (name, direction) not in self._users:
            self._users[name, direction] = self._users_of(name, direction, clusters)
        return self._users[name, direction]

    def _users_of(self, name: str, direction: str, clusters: Clusters) -> tuple[Op, ...]:
        out = []
        todo, seen = [name], {name}
        while todo:
            for op in self.readers.get(todo.pop(), ()):
                if op.direction == direction:
                    out.append(op)
                through = self.rules[op.name].kind == "view" or (name in self.param_of and self.is_chained(op, clusters))
                for t in op.outputs if through else ():
                    if t is not None and t.name not in seen:
                        seen.add(t.name)
                        todo.append(t.name)
        return tuple(out)

    def is_chained(self, op: Op, clusters: Clusters) -> bool:
        """Whether what `op` makes follows from one parameter alone."""
        return op.outputs[0] is not None and self.q.tensor_rep[op.outputs[0].name] in clusters.chain
