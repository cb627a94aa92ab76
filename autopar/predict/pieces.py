"""A micro-batch of one model replica, taken apart: what comes before the layers, a layer of each stack, what comes after them.

Read off the graph that the integer program answered for, with the strategies it chose: nothing here knows what a layer is but that the graph repeats.
What lies between two stacks (T5's encoder and decoder) is a piece too. Backward's operators outside of layers mirror forward's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost import compute, experts
from autopar.cost.fusion import Share, is_fusible
from autopar.cost.memory import again_bytes, moved_bytes, reads, writes
from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.placement import Placement
from autopar.planner.formulation.apply import used_arcs
from autopar.planner.found import Found
from autopar.predict import fused_kernels as kernels
from autopar.predict.work import MATMUL, MEMORY, Task, Transfer, Workload
from autopar.rules.grammar import Rule
from autopar.solver.solve import Solution

FIRST, LAST = "before", "after"  # names of what is before and after all layers


@dataclass(frozen=True, eq=False)
class Piece:
    """One copy of it, on one device. layers: how many the model has of this piece (0: it is no layer).

    forward, backward: all that runs. again: results of forward that a memory-bound kernel made and a product reads in backward, made again there.
    saved_bytes: kept for backward if nothing is made again; spared_bytes: of that, what `again` makes; input_bytes: what comes from the piece before it (as split as
    possible); scores_bytes: of one matrix of attention scores; largest_bytes: of the largest result of forward. params: elements that a device
    holds; shared: of those, elements that an earlier piece has too (tied); routed: of those, elements of routed experts. tensors: of all others, elements of a parameter
    and how many there are of so many. experts_bytes: what routed experts take while they run, besides operands and results (the fullest rank's).
    exchanges: of them, in which half, bytes of all rows of one, how many: they are there also where all experts are on one device, and nothing is sent.
    rows_bytes: what they receive and make of it in forward (the fullest rank's), which some software keeps.
    """

    name: str
    layers: int
    forward: Workload
    backward: Workload
    recompute: Workload
    saved_bytes: float
    spared_bytes: float
    input_bytes: float
    scores_bytes: float
    largest_bytes: float
    params: float
    shared: float
    routed: float = 0.0
    tensors: tuple[tuple[float, float], ...] = ()
    experts_bytes: float = 0.0
    exchanges: tuple[tuple[str, float, float], ...] = ()
    rows_bytes: float = 0.0


@dataclass
class _Draft:
    forward: list[Workload] = field(default_factory=list)
    backward: list[Workload] = field(default_factory=list)
    recompute: list[Workload] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tensors: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    exchanges: dict[tuple[str, float], float] = field(default_factory=lambda: defaultdict(float))


def pieces(found: Found, fusion: str = "compiled") -> tuple[Piece, ...]:
    """In forward's order. fusion: as `autopar.predict.fused_kernels.of` has it."""
    return _Reader(found, fusion).run()


class _Reader:
    def __init__(self, found: Found, fusion: str) -> None:
        assert isinstance(found.answer, Solution)
        self.found, self.names, self.problem, self.rules = found, found.names, found.problem, found.rules
        self.decision = found.answer.decision
        self.q, self.mesh, self.fusion = found.names.symmetry, found.mesh, fusion
        self.cost = found.formulated.cost
        self.graph: Graph = self.q.graph
        self.kernels = kernels.of(found, fusion)
        self.cl = self.names.clusters
        self.place = self.places()
        self.maker = self.kernels.maker
        self.readers: dict[str, list[tuple[Op, int]]] = defaultdict(list)
        for op in self.graph.ops:
            for i, t in enumerate(op.inputs):
                self.readers[t.name].append((op, i))
        self.drafts: dict[int, _Draft] = defaultdict(_Draft)

    def run(self) -> tuple[Piece, ...]:
        for op in self.graph.ops:
            self.operator(op)
        self.kept()
        self.recompute()
        self.transfers()
        self.memory()
        self.parameters()
        return tuple(self.piece(i, d) for i, d in sorted(self.drafts.items()))

    # ---- where operators belong --------------------------------------------------------------------------------------

    def places(self) -> dict[str, int]:
        """Operator -> its piece: 2 i + 1 for stack i, 2 i for what comes before it, 2 S for what comes after all."""
        stacks = self.q.stacks
        position = {op.name: i for i, op in enumerate(self.graph.ops)}
        home = {n: 2 * s + 1 for s, stack in enumerate(stacks) for part in (stack.forward, stack.backward) for copy in part for n in copy}
        begins = sorted(min(position[n] for copy in stack.forward for n in copy) for stack in stacks)
        turns = sorted(min(position[n] for copy in stack.backward for n in copy) for stack in stacks if any(stack.backward))
        out = {}
        for op in self.graph.ops:
            at = position[op.name]
            if op.direction == "forward":
                passed = sum(b <= at for b in begins)
            else:
                passed = len(stacks) - sum(b <= at for b in turns)
            out[op.name] = home.get(op.name, 2 * passed)
        return out

    def copies(self, piece: int) -> int:
        """How many of the program's layers the piece stands for; 1 outside of layers."""
        if piece % 2 == 0:
            return 1
        stack = self.q.stacks[piece // 2]
        return sum(self.q.times[copy[0]] for copy in stack.forward) * stack.layers

    def share(self, op: Op) -> float:
        """How often `op` runs in one copy of its piece, on average."""
        return self.q.times[op.name] / self.copies(self.place[op.name])

    # ---- time --------------------------------------------------------------------------------------------------------

    def placed(self, op: Op) -> tuple[Mapping[str, tuple[str, int]], tuple[Placement, ...], tuple[Placement | None, ...]]:
        """Its strategy, and the placements of operands and results."""
        rep = self.q.rep[op.name]
        c = self.cl.of[rep]
        s = self.decision.strategies[c]
        return dict(self.cl.clusters[c].members[rep][s].split), self.cl.want[rep][s], self.cl.made[rep][s]

    def operator(self, op: Op) -> None:
        rule = self.rules[op.name]
        if self.is_free(op):
            return
        draft = self.drafts[self.place[op.name]]
        halves = [draft.forward if op.direction == "forward" else draft.backward]
        if op.name in self.kernels.again or (self.fusion == "compiled" and op.direction == "forward" and self.follows_a_parameter(op)):
            halves.append(draft.backward)
        split, want, _ = self.placed(op)
        for again, half in enumerate(halves):
            task = self.task(op, self.share_of(op), bool(again))
            half.append(Workload({task: self.share(op)} if task else {}))
            for kind, axes, sent, _ in self.cost.inside(op, rule, split, want):  # equal ones too: a softmax has a maximum and a sum
                routed = experts.chosen_of(op, rule) if kind == "all_to_all" and experts.is_experts(op) else None
                half.append(Workload({}, {Transfer(kind, self.user_axes(axes), sent, routed=routed): self.share(op)}))

    def kept(self) -> None:
        """What kernels do because values are kept."""
        for b, count in self.kernels.besides:
            draft, often = self.drafts[self.place[b.op]], count / self.copies(self.place[b.op])
            (draft.backward if b.half else draft.forward).append(Workload({Task(MEMORY, "", 0.0, b.bytes, b.launches): often}))

    def follows_a_parameter(self, op: Op) -> bool:
        """Whether what it makes follows from a parameter alone, and backward reads it: it is made again there."""
        return self.found.formulated.is_chained(op) and any(
            r.direction == "backward" or self.follows_a_parameter(r) for t in op.outputs if t is not None for r, _ in self.readers[t.name]
        )

    def is_free(self, op: Op) -> bool:
        return op.name in self.kernels.free

    def share_of(self, op: Op) -> Share:
        # Losses written by hand go call by call, but for those that a compiler fuses.
        by_itself = self.fusion != "compiled" and self.place[op.name] == 2 * len(self.q.stacks)
        if by_itself or self.rules[op.name].is_heavy or op.name not in self.kernels.shares:
            return Share(frozenset(t.name for t in reads(op)), frozenset(t.name for t in writes(op)), True)
        return self.kernels.shares[op.name]

    def task(self, op: Op, share: Share, again: bool = False) -> Task | None:
        rule: Rule = self.rules[op.name]
        split, want, made = self.placed(op)
        moved = moved_bytes(op, want, made, self.mesh, share.reads, share.writes) + again_bytes(op, want, self.mesh)
        launches = float(share.launches)
        if self.fusion == "compiled":
            cost = self.cost.op(op, rule, split, want, made, again)
            moved, launches = cost.bytes, cost.launches
        for i, t in enumerate(op.inputs):
            if t.name in share.reads and (op.name, t.name) in self.kernels.instead:
                part = want[i].share(self.mesh)
                fresh = self.kernels.instead[op.name, t.name]
                moved += part * (sum(x.nbytes for x in fresh) - t.nbytes)
        dtype = compute.compute_dtype(op)
        if rule.kind == "attention" and not rule.is_fallback:
            # Ranks that share a sequence may deal its blocks so that each has an equal share of what causality leaves (Megatron's context parallelism).
            whole = compute.flops(op, rule, {}, self.mesh)
            ways = math.prod(self.mesh.axis_size(a) for a in split)
            square = whole / compute.seen(op, rule) if compute.seen(op, rule) else whole
            kind = compute.attention_kind(op, rule, split, self.mesh)
            return Task(kind, dtype, compute.flops(op, rule, split, self.mesh), moved, 1.0, whole / ways, square / ways, again=again)
        flops = compute.flops(op, rule, split, self.mesh)
        if flops:
            grads = [
                math.prod(p.local_shape(self.mesh))
                for t, p in zip(op.outputs, made, strict=True)
                if t is not None and p is not None and self.is_gradient(t)
            ]
            load = experts.load_of(rule, split, self.mesh, self.cost.imbalance) if experts.is_experts(op) else 1.0
            remade = experts.remade_flops(op, compute.local_sizes(rule, split, self.mesh)) if experts.is_experts(op) else 0.0
            return Task(MATMUL, dtype, flops, moved, 1.0, weights=float(sum(grads)), again=again, load=load, remade_flops=remade)
        return Task(MEMORY, "", 0.0, moved, launches, again=again) if moved or launches else None

    def is_gradient(self, t: Tensor) -> bool:
        """Whether it is a parameter's gradient, also through views."""
        return self.q.tensor_rep[t.name] in self.gradients

    @cached_property
    def gradients(self) -> set[str]:
        todo = [g for g in self.graph.grads.values() if g]
        seen = set(todo)
        while todo:
            op = self.maker.get(todo.pop())
            if op is not None and len(op.inputs) == 1 and (self.is_free(op) or self.rules[op.name].kind in ("view", "cheap")):
                new = op.inputs[0].name
                if new not in seen and new in self.maker:
                    seen.add(new)
                    todo.append(new)
        return {self.q.tensor_rep[t] for t in seen}

    # ---- what may be made again ----------------------------------------------------------------------------------------

    def remade(self) -> dict[str, list[Tensor]]:
        """Results of memory-bound kernels that are kept for backward, but could be made there of what else is kept: and of what."""
        kept = {**self.kernels.exact, **self.kernels.soft}
        out: dict[str, list[Tensor]] = {}
        for op in self.graph.ops:
            for t in op.outputs:
                if t is None or t.name not in kept or not is_fusible(op, self.rules[op.name]) or self.is_handed_on(t):
                    continue
                source = {y.name: y for i in op.inputs for x in self.sources(i) for y in out.get(x.name, [x])}
                if source and source.keys() <= kept.keys() - out.keys():
                    out[t.name] = list(source.values())
        return out

    def is_handed_on(self, t: Tensor) -> bool:
        """Whether another piece, or another copy, reads it in forward."""
        home = self.copy_of(self.maker[t.name].name)
        todo = [t.name]
        while todo:
            for op, _ in self.readers[todo.pop()]:
                if op.direction == "forward" and self.copy_of(op.name) != home:
                    return True
                if self.is_free(op):
                    todo += [x.name for x in op.outputs if x is not None]
        return False

    @cached_property
    def copies_of(self) -> dict[str, tuple[int, int]]:
        """Operator in a layer -> its stack, and which copy."""
        return {
            n: (s, k)
            for s, stack in enumerate(self.q.stacks)
            for part in (stack.forward, stack.backward)
            for k, names in enumerate(part)
            for n in names
        }

    def copy_of(self, op: str) -> tuple[int, int]:
        return self.copies_of.get(op, (-1, self.place[op]))

    def source(self, t: Tensor) -> Tensor:
        """The tensor whose memory `t` looks at."""
        op = self.maker.get(t.name)
        while op is not None and self.is_free(op) and op.inputs:
            t = op.inputs[0]
            op = self.maker.get(t.name)
        return t

    def recompute(self) -> None:
        """Of what is made again, products want it in memory: the kernel that makes it runs once more."""
        for name, source in self.remade().items():
            op, t = self.maker[name], self.graph.tensors[name]
            draft, part = self.drafts[self.place[op.name]], self.kept_share(t)
            draft.sums["spared"] += t.nbytes * part * self.share(op)
            if name in self.kernels.exact:
                moved = part * t.nbytes + sum(x.nbytes * self.kept_share(x) for x in source)
                draft.recompute.append(Workload({Task(MEMORY, "", 0.0, moved, 1.0): self.share(op)}))

    def sources(self, t: Tensor) -> list[Tensor]:
        """What a kernel that makes something of `t` finds in memory."""
        t = self.source(t)
        op = self.maker.get(t.name)
        if op is None:
            return []
        if not is_fusible(op, self.rules[op.name]) or t.name in self.kernels.written:
            return [t]
        return [x for i in op.inputs for x in self.sources(i)]

    # ---- collectives -----------------------------------------------------------------------------------------------------

    def transfers(self) -> None:
        leaves = {t.name for t in self.graph.params.values()}
        gradients = {self.q.tensor_rep[g] for g in self.graph.grads.values()}
        for v, direction, arc in used_arcs(self.problem, self.decision):
            value = self.problem.values[v].name
            if self.q.tensor_rep[value] in leaves or self.q.tensor_rep[value] in gradients:
                continue  # of parameters and gradients: data parallelism's
            itemsize = self.names.itemsize[value]
            steps = [s for s in self.names.steps(v, arc) if s.kind != "slice"]
            for name in self.q.members[value]:
                op = self.maker.get(name)
                if op is None:
                    continue
                attended = self.is_attended(name)
                for s in steps:
                    moved = Transfer(s.kind, self.user_axes(s.axes), s.wire_bytes(self.names.mesh, 1) * itemsize, attended)
                    draft = self.drafts[self.place[op.name]]
                    often = self.q.tensor_times[name] / self.copies(self.place[op.name])
                    (draft.backward if direction else draft.forward).append(Workload({}, {moved: often}))

    def is_attended(self, name: str) -> bool:
        """Whether attention reads it or makes it, also through views."""
        op = self.maker.get(self.source(self.graph.tensors[name]).name)
        if op is not None and self.rules[op.name].kind == "attention":
            return True
        return any(self.rules[r.name].kind == "attention" for r, _ in self.readers[name])

    def user_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Refined axes as those of the user's mesh."""
        return tuple(dict.fromkeys(a.split(".")[0] for a in axes))

    # ---- memory ------------------------------------------------------------------------------------------------------------

    def kept_share(self, t: Tensor) -> float:
        """The smallest part of `t` that a device has of it in forward: where a whole is gathered for a product, the part is kept."""
        found = []
        op = self.maker.get(t.name)
        if op is not None:
            at = self.placed(op)[2][[x.name if x is not None else "" for x in op.outputs].index(t.name)]
            found += [at] if at is not None and not at.partial else []
        found += [self.placed(r)[1][i] for r, i in self.readers[t.name] if r.direction == "forward"]
        return min((p.share(self.mesh) for p in found if not p.partial), default=1.0)

    def memory(self) -> None:
        for name, t in {**self.kernels.exact, **self.kernels.soft}.items():
            reader = self.kernels.reader[name]  # what a layer hands on is kept by the one that reads it
            if self.maker[name].direction == "forward":
                self.drafts[self.place[reader.name]].sums["saved"] += t.nbytes * self.kept_share(t) * self.share(reader)
        entered: dict[int, dict[tuple[str, int], Tensor]] = defaultdict(dict)
        for op in self.graph.ops:
            draft = self.drafts[self.place[op.name]]
            if experts.is_experts(op):
                rule, split = self.rules[op.name], self.placed(op)[0]
                n = compute.local_sizes(rule, split, self.mesh)
                nbytes = experts.workspace_bytes(op, rule, split, n, self.mesh, self.cost.imbalance)
                draft.sums["experts"] = max(draft.sums["experts"], nbytes)
                draft.sums["rows"] += experts.kept_bytes(op, rule, split, n, self.mesh, self.cost.imbalance) * self.share(op)
                draft.exchanges[op.direction, experts.rows_bytes(op, n)] += experts.EXCHANGES[op.target] * self.share(op)
            if op.direction == "backward":
                continue
            written = self.share_of(op).writes
            for x in op.outputs:
                if x is not None and x.name in written:
                    draft.sums["largest"] = max(draft.sums["largest"], x.nbytes * self.kept_share(x))
            if self.rules[op.name].kind == "attention":
                q, k = op.inputs[0], op.inputs[1]
                ways = math.prod(self.mesh.axis_size(a) for a in self.placed(op)[0])
                size = math.prod(q.shape[:3]) * k.shape[2] * (q.nbytes / q.numel)
                draft.sums["scores"] += size / ways * self.share(op)
            for t in op.inputs:
                root = self.source(t)
                maker = self.maker.get(root.name)
                if maker is not None and self.copy_of(maker.name) != self.copy_of(op.name) and self.is_made_by_the_one_before(maker, op):
                    entered[self.place[op.name]][root.name, self.q.times[op.name]] = root
        for piece, tensors in entered.items():
            total = sum(often * t.nbytes * self.kept_share(t) for (_, often), t in tensors.items())
            self.drafts[piece].sums["input"] = total / (self.copies(piece) / self.layers_of_a_copy(piece))

    def layers_of_a_copy(self, piece: int) -> int:
        return self.q.stacks[piece // 2].layers if piece % 2 else 1

    def is_made_by_the_one_before(self, maker: Op, op: Op) -> bool:
        """Handed on from layer to layer, and not to all of them (a table of positions)."""
        a, b = self.copy_of(maker.name), self.copy_of(op.name)
        if a[0] >= 0:
            return True
        # From outside: only the first copy of a stack, or what comes after, reads it.
        if b[0] < 0:
            return True
        made = maker.outputs[0]
        assert made is not None
        return all(self.copy_of(r.name) == b for r, _ in self.readers[made.name] if r.direction == "forward")

    def parameters(self) -> None:
        for t in self.graph.params.values():
            todo, readers = [t.name], []
            while todo:
                for op, i in self.readers[todo.pop()]:
                    if self.is_free(op):
                        todo += [x.name for x in op.outputs if x is not None]
                    elif op.direction == "forward":
                        readers.append((op, i))
            homes = sorted({self.place[op.name] for op, _ in readers})
            for k, home in enumerate(homes):
                op, i = next((op, i) for op, i in readers if self.place[op.name] == home)
                part, often = t.numel * self.placed(op)[1][i].share(self.mesh), self.q.tensor_times[t.name] / self.copies(home)
                held = part * often
                if not k and not self.rules[op.name].pairs:
                    self.drafts[home].tensors[part] += often
                self.drafts[home].sums["params"] += held
                self.drafts[home].sums["shared"] += held if k else 0.0
                self.drafts[home].sums["routed"] += held if self.rules[op.name].pairs else 0.0

    # ---- the result ----------------------------------------------------------------------------------------------------------

    def piece(self, i: int, d: _Draft) -> Piece:
        name = self.q.stacks[i // 2].name if i % 2 else (FIRST if i == 0 else LAST if i == 2 * len(self.q.stacks) else f"between {i // 2}")
        s = d.sums
        return Piece(
            name, self.copies(i) if i % 2 else 0, Workload.together(d.forward), Workload.together(d.backward), Workload.together(d.recompute),
            s["saved"], s["spared"], s["input"], s["scores"], s["largest"], s["params"], s["shared"], s["routed"],
            tuple(sorted(d.tensors.items())), s["experts"],
            tuple((half, nbytes, often) for (half, nbytes), often in sorted(d.exchanges.items())), s["rows"],
        )  # fmt: skip
