"""Hand layouts on the integer program: which strategies a layout leaves, so that the program finds the best plan that is that layout.

A layout gives every mesh axis a role, and a role says where an axis may stand:

    data     heavy operators and the loss split their batch over it
    context  heavy operators and the loss split another loop of the inputs over it: the sequence
    tensor   heavy operators with a parameter split a loop of that parameter over it (columns, rows, the vocabulary), others a loop that is not of
             the inputs (attention's heads). Outside of the repeated layers, where such a loop does not divide (a vocabulary of 50,257), tokens.
    experts  a data axis, over which routed experts are split beside tokens. With `Layout.expert_features` any axis may be one, whatever it does for all
             else: routed experts split their features over those named there, and tokens over the rest
    shard    parameters are stored split over it, as far as they divide; over data axes that do not shard they are replicated

Cheap operators are free: between a column and a row product the stream may so be whole or split along the sequence, whichever is faster
(Megatron's sequence parallelism); `Layout.sequence_parallel` = True has it split, False whole. Over tensor axes parameters are stored as is cheapest. Whether an operator's loop is the batch, or
another dim of the inputs, is followed through the graph from the inputs; what no input reaches (a table of positions, tokens sorted by expert) is free.

`Layout.reshard_after_forward` is not told: the program gathers parameters again in backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import LayoutError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.plan.text import LAYER, LETTERS, merged
from autopar.planner.axes import better_batches
from autopar.planner.expert_axes import check_experts, expert_params
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.parameter_storage import Storage
from autopar.planner.formulation.strategies import OpStrategy
from autopar.planner.layout import Layout
from autopar.planner.storage import batch_placements, batch_size, representable
from autopar.rules.grammar import Rule
from autopar.rules.strategy import letter_at, right_of
from autopar.solver.problem import Problem

STARTS = "fsdp", "ddp", "tp", "fsdp+tp"  # what is begun from where a layout is looked for without a solver


@dataclass(frozen=True)
class Loop:
    """A stretch of an operator's letter: `size` steps of `low` elements each."""

    letter: str
    low: int
    size: int

    def holds(self, letter: str, stride: int, width: int) -> bool:
        """Whether an axis of `width` at `stride` of `letter` splits this loop."""
        return letter == self.letter and self.low <= stride and stride * width <= self.low * self.size


@dataclass(frozen=True)
class Loops:
    """An operator's loops that are dims of the program's inputs: of the batch, and others."""

    batch: tuple[Loop, ...] = ()
    others: tuple[Loop, ...] = ()


def by_role(layout: Layout, mesh: Mesh) -> Mesh:
    """`mesh` with one axis per role, whatever axes the user has: a layout on three axes, or on parts of one, is a small program.

    layout: refined (`Layout.of`). Raises LayoutError when an axis has no role.
    """
    idle = [a.name for a in mesh.axes if a.size > 1 and a.name not in (*layout.data, *layout.tensor, *layout.context)]
    if idle:
        raise LayoutError(
            f"layout {layout.name} leaves {', '.join(idle)} without a role",
            where=f"mesh {_said(mesh)}",
            fix="name every axis in data=, tensor= or context=",
        )

    def role(axis: str) -> str:
        named = {"context": layout.context, "tensor": layout.tensor, "experts": layout.experts, "shard": layout.shard}
        first = next((said for said, axes in named.items() if axis in axes), "data")
        if layout.expert_features is None:
            return first
        inner = "features" if axis in layout.expert_features else "experts" if axis in layout.experts else "tokens"
        usual = {"tensor": "features", "experts": "experts"}.get(first, "tokens")
        return first if inner == usual else f"{first}, {inner}"

    roles = {role(a.name) for a in mesh.axes if a.size > 1}
    if len(roles) > 2:
        raise LayoutError(
            f"layout {layout.name} gives axes three roles",
            where=f"mesh {_said(mesh)}",
            fix="give two: with tensor, context or expert axes, shard parameters over all other data axes or none",
        )
    return Mesh(tuple(replace(a, parent=role(a.name)) for a in mesh.axes))


