"""Why a plan does not split an operator, or store a parameter, as one would have thought: because it cannot, or at what cost.

The step is solved twice, as it is and with all other strategies of that operator's cluster (or all other storages of the parameter) forbidden. What
the second answer costs more is the answer to "why not": the accounts that grew and the collectives that came are named.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.errors import AutoparError, MeshError
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.diff import collectives
from autopar.plan.plan import Plan
from autopar.plan.text import HEAVY, LETTERS, placed, strategy
from autopar.planner.axes import divides_poorly
from autopar.planner.formulation.apply import apply
from autopar.planner.formulation.causal_balance import ROWS
from autopar.planner.formulation.layouts import by_role, forbidden
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.layout import Layout
from autopar.planner.refit import leaf_names
from autopar.planner.stages import WHOLE_AXES, Stages
from autopar.planner.storage import batch_size
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.problem import BACKWARD, FORWARD, Decision, Problem
from autopar.solver.solve import Infeasible, Limits, Solution
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

SHOWN = 8  # strategies, names
CHANGE = 0.005  # of the step: smaller changes of an account are not told
_WORD = re.compile(r"\s*(?:([^\s,:]+)\s*:\s*([^\s,]+)|([^\s,]+)\s+over\s+([^\s,]+))\s*(?:,|$|\s)", re.IGNORECASE)
_DIM = re.compile(r"(?:s|shard)?\(?(\d+)\)?", re.IGNORECASE)


@dataclass(frozen=True)
class Explanation:
    """verdict: "does" (the plan has it), "cannot", "does not fit" or "costs". text: the whole answer. step_s: of the plan; instead_s: of the best plan
    that does as asked (both None where that was not found out)."""

    verdict: str
    text: str
    step_s: float | None = None
    instead_s: float | None = None

    def __str__(self) -> str:
        return self.text


class _Cannot(Exception):
    """The reason, for people."""


class _WantedSplit(NamedTuple):
    """What an axis of the user's shall split: a dim of the result, a loop by its letter, or (both None) nothing."""

    dim: int | None = None
    letter: str | None = None


@dataclass(frozen=True)
class _Asked:
    """classes: operators (or parameters' tensors) by their classes. target: of the operators, "" for parameters."""

    said: str
    classes: tuple[str, ...]
    target: str
    count: int


def explain_graph(
    folded: Folded,
    mesh_axes: Mapping[str, int],
    cluster: Cluster,
    training: TrainingConfig,
    op: str,
    placement: str,
    limits: Limits | None = None,
    progress: Callable[[str, float], None] | None = None,
    layout: str | Layout | None = None,
) -> Explanation:
    """Why the plan for `folded` does not have `op` at `placement`; the other arguments as of `plan_graph`.

    op: an operator's name, a module's path or a parameter's name (or how they end). placement: "tp:n", "tp:out dp:tokens", "Shard(0) over tp",
    "Replicate over dp". Raises AutoparError for what it cannot read, with what there is.
    """
    mesh = Mesh.of(dict(mesh_axes))
    if sum(n > 1 for n in mesh_axes.values()) > WHOLE_AXES:
        raise AutoparError(
            f"explain answers for at most {WHOLE_AXES} mesh axes, this mesh has {len(mesh_axes)}",
            fix="ask with a mesh whose neighbouring axes are joined (4x2x8 as 8x8)",
        )
    asked = _found(folded, op)
    wanted_splits = _wanted_splits(placement, mesh, asked.target)
    hand = None if layout is None else Layout.of(layout, mesh)
    merged = mesh if hand is None else by_role(hand, mesh)

    def as_planned(problem: Problem, names: Names, rules: Mapping[str, Rule], on: Mesh) -> Problem:
        return problem if hand is None else replace(problem, forbidden=problem.forbidden | forbidden(hand, problem, names, rules, on, mesh))

    def as_asked(problem: Problem, names: Names, rules: Mapping[str, Rule], on: Mesh) -> Problem:
        problem = as_planned(problem, names, rules, on)
        out = set(problem.forbidden)
        for name in asked.classes:
            choice, left = _matching(name, asked, wanted_splits, names, rules, mesh)
            out |= {(choice, s) for s in range(len(problem.choices[choice].labels)) if s not in left}
        for c, labels in enumerate(choice.labels for choice in problem.choices):
            if all((c, s) in out for s in range(len(labels))):
                raise _Cannot(f"layout {hand.name if hand else ''} does not allow it")
        return replace(problem, forbidden=frozenset(out))

    title = f"{asked.said}: {placement}"
    try:
        instead = Stages(folded, merged, cluster, training, limits, progress, as_asked).run(merge=False)
    except _Cannot as e:
        return Explanation("cannot", f"{title}\nIt cannot be: {e}")
    except TimeoutError as e:
        raise AutoparError(f"The solver found no plan: {e}", fix="give it more time (--time-limit)") from e
    found = Stages(folded, merged, cluster, training, limits, progress, as_planned).run(merge=False)
    return _answer(title, asked, wanted_splits, folded, mesh, training, found, instead)


