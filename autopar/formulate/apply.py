"""A decision about the Problem -> the Plan that passes apply."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.formulate.problem import Names, Setting
from autopar.graph import Graph
from autopar.mesh import Mesh
from autopar.placement import Placement
from autopar.plan import CollectiveUse, OpChoice, ParamChoice, Plan
from autopar.rules.grammar import Rule
from autopar.solver.problem import Decision, Problem
from autopar.storage import batch_placements, representable


def apply(
    graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, setting: Setting, problem: Problem, names: Names, decision: Decision
) -> Plan:
    x, cl = decision.strategies, names.clusters
    ops: dict[str, OpChoice] = {}
    repeated: dict[str, float] = {}
    for op in graph.ops:
        s = cl.clusters[cl.of[op.name]].members[op.name][x[cl.of[op.name]]]
        rule = rules[op.name]
        ops[op.name] = OpChoice(dict(s.split), dict(s.partial), rule.kind, rule.is_fallback)
        idle = math.prod(a.size for a in mesh.axes if a.name not in dict(s.split))
        if rule.is_heavy and idle > 1:
            repeated[op.name] = float(idle)
    params = {}
    for name, t in graph.params.items():
        choice, options = names.storage[name]
        o = options[x[choice]]
        params[name] = ParamChoice(
            t.shape, t.dtype, o.padded, o.placement, _read_at(problem, names, decision, t.name, t.shape), name in setting.trainable
        )
    data = names.input_options[x[names.inputs]]
    outputs = tuple(Placement.of(()) if not n else representable(Placement.of(graph.tensors[n].shape), mesh) for n in graph.outputs)
    kept, rerun = {}, frozenset(names.reruns[i] for i in decision.rerun)
    made = {t.name: (op, i) for op in graph.ops for i, t in enumerate(op.outputs) if t is not None}
    for v, nodes in decision.kept.items():
        value = problem.values[v]
        (n,) = nodes
        kept[value.name] = names.nodes[v][n]
        if value.name in names.merged:  # its nodes stand for sizes: it is kept as it is made
            op, i = made[value.name]
            p = cl.made[op.name][x[cl.of[op.name]]][i]
            assert p is not None
            kept[value.name] = p
    return Plan(
        dict(mesh.parents), "planned", params, ops, batch_placements(graph.inputs, data, mesh), outputs, data,
        {op.name: op.target for op in graph.ops}, _collectives(mesh, problem, names, decision), repeated, True, kept, rerun,
    )  # fmt: skip


def _collectives(mesh: Mesh, problem: Problem, names: Names, decision: Decision) -> tuple[CollectiveUse, ...]:
    """Every redistribution that was priced."""
    out = []
    for (v, direction), arcs in sorted(decision.arcs.items()):
        for a in sorted(arcs):
            value = problem.values[v].name
            steps, itemsize = names.steps[value, direction, a]
            way = ("forward", "backward")[direction]
            out += [CollectiveUse(s.kind, s.axes, s.wire_bytes(mesh, 1) * itemsize, value, way) for s in steps]
    return tuple(out)


def _read_at(problem: Problem, names: Names, decision: Decision, tensor: str, shape: tuple[int, ...]) -> Placement:
    """Where the first operator that uses a parameter reads it."""
    v = names.value_of[tensor]
    for end in (*problem.values[v].forward.demands, *(problem.values[v].backward.demands if problem.values[v].backward else ())):  # type: ignore[union-attr]
        return names.nodes[v][end.nodes[decision.strategies[end.choice]]]
    return Placement.of(shape)