def forbidden(
    layout: Layout, problem: Problem, names: Names, rules: Mapping[str, Rule], mesh: Mesh, user: Mesh
) -> frozenset[tuple[int, int]]:
    """(choice, strategy) that are not `layout`. mesh: the program's (`by_role`); user: the one parameters are stored on; rules: of every operator.

    Raises LayoutError when an operator or the batch cannot be split as the layout asks.
    """
    roles = _Roles(layout, names, rules, mesh, user)
    out: set[tuple[int, int]] = set()
    by_name = {op.name: op for op in names.symmetry.classes.ops}
    for c, cluster in enumerate(names.clusters.clusters):
        op = by_name[cluster.leader]
        chosen = cluster.members[cluster.leader]
        left = roles.of_operator(op, chosen)
        if not left:
            raise roles.refusal(op, chosen)
        out |= {(c, s) for s in range(cluster.size) if s not in left}
    out |= {(names.inputs, s) for s in range(len(names.input_options)) if s not in roles.of_inputs()}
    experts = expert_params(names.symmetry.graph, rules)
    for group, (choice, options) in names.storage.items():
        left = roles.of_storage(options, group in experts)
        out |= {(choice, s) for s in range(len(options)) if s not in left}
    assert all(any((c, s) not in out for s in range(len(choice.labels))) for c, choice in enumerate(problem.choices))
    return frozenset(out)


def by_hand(problem: Problem, names: Names, rules: Mapping[str, Rule], mesh: Mesh, user: Mesh) -> Iterator[Problem]:
    """`problem`, as `forbidden` has it, with what each layout leaves that the model and the mesh allow."""
    for name in STARTS:
        layout = Layout.of(name, user)
        roles = layout.tensor, layout.shard, tuple(set(layout.data) - set(layout.shard))
        if all(any(set(mesh.children(p)) <= set(role) for role in roles) for p, n in mesh.parents.items() if n > 1):
            with contextlib.suppress(LayoutError):
                yield replace(problem, forbidden=problem.forbidden | forbidden(layout, problem, names, rules, mesh, user))