# ---- the question ------------------------------------------------------------------------------------------------


def _found(folded: Folded, text: str) -> _Asked:
    graph = folded.graph
    by_name = {op.name: op for op in graph.ops}
    want = _star(text) or "?"
    if text in by_name:
        ops = [by_name[text]]
    else:
        params = {n: folded.tensor_rep[t.name] for n, t in graph.params.items() if _ends(n, want)}
        if params:
            classes = tuple(dict.fromkeys(params.values()))
            count = sum(folded.tensor_count[c] for c in classes)
            return _Asked(_told(sorted({_star(n) for n in params}), count), classes, "", count)
        inside = [op for op in graph.ops if op.direction == "forward" and _ends(op.module, want)]
        heavy = [op for op in inside if lookup(op).kind in HEAVY]
        ops = heavy or [op for op in inside if lookup(op).kind != "view"]
    if not ops:
        known = dict.fromkeys([*(_star(op.module) for op in graph.ops if op.module), *map(_star, graph.params)])
        close = difflib.get_close_matches(want, known, n=3, cutoff=0.4) or [k for k in known if k.endswith(want.rsplit(".", 1)[-1])][:3]
        meant = f"did you mean {' or '.join(close)}? Else " if close else ""
        raise AutoparError(
            f"The program has no operator, module or parameter {text[:100]!r}",
            where="OPERATOR",
            fix=f"{meant}name one as `autopar show` does",
        )
    targets = dict.fromkeys(op.target for op in ops)
    if len(targets) > 1:
        several = [f"{op.name} ({op.target})" for op in {folded.rep[op.name]: op for op in ops}.values()]
        raise AutoparError(f"{text[:100]} has several operators", where="OPERATOR", fix=f"name one: {', '.join(several[:SHOWN])}")
    classes = tuple(dict.fromkeys(folded.rep[op.name] for op in ops))
    count = sum(folded.count[c] for c in classes)
    said = sorted({_star(op.module) or op.name for op in ops})
    return _Asked(f"{_told(said, count)}, {ops[0].target}", classes, ops[0].target, count)


def _star(name: str) -> str:
    return re.sub(r"(?:^|(?<=\.))\d+(?=\.|$)", "*", name)


def _ends(name: str, want: str) -> bool:
    return ("." + _star(name)).endswith("." + want)


def _told(names: Sequence[str], count: int) -> str:
    return f"{', '.join(names[:SHOWN])} ({count} x)" if count > 1 else ", ".join(names[:SHOWN])


