"""A plan on another capture of the program it was made for: the names of operators differ, what they are does not.

A plan made from shallow captures (`autopar.capture.tile`) names the operators of a few layers, a plan from another release of torch may name them otherwise.
Both have the program's fingerprint, and `Plan.order`: the operators of the folded graph with as few copies of a layer as it needs
(`solver.shrink`). Folded and shrunk, any capture of the program is the same list, so operator i of the new one is `order[i]` of the plan,
and every operator of the capture does what the one that stands for it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.graph.graph import Graph, Op
from autopar.plan.decisions import CollectiveUse
from autopar.plan.plan import Plan
from autopar.solver.fold import Folded, fold, grouped, numbered
from autopar.solver.shrink import Shrunk, shrink
from autopar.solver.stacks import DIGITS

EXAMPLES = 3  # of what differs


class PlanMismatchError(AutoparError):
    """A plan was made for another program."""


def refit(plan: Plan, graph: Graph | Folded) -> Plan:
    """`plan` with the names of `graph`, a capture of the same program (or its fold); `plan` itself where it has them already.

    Raises PlanMismatchError that says what differs.
    """
    folded = _folded_as(plan, fold(graph) if isinstance(graph, Graph) else graph)
    ops = folded.graph.ops
    if not plan.fingerprint:  # a hand layout's, which holds for the names it has
        if list(plan.ops) == [op.name for op in ops]:
            return plan
        if plan.ops.keys() == {op.name for op in ops} and all(plan.targets.get(op.name) == op.target for op in ops):
            return replace(plan, ops={op.name: plan.ops[op.name] for op in ops})
        raise _mismatch(plan, folded, ["the plan says of no program but the one it was made from, whose operators have other names"])
    missing = [n for n, t in folded.graph.params.items() if n not in plan.params or plan.params[n].shape != t.shape]
    if plan.fingerprint != folded.fingerprint() or missing:
        raise _mismatch(plan, folded, list(_differences(plan, folded)))
    small = _shrunk(plan, folded)
    stands = standing(folded, small)
    order = tuple(stands.values())
    # Operators of copies that `graph` has not, but which have a policy of their own, are told under the shrunk graph's names.
    ops += tuple(op for op in small.graph.ops if stands[op.name] == op.name and op.name not in small.image)
    if list(plan.ops) == [op.name for op in ops] and plan.order == order:
        return plan
    theirs = dict(zip(stands, plan.order, strict=True))
    like = {op.name: theirs[small.image.get(op.name, op.name)] for op in ops}
    renamed = dict(zip(plan.order, order, strict=True))

    def served_here(tensor: str) -> str:
        op, dot, output = tensor.partition(".")
        return f"{renamed[op]}{dot}{output}" if op in renamed else tensor  # what no operator makes has the program's own name

    return replace(
        plan,
        params={n: plan.params[n] for n in folded.graph.params},
        ops={n: plan.ops[like[n]] for n in like},
        targets={op.name: op.target for op in ops},
        repeated={n: plan.repeated[like[n]] for n in like if like[n] in plan.repeated},
        recompute=frozenset(n for n in like if like[n] in plan.recompute),
        kept=_results(plan.kept, ops, like),
        activations=_results(plan.activations, ops, like),
        collectives=tuple(replace(c, tensor=served_here(c.tensor)) for c in plan.collectives),
        order=order,
        modules=modules_of(folded.graph),
    )


def _folded_as(plan: Plan, folded: Folded) -> Folded:
    """With as many layers as one as the plan has."""
    if plan.together == folded.together:
        return folded
    found = grouped(folded, plan.together)
    if found is None:
        raise _mismatch(plan, folded, [f"it is of groups of {plan.together} layers, which the program's are not a multiple of"])
    return found


def _shrunk(plan: Plan, folded: Folded) -> Shrunk:
    try:
        small = shrink(folded, plan.segments)
    except ValueError as e:
        raise _mismatch(plan, folded, [f"its layers are cut otherwise ({e})"]) from None
    if [op.target for op in small.graph.ops] != [plan.targets.get(n) for n in plan.order]:
        raise _mismatch(plan, folded, list(_differences(plan, folded)))
    return small


def standing(folded: Folded, small: Shrunk) -> dict[str, str]:
    """Operator of the smaller graph -> the first of the larger one that it stands for (itself, if for none that was captured)."""
    first = {small.image[op.name]: op.name for op in reversed(folded.graph.ops)}
    return {op.name: first.get(op.name, op.name) for op in small.graph.ops}


def _results(of: Mapping[str, Any], ops: tuple[Op, ...], like: Mapping[str, str]) -> dict[str, Any]:
    """What `of` says of operators' results ("mm", "split.1"), said of those of `ops`."""
    names = [(t.name, like[op.name] + t.name.removeprefix(op.name)) for op in ops for t in op.outputs if t is not None]
    return {ours: of[theirs] for ours, theirs in names if theirs in of}