class _Roles:
    def __init__(self, layout: Layout, names: Names, rules: Mapping[str, Rule], mesh: Mesh, user: Mesh) -> None:
        self.layout, self.names, self.rules, self.mesh, self.user = layout, names, rules, mesh, user
        self.graph = names.symmetry.graph
        check_experts(self.graph, rules, layout, mesh)
        self.loops = input_loops(self.graph, rules)
        self.repeated = {
            names.symmetry.rep[op] for stack in names.symmetry.stacks for copy in (*stack.forward, *stack.backward) for op in copy
        }
        batch = batch_size(self.graph.inputs)
        ways = mesh.sizes_product(layout.data)
        if batch is not None and batch % ways:
            most = math.gcd(batch, ways)
            fewer = f"a mesh whose data axes have {most} devices in all, " if most > 1 else ""
            raise LayoutError(
                f"layout {layout.name} splits the batch {ways} ways, but it is {batch}",
                where=f"inputs, dim 0; data axes {', '.join(merged(layout.data))}",
                fix=f"give a batch of {better_batches(batch, {'': ways})}, {fewer}or no layout: the planner then splits each operator as it can",
            )

    # ---- what cannot be ------------------------------------------------------------------------------------------

    def refusal(self, op: Op, chosen: list[OpStrategy]) -> LayoutError:
        """What in the model keeps the layout from being, in terms of its modules and sizes, and what to use instead."""
        what, axes, loops = self.obstacle(op, chosen)
        letters = LETTERS.get(op.target.rsplit(".", 1)[0], {})
        if not set(axes) & set(self.layout.data):
            letters = {x: "heads" if name == "batch" else name for x, name in letters.items()}  # of a product's batch what is not the batch
        sizes = ", ".join(f"{letters.get(x.letter, x.letter)} {x.size}" for x in loops)
        width = self.mesh.sizes_product(axes)
        over = f"{' and '.join(merged(self.user.sort(axes)))} ({width} devices)"
        uneven = [loop for loop in loops if loop.size % width]
        if not loops:
            why = f"it has no loop that is {what}"
        elif len(uneven) == len(loops):
            why = f"of {what} it has {sizes}, which {'does' if len(loops) == 1 else 'do'} not divide"
        else:
            why = f"no way of splitting it goes along {what} ({sizes})"
        home = LAYER.sub("*", op.module) or op.name
        return LayoutError(
            f"layout {self.layout.name} cannot split {home} over {over}: {why}",
            where=f"operator {op.name}, {op.target}, reading {', '.join(str(list(t.shape)) for t in op.inputs)}",
            fix=self.instead(axes, loops),
        )

    def obstacle(self, op: Op, chosen: list[OpStrategy]) -> tuple[str, tuple[str, ...], list[Loop]]:
        """The role that no strategy keeps to (else all of them together): its loop's name, its axes, and the operator's loops that it may split."""
        loops = self.loops.get(op.name, Loops())
        features = self.features(op, loops)
        roles = (
            ("the batch", self.layout.data, list(loops.batch)),
            ("the sequence", self.layout.context, list(loops.others)),
            ("heads or features", self.layout.tensor, features),
        )
        for what, axes, mine in roles:
            if axes and not any(all(self.stands(self.rules[op.name], loops, features, o, a) for a in axes) for o in chosen):
                return what, axes, mine
        used = [(what, axes, mine) for what, axes, mine in roles if axes]
        return (
            " and ".join(what for what, _, _ in used),
            tuple(a for _, axes, _ in used for a in axes),
            [x for _, _, mine in used for x in mine],
        )

    def instead(self, axes: tuple[str, ...], loops: Sequence[Loop]) -> str:
        """What the model does allow."""
        devices, width, batch = self.user.size, self.mesh.sizes_product(axes), batch_size(self.graph.inputs)
        ways = []
        if set(axes) & set(self.layout.tensor):
            most = max((math.gcd(x.size, width) for x in loops), default=1)
            if most > 1 and devices > most and (batch or 0) % (devices // most) == 0:
                ways.append(f"layout fsdp+tp on a mesh of {devices // most}x{most}, whose last axis splits tensors")
            if batch is not None and batch % devices == 0:
                ways.append("layout fsdp")
        return ", or ".join([*ways, "no layout: the planner then splits each operator as it can"])

    # ---- operators -----------------------------------------------------------------------------------------------

    def of_operator(self, op: Op, chosen: list[OpStrategy]) -> set[int]:
        """Strategies that are the layout."""
        rule = self.rules[op.name]
        loops = self.loops.get(op.name, Loops())
        if not (loops.batch or loops.others):
            return set(range(len(chosen)))
        if not (rule.is_heavy or rule.kind == "loss"):
            return self.of_stream(op, loops, chosen)
        features = self.features(op, loops)
        axes = (*self.layout.data, *self.layout.context, *self.layout.tensor)
        fits = {s for s, o in enumerate(chosen) if all(self.stands(rule, loops, features, o, a) for a in axes)}
        uneven = any(loop.size % self.mesh.sizes_product(self.layout.tensor) for loop in features)
        if self.layout.tensor and op.name not in self.repeated and (uneven or not fits):
            fits |= {
                s for s, o in enumerate(chosen)
                if all(self.stands(rule, loops, features, o, a) for a in (*self.layout.data, *self.layout.context))
                and all(self.is_token(loops, o, a) for a in self.layout.tensor)
            }  # fmt: skip
        if not fits and rule.kind == "loss":
            split = (*self.layout.data, *self.layout.context)
            return {s for s, o in enumerate(chosen) if all(self.stands(rule, loops, features, o, a) for a in split)}
        return fits

    def of_stream(self, op: Op, loops: Loops, chosen: list[OpStrategy]) -> set[int]:
        """Strategies of a cheap operator: with sequence parallelism those that can be are split over all tensor axes; without it, no tokens are."""
        every = set(range(len(chosen)))
        if self.layout.sequence_parallel is None:
            return every
        if not self.layout.sequence_parallel:
            return {s for s in every if not any(self.is_token(loops, chosen[s], a) for a in self.layout.tensor)}
        split = {s for s in every if set(self.layout.tensor) <= set(dict(chosen[s].split))}
        return split or every

    def stands(self, rule: Rule, loops: Loops, features: Sequence[Loop], chosen: OpStrategy, axis: str) -> bool:
        """Whether `axis` does what its role says."""
        at = dict(chosen.split).get(axis)
        if rule.pairs and axis in self.layout.experts:
            return at is not None and at[0] in rule.pairs
        if rule.pairs and self.layout.expert_features is not None:
            tokens = set(rule.pairs.values())
            inside = {x.letter for x in features} - tokens - set(rule.pairs)
            return at is not None and at[0] in (inside if axis in self.layout.expert_features else tokens)
        of_inputs = loops.batch if axis in self.layout.data else loops.others if axis in self.layout.context else None
        if of_inputs is not None and not of_inputs:
            return True
        mine = features if of_inputs is None else of_inputs
        return at is not None and any(loop.holds(*at, self.mesh.axis_size(axis)) for loop in mine)

    def features(self, op: Op, loops: Loops) -> list[Loop]:
        """What a tensor axis may split: the loops of the operator's parameter; if it has none, what is not of the inputs and not summed."""
        rule = self.rules[op.name]
        mine = [dims for t, dims in zip(op.inputs, rule.inputs, strict=True) if t.name in self.names.clusters.chain]
        own = {x for dims in mine for group in dims for x in group}
        if own:
            return [Loop(x, 1, rule.factors[x].size) for x in rule.factors if x in own and x not in rule.taken]
        found = []
        for x, f in rule.factors.items():
            if f.split and x not in rule.taken and (f.reduce is None or rule.kind == "loss"):
                of_inputs = [loop for loop in (*loops.batch, *loops.others) if loop.letter == x]
                minor = min((loop.low for loop in of_inputs), default=f.size)  # (b heads): the heads
                major = max((loop.low * loop.size for loop in of_inputs), default=f.size)
                found += [Loop(x, low, size) for low, size in ((1, minor), (major, f.size // major)) if size > 1]
        return found

    def is_token(self, loops: Loops, chosen: OpStrategy, axis: str) -> bool:
        at = dict(chosen.split).get(axis)
        return at is not None and any(loop.holds(*at, self.mesh.axis_size(axis)) for loop in (*loops.batch, *loops.others))

    # ---- inputs and parameters -----------------------------------------------------------------------------------

    def of_inputs(self) -> set[int]:
        wanted = batch_placements(self.graph.inputs, self.layout.data, self.mesh)
        return {
            i for i, data in enumerate(self.names.input_options) if batch_placements(self.graph.inputs, data, self.mesh) == wanted
        }  # fmt: skip

    def of_storage(self, options: list[Storage], of_experts: bool) -> set[int]:
        """Split over as many shard axes as any option is that a DTensor on the user's axes can be, over no data axis that does not shard. Routed experts lie split over
        the axes that split them, too."""
        shard = {*self.layout.shard, *(self.layout.experts if of_experts else ())}
        free = shard | set(self.layout.tensor) | set(self.layout.context) | set((self.layout.expert_features or ()) if of_experts else ())
        plain = [representable(o.placement, self.user) == o.placement for o in options]
        mine = {i: o.placement.where for i, o in enumerate(options) if plain[i] and free.issuperset(o.placement.where)}
        ways = {i: self.mesh.sizes_product(tuple(a for a in shard if a in where)) for i, where in mine.items()}
        most = max(ways.values())
        return {i for i, n in ways.items() if n == most}


def input_loops(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, Loops]:
    """Per operator, which of its loops are dims of the inputs. Followed forwards, as long as views leave a dim whole."""
    batch = batch_size(graph.inputs)
    # tensor -> digits (dim, stride, size) that are a dim of the inputs, and whether that is the batch
    digits: dict[str, dict[tuple[int, int, int], bool]] = {}
    for t in graph.inputs:
        found = {(d, 1, n): d == 0 and n == batch for d, n in enumerate(t.shape) if n > 1}
        digits[t.name] = found
    out: dict[str, Loops] = {}
    for op in graph.ops:
        rule = rules[op.name]
        mine: dict[Loop, bool] = {}
        for i, t in enumerate(op.inputs):
            for (d, stride, size), is_batch in digits.get(t.name, {}).items():
                at = letter_at(rule.inputs[i], (d, stride), size, rule) if d < len(rule.inputs[i]) else None
                if at is not None:
                    mine.setdefault(Loop(*at, size), is_batch)
        if mine:
            out[op.name] = Loops(
                tuple(x for x, is_batch in mine.items() if is_batch), tuple(x for x, is_batch in mine.items() if not is_batch)
            )
        for made, dims in zip(op.outputs, rule.outputs, strict=True):
            if made is not None and dims is not None:
                digits[made.name] = {
                    (d, loop.low * right_of(group, loop.letter, rule), loop.size): is_batch
                    for loop, is_batch in mine.items() for d, group in enumerate(dims) if loop.letter in group
                }  # fmt: skip
    return out


def _said(mesh: Mesh) -> str:
    return " x ".join(f"{p}={n}" for p, n in mesh.parents.items())