def _wanted_splits(text: str, mesh: Mesh, target: str) -> dict[str, _WantedSplit]:
    axes = dict.fromkeys((*mesh.parents, *mesh.names))
    letters: dict[str, str] = {}
    for letter, name in LETTERS.get(target.rsplit(".", 1)[0], {}).items():
        letters.setdefault(name, letter)  # of several that are called alike, as those of experts, the first, which every such operator has
    found: dict[str, _WantedSplit] = {}
    at = 0
    if text.strip().lower() in ("r", "replicate", "replicated"):
        return dict.fromkeys(mesh.parents, _WantedSplit())
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise AutoparError(
                f"{text[:100]!r} is not a placement",
                where="PLACEMENT",
                fix='write it as in "tp:n", "dp:tokens tp:out", "Shard(0) over tp" or "Replicate over dp"',
            )
        at = match.end()
        axis, what = (match[1], match[2]) if match[1] else (match[4], match[3])
        if axis not in axes:
            close = difflib.get_close_matches(axis, axes, n=1, cutoff=0.4)
            meant = f"did you mean {close[0]}? " if close else ""
            raise MeshError(f"The mesh has no axis {axis[:50]!r}", where="PLACEMENT", fix=f"{meant}It has {', '.join(axes)}")
        dim = _DIM.fullmatch(what)
        if what.lower() in ("r", "replicate", "replicated", "repeated", "-"):
            found[axis] = _WantedSplit()
        elif dim is not None:
            found[axis] = _WantedSplit(dim=int(dim[1][:6]))
        else:
            found[axis] = _WantedSplit(letter=letters.get(what, what))
    return found


# ---- strategies --------------------------------------------------------------------------------------------------


def _matching(
    name: str, asked: _Asked, wanted_splits: Mapping[str, _WantedSplit], names: Names, rules: Mapping[str, Rule], mesh: Mesh
) -> tuple[int, set[int]]:
    """The choice that decides about `name`, and its strategies that are as wished; _Cannot where there are none."""
    q = names.symmetry
    if not asked.target:
        return _storages(q.tensor_rep.get(name, name), wanted_splits, names, mesh)
    name = q.rep.get(name, name)
    if name in names.clusters.of:
        return _strategies(name, wanted_splits, names, rules[name], mesh)
    raise _Cannot("it follows from a parameter alone: it is placed as whoever reads it does")


def _storages(tensor: str, wanted_splits: Mapping[str, _WantedSplit], names: Names, mesh: Mesh) -> tuple[int, set[int]]:
    choice, options = names.storage[tensor]
    shape = names.symmetry.graph.tensors[tensor].shape
    for axis, wanted_split in wanted_splits.items():
        if wanted_split.letter is not None:
            raise _Cannot(f"a parameter has dims, not loops: ask for Shard(0) over {axis}")
        if wanted_split.dim is not None and wanted_split.dim >= len(shape):
            raise _Cannot(f"it has {len(shape)} dims, of shape {list(shape)}")
    left = set()
    for s, o in enumerate(options):
        if all(
            all(
                (o.placement.where[a][0] == wanted_split.dim) if a in o.placement.where else wanted_split.dim is None
                for a in _children(axis, mesh)
            )
            for axis, wanted_split in wanted_splits.items()
        ):
            left.add(s)
    if not left:
        for axis, wanted_split in wanted_splits.items():
            size = mesh.sizes_product(tuple(_children(axis, mesh)))
            if wanted_split.dim is not None and shape[wanted_split.dim] % size:
                raise _Cannot(f"dim {wanted_split.dim} of {list(shape)} does not divide over the {size} devices of {axis}")
        raise _Cannot(f"a parameter of shape {list(shape)} can be stored as {_some([o.label for o in options])}")
    return choice, left