def served(plan: Plan, folded: Folded) -> tuple[CollectiveUse, ...]:
    """The collectives of a plan made for `folded`, with names that `refit` can follow: operators' results by those in `Plan.order`, all else by
    its name in the program."""
    folded = _folded_as(plan, folded)
    stands = standing(folded, shrink(folded, plan.segments))
    leaves = leaf_names(folded)

    def name(tensor: str) -> str:
        op, dot, output = tensor.partition(".")
        return f"{stands[op]}{dot}{output}" if op in stands else leaves.get(tensor, tensor)

    return tuple(replace(c, tensor=name(c.tensor)) for c in plan.collectives)


def modules_of(graph: Graph) -> dict[str, str]:
    """Operator of forward -> path of its module."""
    return {op.name: op.module for op in graph.ops if op.direction == "forward"}


def leaf_names(folded: Folded) -> dict[str, str]:
    """Tensor that no operator makes -> its name in the program, layer numbers starred: the same for every capture."""
    graph = folded.graph
    befores = {way.before for stack in folded.stacks for way in numbered(graph, stack).values()}

    def star(name: str) -> str:
        for before in befores:
            match = DIGITS.match(name, len(before)) if name.startswith(before) else None
            if match:
                return f"{before}*{name[match.end() :]}"
        return name

    found = {t.name: star(n) for leaves in (graph.params, graph.buffers) for n, t in leaves.items()}
    found |= {t.name: f"input {i}" for i, t in enumerate(graph.inputs)}
    found |= {t.name: f"tangent {i}" for t, i in zip(graph.tangents, graph.tangent_of, strict=True)}
    made = {t.name for op in graph.ops for t in op.outputs if t is not None}
    return {**dict.fromkeys(graph.tensors.keys() - made, "constant"), **found}


# ---- what differs ------------------------------------------------------------------------------------------------


def _mismatch(plan: Plan, folded: Folded, differences: list[str]) -> PlanMismatchError:
    return PlanMismatchError(
        "The plan was made for another program: " + "; ".join(differences),
        where=f"plan {plan.fingerprint[:12] or 'of a hand layout'}, program {folded.fingerprint()[:12]}",
        fix="plan again for this model, batch and sequence length (autopar.plan, or leave plan= out), or load the plan that was made for them",
    )


def _differences(plan: Plan, folded: Folded) -> Iterator[str]:
    """For people, what weighs most first."""
    ours, theirs = {n: t.shape for n, t in folded.graph.params.items()}, {n: c.shape for n, c in plan.params.items()}
    if other := [f"{n} {list(ours[n])}, not {list(theirs[n])}" for n in ours if n in theirs and ours[n] != theirs[n]]:
        yield f"parameters have other shapes: {_some(other)}"
    if new := [n for n in ours if n not in theirs]:
        yield f"the plan knows nothing of the parameters {_some(new)}"
    if gone := [n for n in theirs if n not in ours]:
        yield f"the program has no parameters {_some(gone)}"
    inputs = [[list(t.shape) for t in folded.graph.inputs], [list(p.shape) for p in plan.inputs]]
    if inputs[0] != inputs[1]:
        yield f"inputs have shapes {_some([str(s) for s in inputs[0]])}, not {_some([str(s) for s in inputs[1]])}"
    try:
        small = shrink(folded, plan.segments)
    except ValueError:
        small = shrink(folded)
    mine, planned = [op.target for op in small.graph.ops], [plan.targets.get(n, "") for n in plan.order]
    if mine != planned:
        at = next((i for i, (x, y) in enumerate(zip(mine, planned, strict=False)) if x != y), None)
        first = "" if at is None else f", the first other one is number {at + 1}: {mine[at]}, not {planned[at]}"
        yield f"it has {len(mine)} operators (equal layers counted once), not {len(planned)}{first}"
    elif inputs[0] == inputs[1] and ours == theirs:
        yield "it has the same operators and parameters, but other constants, dtypes or connections"


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - EXAMPLES} more" if len(texts) > EXAMPLES else ""
    return ", ".join(texts[:EXAMPLES]) + more
