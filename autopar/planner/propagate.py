"""A hand layout -> a plan, by following the data through the graph once.

On every mesh axis an op takes the factor along which its operands are already split; redistribution bytes decide first, then
(for heavy ops) not repeating work, then not leaving a Partial. On tensor axes a heavy op with a parameter takes a factor of that
parameter that survives until the next heavy op: from this alone come column/row pairs, split heads, vocabulary-parallel
embeddings. A parameter's compute placement is settled by its first heavy use and pulled back through the views and casts
between them. The integer program uses these plans as hints.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.errors import LayoutError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.plan.decisions import OpChoice, ParamChoice
from autopar.plan.plan import Plan
from autopar.planner.expert_axes import check_experts, expert_letters, expert_params
from autopar.planner.layout import Layout
from autopar.planner.storage import batch_placements, param_choice, representable
from autopar.planner.tags import RECOMPUTE
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.rules.strategy import digit, follows, is_legal, letter_at, placements, right_of

DEPTH = 40  # how many cheap ops a look-ahead follows


def propagate(
    graph: Graph, layout: Layout, mesh_axes: dict[str, int], trainable: frozenset[str], fixed: Mapping[str, ParamChoice] | None = None
) -> Plan:
    """The plan of `layout` for `graph`. trainable: names of the parameters that get gradients; fixed: parameters whose placements
    an earlier plan settled (another batch size, eval mode)."""
    return _Propagator(graph, layout, Mesh.of(mesh_axes), fixed or {}).plan(mesh_axes, trainable)


class _Propagator:
    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh, fixed: Mapping[str, ParamChoice]) -> None:
        self.fixed = fixed
        self.graph, self.layout, self.mesh = graph, layout, mesh
        self.rules: dict[str, Rule] = {o.name: lookup(o) for o in graph.ops}
        self.consumers: dict[str, list[Op]] = defaultdict(list)
        for o in graph.ops:
            for name in dict.fromkeys(t.name for t in o.inputs):
                self.consumers[name].append(o)
        self.place: dict[str, Placement] = {}
        self.extra: dict[str, list[Placement]] = defaultdict(list)  # further versions that consumers had made
        self.choices: dict[str, OpChoice] = {}
        self.param_of = {t.name: n for n, t in graph.params.items()}
        self.compute: dict[str, Placement] = {}  # parameter -> settled compute placement
        self.chain: dict[str, tuple[str, list[Op]]] = {}  # tensor -> (parameter, views and casts from it)
        self.grad_param = {v: k for k, v in graph.grads.items()}
        self.survival: dict[tuple[str, int, int, int], bool] = {}
        self.known_cuts: dict[tuple[str, int, int], set[int]] = {}
        self.repeated: dict[str, float] = {}
        check_experts(graph, self.rules, layout, mesh)
        if layout.expert_features is not None:
            raise LayoutError(
                "experts that are arranged otherwise than all else are planned, not propagated",
                where="Layout(expert_features=...)",
                fix="leave it out, or ask autopar.plan(layout=...) for the plan",
            )
        read = expert_params(graph, self.rules) if layout.experts else set()
        self.of_experts = {n for n, t in graph.params.items() if t.name in read}

    # ---- the pass --------------------------------------------------------------------------------------------

    def plan(self, mesh_axes: dict[str, int], trainable: frozenset[str]) -> Plan:
        g, mesh = self.graph, self.mesh
        inputs = batch_placements(g.inputs, self.layout.data, mesh)
        for t, p in zip(g.inputs, inputs, strict=True):
            self.place[t.name] = p
        for t in [*g.buffers.values(), *(t for n, t in g.tensors.items() if n not in self.place)]:
            self.place.setdefault(t.name, Placement.of(t.shape))
        outputs_done: dict[str, Placement] = {}
        backward = False
        for t in g.params.values():
            self.chain[t.name] = (self.param_of[t.name], [])
            name = self.param_of[t.name]
            if name in self.fixed:
                self.compute[name] = self.fixed[name].compute
            elif not self.layout.tensor and name not in self.of_experts:
                self.compute[name] = Placement.of(t.shape)
        for op in g.ops:
            if op.direction == "backward" and not backward:
                backward = True
                for name in g.outputs:
                    if name:
                        outputs_done[name] = representable(self.place[name].without_partial(), mesh)
                for i, t in zip(g.tangent_of, g.tangents, strict=True):
                    self.place[t.name] = outputs_done[g.outputs[i]]
            self.visit(op)
        outputs = tuple(
            Placement.of(()) if not n else outputs_done.get(n) or representable(self.place[n].without_partial(), mesh) for n in g.outputs
        )
        for name, t in g.params.items():
            self.compute.setdefault(name, Placement.of(t.shape))
        for name in list(self.chain):
            self.settle(name)
        params = {n: self.fixed.get(n) or param_choice(t, self.compute[n], self.layout, mesh, n in trainable) for n, t in g.params.items()}
        recompute, kept = self.policies()
        return Plan(
            mesh_axes, self.layout.name, params, self.choices, inputs, outputs, self.layout.data,
            {o.name: o.target for o in g.ops}, (), self.repeated, self.layout.reshard_after_forward, kept, recompute,
        )  # fmt: skip

    def policies(self) -> tuple[frozenset[str], dict[str, Placement]]:
        """Ops that their tags let run again, and what is kept of their results all the same."""
        recompute = [op for op in self.graph.ops if op.direction == "forward" and any(t in RECOMPUTE for t in op.tags)]
        rest = [t.name for op in recompute for i, t in enumerate(op.outputs) if t is not None and op.tag(i) not in RECOMPUTE]
        return frozenset(op.name for op in recompute), {n: self.place[n] for n in rest if self.consumers[n]}

    def visit(self, op: Op) -> None:
        rule = self.rules[op.name]
        if len(op.inputs) == 1 and op.inputs[0].name in self.chain and not rule.is_heavy and rule.kind not in ("random", "loss", "norm"):
            param, ops = self.chain[op.inputs[0].name]
            if len(op.outputs) == 1 and op.outputs[0] is not None and not rule.is_fallback:
                self.chain[op.out.name] = (param, [*ops, op])
                if param in self.compute:
                    self.settle(op.out.name)
                return
        strategy: dict[str, tuple[str, int]] = {}
        partial: dict[str, frozenset[int]] = {}
        for t in op.inputs:
            if t.name in self.chain and self.chain[t.name][0] in self.compute:
                self.settle(t.name)
        for a in self.mesh.axes:
            if a.size > 1:
                best = min(self.candidates(op, rule, a.name, strategy), key=lambda c: self.price(op, rule, a.name, c, strategy, partial))
                if isinstance(best, tuple):
                    strategy[a.name] = best
                elif best is not None:
                    partial[a.name] = best
        for i, t in enumerate(op.inputs):
            if t.name in self.chain and self.chain[t.name][0] not in self.compute:
                self.decide_param(op, rule, i, strategy)
        self.commit(op, rule, strategy, partial)

    def commit(self, op: Op, rule: Rule, strategy: dict[str, tuple[str, int]], partial: dict[str, frozenset[int]]) -> None:
        shapes = tuple(t.shape for t in op.inputs)
        want, made = placements(rule, strategy, shapes, tuple(None if t is None else t.shape for t in op.outputs), partial)
        for t, w in zip(op.inputs, want, strict=True):
            if t.name not in self.chain and w not in self.versions(t.name):
                self.extra[t.name].append(w)
        for out, p in zip(op.outputs, made, strict=True):
            if out is not None and p is not None:
                self.place[out.name] = p
        self.choices[op.name] = OpChoice(dict(strategy), dict(partial), rule.kind, rule.is_fallback)
        if rule.is_heavy:
            idle = math.prod(a.size for a in self.mesh.axes if a.name not in strategy)
            if idle > 1:
                self.repeated[op.name] = float(idle)

    # ---- parameters ------------------------------------------------------------------------------------------

    def decide_param(self, op: Op, rule: Rule, index: int, strategy: dict[str, tuple[str, int]]) -> None:
        """Settles the parameter behind operand `index` where `strategy` wants it, on tensor axes and those of experts only."""
        param, ops = self.chain[op.inputs[index].name]
        where: dict[str, tuple[int, int]] = {}
        for axis in (*self.layout.tensor, *(self.layout.experts if param in self.of_experts else ())):
            if axis not in strategy:
                continue
            letter, stride = strategy[axis]
            right = ((d, digit(x, letter, stride, rule)) for d, x in enumerate(rule.inputs[index]) if letter in x)
            at = next(((d, n) for d, n in right if n is not None), None)
            for view in reversed(ops):
                at = self.pull_back(view, at, axis) if at is not None else None
            if at is not None:
                where[axis] = at
        tensor = self.graph.params[param]
        p = Placement.of(tensor.shape, where)
        self.compute[param] = p if p.is_valid(self.mesh) else Placement.of(tensor.shape)
        for name, (owner, _) in list(self.chain.items()):
            if owner == param:
                self.settle(name)

    def pull_back(self, view: Op, at: tuple[int, int], axis: str) -> tuple[int, int] | None:
        rule = self.rules[view.name]
        assert rule.outputs[0] is not None
        found = letter_at(rule.outputs[0], at, self.mesh.axis_size(axis), rule)
        if found is None or not follows(rule, found[0]):
            return None
        letter, stride = found
        return next(((d, stride * right_of(x, letter, rule)) for d, x in enumerate(rule.inputs[0]) if letter in x), None)

    def settle(self, name: str) -> None:
        """Gives the views and casts from a settled parameter to `name` their strategies."""
        param, ops = self.chain[name]
        at = self.compute[param]
        self.place[self.graph.params[param].name] = at
        for op in ops:
            rule = self.rules[op.name]
            strategy = {}
            for axis, where in self.place[op.inputs[0].name].where.items():
                found = letter_at(rule.inputs[0], where, self.mesh.axis_size(axis), rule)
                if found and follows(rule, found[0]):
                    strategy[axis] = found
            self.commit(op, rule, strategy, {})

    def versions(self, name: str) -> list[Placement]:
        return [self.place[name], *self.extra[name]]

    # ---- choosing --------------------------------------------------------------------------------------------

    def candidates(
        self, op: Op, rule: Rule, axis: str, strategy: dict[str, tuple[str, int]]
    ) -> Iterator[tuple[str, int] | frozenset[int] | None]:
        """None, a Partial passed through, or (letter, stride) for `axis`, given the axes already placed."""
        width = self.mesh.axis_size(axis)
        if axis in self.layout.experts and rule.pairs:
            yield from self.with_experts(op, rule, axis, strategy)
            return
        yield None
        summed = frozenset(
            i for i, t in enumerate(op.inputs)
            if not self.undecided(t.name, axis) and all(p.at(axis) == "sum" for p in self.versions(t.name))
        )  # fmt: skip
        # Through views, casts and sums of Partials. Where a Partial meets another tensor it is reduced: passed through a product it
        # would be reduced later once for every product it enters.
        if summed and summed in rule.linear and len(summed) == len(op.inputs):
            yield summed
        seen: set[tuple[str, int]] = set()
        owners = self.param_letters(op, rule)
        on_tensor = axis in self.layout.tensor
        for i, t in enumerate(op.inputs):
            for p in () if self.undecided(t.name, axis) else self.versions(t.name):
                at = p.where.get(axis)
                found = letter_at(rule.inputs[i], at, width, rule) if at else None
                if found and found[0] not in rule.taken and self.fits(rule, axis, found, strategy):
                    seen.add(found)
        if rule.is_heavy and (on_tensor or axis in self.layout.data):
            for x, f in rule.factors.items():
                if x in rule.taken or (rule.kind == "embedding" and x in owners and not f.index):
                    continue  # a table split by columns would leave the residual stream split
                # Tokens sorted by expert cannot be split: rather than every rank doing all of them, each takes a part of the features.
                wanted = (x in owners) == (on_tensor and bool(owners)) or rule.kind == "moe"
                if f.split and wanted:
                    for stride in self.strides(op, rule, x, width, strategy):
                        if self.fits(rule, axis, (x, stride), strategy) and self.keeps(op, rule, x, stride, width):
                            seen.add((x, stride))
                            break
        if on_tensor and rule.is_heavy and any(self.undecided(t.name, axis) for t in op.inputs):
            mine = [c for c in seen if c[0] in owners]
            seen = set(mine) or seen
        yield from sorted(seen)

    def with_experts(self, op: Op, rule: Rule, axis: str, strategy: dict[str, tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """The experts' letter that `axis` takes, beside tokens: as they lie already, else where they may."""
        letter = expert_letters(rule, self.layout.experts, self.mesh)[axis]
        tokens, width = rule.pairs[letter], self.mesh.axis_size(axis)
        lie = (p.where.get(axis) for i, t in enumerate(op.inputs) if t.name not in self.chain for p in self.versions(t.name))
        found = (letter_at(rule.inputs[0], at, width, rule) for at in lie if at)
        strides = [at[1] for at in found if at is not None and at[0] == tokens]
        taken = {a: (rule.pairs.get(x, x), stride) for a, (x, stride) in strategy.items()}
        strides += self.strides(op, rule, tokens, width, taken)
        legal = [(letter, stride) for stride in dict.fromkeys(strides) if is_legal(rule, {**strategy, axis: (letter, stride)}, self.mesh)]
        if not legal:
            raise LayoutError(
                f"layout {self.layout.name} splits tokens over {width} more devices where they no longer divide",
                where=f"operator {op.name} of {op.module or 'the model'}, {rule.factors[tokens].size} tokens, mesh axis {axis}",
                fix="give a batch whose tokens the data axes divide, or layout fsdp",
            )
        yield from legal

    def undecided(self, name: str, axis: str) -> bool:
        if name not in self.chain or self.chain[name][0] in self.compute:
            return False
        return axis in self.layout.tensor or (axis in self.layout.experts and self.chain[name][0] in self.of_experts)

    def param_letters(self, op: Op, rule: Rule) -> set[str]:
        return {x for i, t in enumerate(op.inputs) if t.name in self.chain for d in rule.inputs[i] for x in d}

    def fits(self, rule: Rule, axis: str, choice: tuple[str, int], strategy: dict[str, tuple[str, int]]) -> bool:
        letter, stride = choice
        f = rule.factors[letter]
        where = {a: (0, s) for a, (x, s) in strategy.items() if x == letter}
        return f.split and Placement.of((f.size,), {**where, axis: (0, stride)}).is_valid(self.mesh)

    def price(
        self,
        op: Op,
        rule: Rule,
        axis: str,
        choice: tuple[str, int] | frozenset[int] | None,
        strategy: dict[str, tuple[str, int]],
        partial: dict[str, frozenset[int]],
    ) -> tuple[float, ...]:
        """(bytes to redistribute, work repeated, bytes left Partial, gradient misplaced, tie-break)."""
        s = dict(strategy)
        p = dict(partial)
        if isinstance(choice, tuple):
            s[axis] = choice
        elif choice is not None:
            p[axis] = choice
        shapes = tuple(t.shape for t in op.inputs)
        want, made = placements(rule, s, shapes, tuple(None if t is None else t.shape for t in op.outputs), p)
        width = self.mesh.axis_size(axis)
        moved = 0.0
        for t, w in zip(op.inputs, want, strict=True):
            if self.undecided(t.name, axis):
                continue
            there = w.at(axis)
            size = t.nbytes / math.prod(self.mesh.axis_size(x.axis) for x in w.splits if x.axis != axis)
            moved += min(_moved(p.at(axis), there, size, width) for p in self.versions(t.name))
        repeated = float(rule.is_heavy and choice is None)
        left = sum(
            t.nbytes for t, m in zip(op.outputs, made, strict=True) if t is not None and m is not None and isinstance(m.at(axis), str)
        )
        misplaced = 0.0
        for out, m in zip(op.outputs, made, strict=True):
            if out is not None and m is not None and out.name in self.grad_param and axis in self.layout.tensor:
                target = self.compute.get(self.grad_param[out.name])
                misplaced += float(target is not None and target.at(axis) != m.at(axis))
        order = 0.0 if choice is None else 1.0 if isinstance(choice, frozenset) else 2.0
        if isinstance(choice, frozenset):
            order = -1.0
        split_for_nothing = float(isinstance(choice, tuple) and not rule.is_heavy)
        return (moved, repeated, float(left), misplaced, split_for_nothing, order)

    # ---- looking ahead ---------------------------------------------------------------------------------------

    def strides(self, op: Op, rule: Rule, letter: str, width: int, strategy: Mapping[str, tuple[str, int]]) -> list[int]:
        """Where a digit of `width` may lie in `letter`, major first: in each part between the cuts that later views make, to the right
        of the digits that other axes have there."""
        cuts = {1, rule.factors[letter].size}
        for t, dims in zip(op.outputs, rule.outputs, strict=True):
            for d, x in enumerate(dims or ()):
                if t is not None and letter in x:
                    right = right_of(x, letter, rule)
                    cuts |= {c // right for c in self.cuts(t.name, d, DEPTH) if c % right == 0 and c // right <= rule.factors[letter].size}
        ordered = sorted(cuts)
        taken = [(stride, self.mesh.axis_size(a)) for a, (x, stride) in strategy.items() if x == letter]
        out = []
        for lo, hi in reversed(list(itertools.pairwise(ordered))):
            used = math.prod(w for stride, w in taken if lo <= stride < hi)
            if hi % (used * width * lo) == 0:
                out.append(hi // (used * width))
        return out

    def cuts(self, name: str, dim: int, depth: int) -> set[int]:
        """Right strides at which forward consumers, up to the next heavy op, cut dim `dim` of `name` into letters."""
        out = self.known_cuts.get((name, dim, depth))
        if out is not None:
            return out
        out = self.known_cuts[name, dim, depth] = set()
        if depth == 0:
            return out
        for op in self.consumers[name]:
            if op.direction != "forward":
                continue
            rule = self.rules[op.name]
            i = next(i for i, t in enumerate(op.inputs) if t.name == name)
            for x in rule.inputs[i][dim]:
                right = right_of(rule.inputs[i][dim], x, rule)
                out |= {right, right * rule.factors[x].size}
                if rule.is_heavy:
                    continue
                for t, dims in zip(op.outputs, rule.outputs, strict=True):
                    for d, letters in enumerate(dims or ()):
                        if t is not None and x in letters:
                            r = right_of(letters, x, rule)
                            for c in self.cuts(t.name, d, depth - 1):
                                if c % r == 0 and c <= r * rule.factors[x].size:
                                    out.add(right * c // r)
        return out

    def keeps(self, op: Op, rule: Rule, letter: str, stride: int, width: int) -> bool:
        """Splitting `letter` here stays possible until the next heavy op, for every output that has the letter."""
        if op.direction == "backward":
            return True
        return self.passes_on(op, rule, (letter, stride), width, DEPTH)

    def survives(self, name: str, dim: int, stride: int, width: int, depth: int) -> bool:
        key = (name, dim, stride, width)
        if key in self.survival or depth == 0:
            return self.survival.get(key, True)
        self.survival[key] = True
        for op in self.consumers[name]:
            if op.direction != "forward":
                continue
            rule = self.rules[op.name]
            for i, t in enumerate(op.inputs):
                if t.name != name:
                    continue
                found = letter_at(rule.inputs[i], (dim, stride), width, rule)
                if found is None or not follows(rule, found[0]):
                    self.survival[key] = False
                    return False
                if rule.is_heavy or rule.kind == "loss":
                    continue
                if not self.keeps_at_depth(op, rule, found, width, depth - 1):
                    self.survival[key] = False
                    return False
        return True

    def keeps_at_depth(self, op: Op, rule: Rule, found: tuple[str, int], width: int, depth: int) -> bool:
        """A cheap op passes the letter on. One that reduces it (the mean of a norm) would leave every rank waiting for a sum."""
        if any(dims is not None and not any(found[0] in x for x in dims) for dims in rule.outputs):
            return False
        return self.passes_on(op, rule, found, width, depth)

    def passes_on(self, op: Op, rule: Rule, found: tuple[str, int], width: int, depth: int) -> bool:
        """The letter survives in every output that has it."""
        letter, stride = found
        return all(
            self.survives(t.name, d, stride * right_of(x, letter, rule), width, depth)
            for t, dims in zip(op.outputs, rule.outputs, strict=True)
            for d, x in enumerate(dims or ())
            if t is not None and letter in x
        )


def _moved(here: tuple[int, int] | str | None, there: tuple[int, int] | str | None, size: float, width: int) -> float:
    """Bytes to bring one axis from `here` to `there`."""
    if here == there or here is None:
        return 0.0
    if isinstance(here, str):
        return size if there is not None else 2 * size
    return size / width if there is not None else size