def _strategies(name: str, wanted_splits: Mapping[str, _WantedSplit], names: Names, rule: Rule, mesh: Mesh) -> tuple[int, set[int]]:
    c = names.clusters.of[name]
    wanted: dict[str, set[str]] = {}
    for axis, wanted_split in wanted_splits.items():
        letters: set[str] = set()
        outs = next(o for o in rule.outputs if o is not None)
        if wanted_split.letter is not None:
            if wanted_split.letter not in rule.factors:
                raise _Cannot(f"it has no loop {wanted_split.letter!r}; its loops are {_some(list(rule.factors))}")
            letters = set(rule.pairs) if wanted_split.letter in rule.pairs else {wanted_split.letter}
        elif wanted_split.dim is not None:
            if wanted_split.dim >= len(outs):
                raise _Cannot(f"its result has {len(outs)} dims")
            letters = set(outs[wanted_split.dim])
            letters |= {y for y, x in rule.alongside.items() if x in letters}
        if letters and not any(rule.factors[x].split for x in letters):
            raise _Cannot(f"{' '.join(sorted(letters))} may not be split: what it gives is not put together from parts of that loop")
        wanted[axis] = letters
    members = names.clusters.clusters[c].members[name]

    def fits(split: Mapping[str, tuple[str, int]]) -> bool:
        return all(
            all((split[a][0] in letters) if a in split else not letters for a in _children(axis, mesh)) for axis, letters in wanted.items()
        )

    left = {s for s, m in enumerate(members) if fits(dict(m.split))}
    if not left:
        for axis, letters in wanted.items():
            sizes = {x: rule.factors[x].size for x in letters}
            width = mesh.sizes_product(tuple(_children(axis, mesh)))
            if letters and letters <= set(rule.pairs) and (all_of := math.prod(sizes.values())) % width:
                raise _Cannot(f"{all_of} experts do not divide over the {width} devices of {axis}")
            if sizes and not letters <= set(rule.pairs) and all(n % width for n in sizes.values()):
                said = ", ".join(f"{x} of {n}" for x, n in sorted(sizes.items()))
                raise _Cannot(f"{said} does not divide over the {width} devices of {axis}")
            if not letters and rule.is_heavy:
                raise _Cannot(f"all ranks of {axis} would repeat its work, where they can share it")
            if letters and letters <= set(rule.alongside):
                raise _Cannot(
                    f"a ring is tried where samples are fewer than devices and a rank of {axis} has {ROWS} neighbouring keys or more"
                )
        leader = names.clusters.clusters[c].leader
        follows = "" if leader == name else f"; it follows {leader}, whose strategies are {_some(list(names.clusters.clusters[c].labels))}"
        raise _Cannot(f"it is not offered: {_some(list(dict.fromkeys(m.label for m in members)))}{follows}")
    return c, left


def _children(axis: str, mesh: Mesh) -> list[str]:
    """The refined axes of an axis of the user's, or of one of its parts."""
    return [a for a in mesh.children(axis) or (axis,) if mesh.axis_size(a) > 1]


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")


# ---- the answer --------------------------------------------------------------------------------------------------


def _answer(
    title: str,
    asked: _Asked,
    wanted_splits: Mapping[str, _WantedSplit],
    folded: Folded,
    mesh: Mesh,
    training: TrainingConfig,
    found: Found,
    instead: Found,
) -> Explanation:
    if isinstance(found.answer, Infeasible):
        return Explanation("does not fit", f"{title}\nNo plan fits, with or without it: {_lacking(found.answer, folded, mesh)}")
    plan = _plan(folded, mesh, training, found)
    lines = [title, f"The plan has {_what(asked, folded, plan)}: step {format_time(found.answer.objective_s)}."]
    step = found.answer.objective_s
    if isinstance(instead.answer, Infeasible):
        lines.append(f"As asked, no plan fits: {_lacking(instead.answer, folded, mesh)}")
        return Explanation("does not fit", "\n".join(lines), step)
    if _has(asked, wanted_splits, found, mesh):
        return Explanation("does", "\n".join([lines[0], f"So it is in the plan. {lines[1]}"]), step, step)
    other = _plan(folded, mesh, training, instead)
    now = instead.answer.objective_s
    if now <= step * (1 + max(found.answer.gap, instead.answer.gap)):
        lines.append(f"As asked, {_what(asked, folded, other)}: step {format_time(now)}, as good within the solver's gap.")
    else:
        lines.append(f"As asked, {_what(asked, folded, other)}: step {format_time(now)}, {100 * (now / step - 1):+.2f}%.")
    lines += _changes(found, instead)
    moved = collectives(plan, other)
    if moved:
        lines += ["collectives:", *(f"  {x}" for x in moved)]
    return Explanation("costs", "\n".join(lines), step, now)


