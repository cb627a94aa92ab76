"""A decision about the Problem -> the Plan that passes apply: every operator does what its class does, in every copy of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.plan.decisions import CollectiveUse, OpChoice, ParamChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.formulation.wires import Wire
from autopar.planner.storage import batch_placements, representable
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.problem import DEVICE, Arc, Decision, Policy, Problem
from autopar.solver.shrink import Shrunk


def apply(
    folded: Folded,
    shrunk: Shrunk,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    training: TrainingConfig,
    problem: Problem,
    names: Names,
    decision: Decision,
) -> Plan:
    """folded: the graph that the plan is for; shrunk: the smaller one that was planned."""
    graph, q, cl, x = folded.graph, names.symmetry, names.clusters, decision.strategies
    by_class: dict[str, OpChoice] = {}
    repeats: dict[str, float] = {}
    for op in q.classes.ops:
        c = cl.of[op.name]
        s = cl.clusters[c].members[op.name][x[c]]
        rule = rules[op.name]
        by_class[op.name] = OpChoice(dict(s.split), dict(s.partial), rule.kind, rule.is_fallback)
        busy = {**dict(s.split), **dict(s.partial)}
        idle = math.prod(a.size for a in mesh.axes if a.name not in busy)
        if rule.is_heavy and idle > 1:
            repeats[op.name] = float(idle)
    params, summed = {}, _summed_at(problem, names, decision)
    stay = {v for v, _, arc in used_arcs(problem, decision) if arc.stays}
    for name, t in graph.params.items():
        rep = q.tensor_rep[folded.tensor_rep[t.name]]
        choice, options = names.storage[rep]
        o = options[x[choice]]
        read = _read_at(problem, names, decision, rep, t.shape)
        v = names.value_of[rep]
        gathered = v in decision.kept, summed.get(rep), v in stay
        params[name] = ParamChoice(t.shape, t.dtype, o.padded, o.placement, read, name in training.trainable, *gathered)
    data = names.input_options[x[names.inputs]]
    outputs = tuple(Placement.of(()) if not n else representable(Placement.of(graph.tensors[n].shape), mesh) for n in graph.outputs)
    at = {
        problem.values[v].name: _kept_at(problem, names, decision, v) for v in decision.kept if problem.values[v].name not in names.storage
    }
    sent = {problem.values[v].name: policy.medium for v in decision.kept if (policy := _policy(problem, decision, v)).medium != DEVICE}
    recompute = {names.reruns[i] for i in decision.rerun}
    outputs_of = {op.name: op.outputs for op in q.graph.ops}
    stands = {small: op.name for op in reversed(graph.ops) for small in (shrunk.image[op.name],)}
    # Operators of copies that were not captured but have a policy of their own are told under the shrunk graph's names.
    more = [op for op in q.graph.ops if op.name not in stands]
    order = tuple(stands.get(op.name, op.name) for op in q.graph.ops)
    kept: dict[str, Placement] = {}
    activations: dict[str, str] = {}
    ops: dict[str, OpChoice] = {}
    repeated: dict[str, float] = {}
    rerun: set[str] = set()
    for op in (*graph.ops, *more):
        small = shrunk.image.get(op.name, op.name)
        rep = q.rep[small]
        ops[op.name] = by_class[rep]
        if rep in repeats:
            repeated[op.name] = repeats[rep]
        if (rep, q.segment[small]) in recompute:
            rerun.add(op.name)
            activations |= {t.name: "recompute" for t in op.outputs if t is not None}
        for out, u in zip(op.outputs, outputs_of[small], strict=True):
            if out is not None and u is not None and q.group[u.name] in at:
                kept[out.name] = at[q.group[u.name]]
                activations[out.name] = f"offload:{sent[q.group[u.name]]}" if q.group[u.name] in sent else "save"
    return Plan(
        dict(mesh.parents), "planned", params, ops, batch_placements(graph.inputs, data, mesh), outputs, data,
        {op.name: op.target for op in (*graph.ops, *more)}, _collectives(problem, names, decision), repeated, True, kept, frozenset(rerun),
        fingerprint=folded.fingerprint(), order=order, activations=activations,
        segments={name: n for name, n in shrunk.segments.items() if len(n) > 1}, together=folded.together,
        imbalance=training.imbalance,
    )  # fmt: skip


def _kept_at(problem: Problem, names: Names, decision: Decision, v: int) -> Placement:
    value = problem.values[v].name
    n = _policy(problem, decision, v).node
    if value not in names.merged:
        return names.nodes[v][n]
    op, i = names.clusters.maker[names.symmetry.tensor_rep[value]]  # its nodes stand for sizes: it is kept as it is made
    p = names.clusters.made[op][decision.strategies[names.clusters.of[op]]][i]
    assert p is not None
    return p


def _policy(problem: Problem, decision: Decision, v: int) -> Policy:
    (k,) = decision.kept[v]
    return problem.values[v].policies[k]


def _collectives(problem: Problem, names: Names, decision: Decision) -> tuple[CollectiveUse, ...]:
    """Every redistribution that was priced."""
    out = []
    for v, direction, arc in used_arcs(problem, decision):
        value = problem.values[v].name
        itemsize, way, count = names.itemsize[value], ("forward", "backward")[direction], names.symmetry.count(value)
        steps = names.steps(v, arc)
        out += [CollectiveUse(s.kind, s.axes, s.wire_bytes(names.mesh, 1) * itemsize, value, way, count) for s in steps]
    return tuple(out)


def blocking(problem: Problem, names: Names, decision: Decision, wires: Mapping[str, Wire]) -> int:
    """How many collectives compute waits for: all but those of parameters and gradients, which overlap whatever compute loses beside them."""
    found = 0
    for v, _, arc in used_arcs(problem, decision):
        waits = sum(t for account, t in arc.times.items() if problem.accounts[account].resource == "compute")
        if waits and not wires[problem.values[v].name].overlaps:
            found += names.symmetry.count(problem.values[v].name) * sum(s.kind != "slice" for s in names.steps(v, arc))
    return found


def used_arcs(problem: Problem, decision: Decision) -> Iterator[tuple[int, int, Arc]]:
    """(value, direction, arc) of what is redistributed."""
    for (v, direction), arcs in sorted(decision.arcs.items()):
        flow = (problem.values[v].forward, problem.values[v].backward)[direction]
        assert flow is not None
        for a in sorted(arcs):
            yield v, direction, flow.arcs[a]


def _summed_at(problem: Problem, names: Names, decision: Decision) -> dict[str, Placement]:
    """Of parameters, by class, whose gradients are not added up where they are made: where they are."""
    at = {v: names.accumulated(v, arc) for v, _, arc in used_arcs(problem, decision) if arc.way}
    q, found = names.symmetry, {}
    for name, t in q.graph.params.items() if at else ():
        v = names.value_of.get(q.group[q.graph.grads[name]]) if name in q.graph.grads else None
        if v in at:
            found[q.tensor_rep[t.name]] = at[v]
    return found


def _read_at(problem: Problem, names: Names, decision: Decision, tensor: str, shape: tuple[int, ...]) -> Placement:
    """Where the first operator that uses a parameter reads it."""
    v = names.value_of[tensor]
    nodes: Sequence[Placement] = names.nodes[v]
    for flow in (problem.values[v].forward, problem.values[v].backward):
        for end in flow.demands if flow is not None else ():
            return nodes[end.nodes[decision.strategies[end.choice]]]
    return Placement.of(shape)