def _lacking(answer: Infeasible, folded: Folded, mesh: Mesh) -> str:
    why = divides_poorly(batch_size(folded.graph.inputs), mesh.parents) or f"{format_bytes(answer.least_bytes)} a device would do"
    return f"memory, {answer.position}: {format_bytes(answer.shortfall_bytes)} too much ({why})"


def _plan(folded: Folded, mesh: Mesh, training: TrainingConfig, found: Found) -> Plan:
    assert isinstance(found.answer, Solution)
    made = apply(folded, found.shrunk, found.rules, mesh, training, found.problem, found.names, found.answer.decision)
    leaves = leaf_names(folded)
    return replace(made, collectives=tuple(replace(c, tensor=leaves.get(c.tensor, c.tensor)) for c in made.collectives))


def _what(asked: _Asked, folded: Folded, plan: Plan) -> str:
    """The strategies (or storages) that `plan` has for what was asked about."""
    if asked.target:
        target = asked.target.rsplit(".", 1)[0]
        return " and ".join(dict.fromkeys(strategy(plan, target, plan.ops[name]) for name in asked.classes))
    by_tensor = {t.name: n for n, t in folded.graph.params.items()}
    return " and ".join(dict.fromkeys(placed(plan.params[by_tensor[t]].storage) for t in asked.classes))


def _has(asked: _Asked, wanted_splits: Mapping[str, _WantedSplit], found: Found, mesh: Mesh) -> bool:
    assert isinstance(found.answer, Solution)
    for name in asked.classes:
        try:
            choice, left = _matching(name, asked, wanted_splits, found.names, found.rules, mesh)
        except _Cannot:  # of a program with strategies already chosen
            return False
        if found.answer.decision.strategies[choice] not in left:
            return False
    return True


def _changes(found: Found, instead: Found) -> list[str]:
    """What grew or shrank: stages, their accounts, the peak."""
    assert isinstance(found.answer, Solution) and isinstance(instead.answer, Solution)
    before, after = accounts(found.problem, found.answer.decision), accounts(instead.problem, instead.answer.decision)
    lines = []
    for key in dict.fromkeys((*before, *after)):
        x, y = before.get(key, 0.0), after.get(key, 0.0)
        if abs(x - y) > CHANGE * found.answer.objective_s:
            lines.append(f"  {key[0]:<9} {key[1]:<8} {format_time(x)} -> {format_time(y)}")
    peaks = [max(a.price.row_bytes, default=0.0) for a in (found.answer, instead.answer)]
    if abs(peaks[0] - peaks[1]) > 0.01 * max(peaks):
        lines.append(f"  peak memory        {format_bytes(peaks[0])} -> {format_bytes(peaks[1])}")
    return lines


def accounts(problem: Problem, decision: Decision) -> dict[tuple[str, str], float]:
    """(stage, resource) -> seconds that it is busy."""
    x = decision.strategies
    busy: dict[int, float] = defaultdict(float)
    paid = [choice.times[x[c]] for c, choice in enumerate(problem.choices)]
    paid += [problem.reruns[r].times[x[problem.reruns[r].choice]] for r in decision.rerun]
    paid += [problem.values[v].policies[k].times for v, kept in decision.kept.items() for k in kept]
    for (v, direction), used in decision.arcs.items():
        flow = {FORWARD: problem.values[v].forward, BACKWARD: problem.values[v].backward}[direction]
        paid += [flow.arcs[a].times for a in used] if flow is not None else []
    for times in paid:
        for a, t in times.items():
            busy[a] += t
    return {(problem.stages[a.stage], a.resource): busy[i] for i, a in enumerate(problem.accounts) if busy[i]}
