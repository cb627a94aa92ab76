"""Whether a program's loss is a sum over samples, so that a batch may be run in parts, one after the other.

A batch of B samples is cut into micro-batches of b_1 + b_2 + ... = B. What the program computes of a micro-batch is compared with what it computes of the whole, operator
by operator: in each tensor the samples are loops of their own (`split`), it does not depend on them (`free`), or it is the sum over micro-batches of what each gives (`sum`).
The letters of an operator's rule say which it makes of which, as for a mesh axis that splits the batch (`autopar.rules`). A program may be run in parts where its loss and
the gradients of its parameters are sums; gradients are checked like the loss, for a backward may be a user's own.

What is a sum but for a number is made one:

    a mean over samples      sum_i x_i / B = sum_j (b_j / B) mean_j                                         times the share b_j / B
    what no sample is in     r = sum_j (b_j / B) r, beside a sum (a number, too)                            times the share
    a number with B in it    x / B                                                                          the whole batch's number
    nll_loss(mean)           sum_i w_i x_i / sum_i w_i, w_i = weight of i's label, 0 if it is ignored       sum / weights of the whole batch
    a count of labels        a sum of data alone, read as it is nowhere but in the whole                    the whole batch's value

The last two are computed from the inputs before the first micro-batch runs (`Whole`). A micro-batch without labels so adds nothing, and no 0 / 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import AutoparError
from autopar.graph.graph import Graph, Op, Tensor
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.rules.index import layout as index_layout
from autopar.rules.letters import is_float
from autopar.rules.loss import MEAN
from autopar.rules.strategy import letter_at, placements

AXIS = "samples"  # the axis that splits the batch
MEANS = ("aten.mean.default", "aten.mean.dim")
# Losses that reduce by an argument, and where it stands: forward; backward.
REDUCES = {
    "aten.mse_loss.default": 2, "aten.smooth_l1_loss.default": 2, "aten.huber_loss.default": 2, "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3, "aten.binary_cross_entropy_with_logits.default": 4,
}  # fmt: skip
REDUCES_BACK = {
    "aten.mse_loss_backward.default": 3, "aten.smooth_l1_loss_backward.default": 3, "aten.huber_loss_backward.default": 3,
    "aten.soft_margin_loss_backward.default": 3, "aten.binary_cross_entropy_backward.default": 4,
}  # fmt: skip
NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
NLL_BACK = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
# Of these the numbers are factors or summands of the operands, so that the whole batch's do for a part of it.
ARITHMETIC = frozenset(f"aten.{op}.{kind}" for op in ("add", "sub", "rsub", "mul", "div") for kind in ("Tensor", "Scalar"))
ADDS = ("aten.add.Tensor", "aten.sub.Tensor")
SHIFTS = (*ADDS, "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar")
# What they give depends on their operand's shape and dtype alone.
LIKE = ("aten.full_like.default", "aten.ones_like.default", "aten.empty_like.default")
COUNTS = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
NUMBERED = "it numbers the samples of the batch"
SIZED = ("aten.native_group_norm.default", "aten.native_group_norm_backward.default")  # take sizes as plain arguments


class MicroBatchError(AutoparError):
    """A batch cannot be run in parts."""


@dataclass(frozen=True)
class At:
    """Where the samples are in a tensor. at: dim and how many elements are to the right of their digit, where split; "known": of data, and no sum.
    data: it depends on inputs and buffers alone. numbers: it is each sample's number in the batch."""

    kind: Literal["free", "split", "sum", "known"]
    at: tuple[int, int] | None = None
    data: bool = False
    numbers: bool = False


@dataclass(frozen=True)
class Whole:
    """A value of the whole batch that micro-batches are given. tensor: in the whole batch's program; of nll_loss: 1 / the weights of the labels of operator `op`.
    value: that of the operand; else of the tensor's own."""

    tensor: str
    op: str = ""


@dataclass
class Edits:
    """What makes the program of a micro-batch one whose results add up. numbers: operators that take the whole batch's; shares: tensors that are multiplied by the share, and
    who reads that (None: everybody); labels: losses that become sums, and their backwards, with an index of `wholes`; given: tensors that are given; random: where
    samples are in what random operators draw."""

    numbers: dict[str, Op] = field(default_factory=dict)
    shares: list[tuple[str, str | None]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    readers: set[tuple[str, str]] = field(default_factory=set)  # (a tensor that is given, an operator that reads what is given)
    wholes: list[Whole] = field(default_factory=list)
    random: dict[str, tuple[int, int]] = field(default_factory=dict)
    grads: list[str] = field(default_factory=list)  # parameters whose gradient no sample is in


def separated(whole: Graph, part: Graph, samples: int, of: int) -> Edits:
    """How `part`, the program of `samples` of the `of` samples of a batch, becomes one whose loss and gradients add up to those of `whole`.

    Raises MicroBatchError naming the operator that mixes samples."""
    return _Separation(whole, part, samples, of).run()


class _Separation:
    def __init__(self, whole: Graph, part: Graph, samples: int, of: int) -> None:
        self.whole, self.part, self.b, self.n = whole, part, samples, of
        self.states: dict[str, At] = {}
        self.edits = Edits()
        self.name_of: dict[str, str] = {}  # tensor of the whole -> of the part
        self.zeros: set[str] = set()
        self.counts: dict[str, int] = {}  # total weight of an nll_loss -> index of `wholes`

    def run(self) -> Edits:
        self.start()
        if [op.target for op in self.whole.ops] != [op.target for op in self.part.ops]:
            a, b = next(((a, b) for a, b in zip(self.whole.ops, self.part.ops, strict=False) if a.target != b.target), (None, None))
            there = "" if a is None or b is None else f"{a.target} where there is {b.target} of a part"
            raise MicroBatchError(
                f"the program of a batch of {self.n} is another one than that of {self.b} samples of it: {there or 'it has other operators'}",
                where="" if a is None else _where(a),
                fix=_fix("give each micro-batch two samples at least" if self.b == 1 else ""),
            )
        for op, mine in zip(self.whole.ops, self.part.ops, strict=True):
            self.op(op, mine)
        self.end()
        return self.edits

    def start(self) -> None:
        w, p = self.whole, self.part
        for name, t in w.params.items():
            self.put(t, p.params[name], At("free"))
        for name, t in w.buffers.items():
            self.put(t, p.buffers[name], At("free", data=True))
        for t, u in zip(w.inputs, p.inputs, strict=True):
            is_batch = bool(t.shape) and t.shape[0] == self.n and u.shape[0] == self.b
            self.put(t, u, At("split", (0, 1), True) if is_batch else At("free", data=True))
        for t, u in zip(w.tangents, p.tangents, strict=True):
            if t.shape:
                raise MicroBatchError(
                    "a batch is run in parts for its loss, and this program returns another tensor that has a gradient",
                    fix="let the model return its loss, or pass loss_fn= to autopar.compile",
                )
            self.put(t, u, At("free"))
        for name, t in w.tensors.items():  # constants
            if name not in self.states and all(out is None or out.name != name for op in w.ops for out in op.outputs) and name in p.tensors:
                self.put(t, p.tensors[name], At("free", data=True))

    def end(self) -> None:
        for name in self.whole.outputs:
            if name and self.states[name].kind != "sum":
                what = "does not depend on the samples" if self.states[name].kind == "free" else "has the batch as a dim"
                raise MicroBatchError(
                    f"a batch is run in parts for a loss that is a sum or a mean over samples: what this program returns {what}", fix=_fix()
                )
        for param, name in self.whole.grads.items():
            state = self.states[name]
            if state.kind == "split":
                raise MicroBatchError(f"the gradient of {param!r} is not summed over samples", fix=_fix())
            if state.kind == "free":
                self.edits.grads.append(param)
        for buffer, name in self.whole.buffer_updates.items():
            if self.states[name].kind != "free":
                raise MicroBatchError(
                    f"forward changes buffer {buffer!r} by what is in the batch, which micro-batches do not see at once", fix=_fix()
                )

    # ---- one operator ----------------------------------------------------------------------------------------

    def put(self, t: Tensor, u: Tensor, state: At) -> None:
        """`t` of the whole, `u` of the part, with samples where `state` says. Their shapes must say so, too."""
        want = list(t.shape)
        if state.at is not None:
            want[state.at[0]] = t.shape[state.at[0]] * self.b // self.n
        if tuple(want) != u.shape:
            raise MicroBatchError(
                f"tensor {t.name} is {list(t.shape)} of a batch of {self.n} samples and {list(u.shape)} of {self.b}, not {want}", fix=_fix()
            )
        self.states[t.name], self.name_of[t.name] = state, u.name

    def op(self, op: Op, mine: Op) -> None:
        theirs = [*op.args, *(op.kwargs[k] for k in sorted(op.kwargs))], [*mine.args, *(mine.kwargs[k] for k in sorted(mine.kwargs))]
        pairs = zip(*theirs, strict=True) if len(theirs[0]) == len(theirs[1]) else [(op.args, None)]
        numbers = [kind for a, b in pairs for kind in _differing(a, b, self.name_of)]
        if None in numbers:
            raise MicroBatchError(
                f"{op.target} has other operands in a batch of {self.n} than in {self.b} samples of it", where=_where(op), fix=_fix()
            )
        scalars = [x for x in numbers if x != "size"]
        if scalars and op.target in ARITHMETIC:
            self.edits.numbers[mine.name] = op
        elif scalars and op.target not in SIZED and not _is_factory(op):
            raise self.mixes(op, "an argument of it depends on the size of the batch")
        rule = lookup(op)
        data = all(self.states[t.name].data for t in op.inputs) and rule.kind != "random"
        made = self.made(op, mine, rule)
        self.edits.readers |= {(t.name, mine.name) for t in mine.inputs if t.name in self.edits.given}
        for t, u, state in zip(op.outputs, mine.outputs, made, strict=True):
            if t is not None and u is not None and state is not None:
                self.put(t, u, replace(state, data=data))
                if state.kind == "free" and _is_zero(op):
                    self.zeros.add(t.name)
                if data and state.kind == "known":
                    self.give(t, u)

    def made(self, op: Op, mine: Op, rule: Rule) -> list[At | None]:
        """Where samples are in its outputs."""
        states = [self.states[t.name] for t in op.inputs]
        if op.target in NLL or op.target in NLL_BACK:
            return self.labelled(op, mine, rule, states)
        if any(s.numbers for s in states):
            return self.numbered(op, rule, states)
        if any(s.kind == "sum" for s in states):
            return self.summed(op, mine, rule, states)
        if any(s.kind == "split" for s in states):
            return self.split(op, mine, rule, states)
        return self.spread(op, mine, rule)

    def spread(self, op: Op, mine: Op, rule: Rule) -> list[At | None]:
        """Of operands that no sample is in: a dim of the batch may begin here."""
        made: list[At | None] = []
        for t, u in zip(op.outputs, mine.outputs, strict=True):
            if t is None or u is None or t.shape == u.shape:
                made.append(None if t is None else At("free"))
                continue
            dims = [d for d, (n, m) in enumerate(zip(t.shape, u.shape, strict=False)) if n != m]
            if len(t.shape) != len(u.shape) or len(dims) != 1 or t.shape[dims[0]] % self.n:
                raise self.mixes(op, "its result depends on the size of the batch")
            letters = [rule.factors[x] for out in rule.outputs if out is not None for x in out[dims[0]]]
            at, counts = (dims[0], t.shape[dims[0]] // self.n), False
            if rule.kind != "random" and any(f.index for f in letters):
                counts = op.target in COUNTS and t.shape == (self.n,) and op.args in ((self.n,), (0, self.n), (0, self.n, 1))
                if not counts:
                    raise self.mixes(op, NUMBERED)
            if rule.kind == "random":
                self.edits.random[mine.name] = at
            made.append(At("split", at, numbers=counts))
        return made

    def numbered(self, op: Op, rule: Rule, states: list[At]) -> list[At | None]:
        """Of operands one of which numbers the samples: in a view it still does, and what is looked up by it is each sample's own."""
        if rule.kind == "view" and len(states) == 1 and op.outputs[0] is not None:
            (only,) = states
            assert only.at is not None
            found = letter_at(rule.inputs[0], only.at, self.n, rule)
            at = None if found is None else placements(rule, {AXIS: found}, (op.inputs[0].shape,), (op.out.shape,))[1][0]
            if at is not None and AXIS in at.where:
                return [At("split", at.where[AXIS], numbers=True)]
        if op.target in ("aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_put.default", "aten._unsafe_index_put.default"):
            x, indices = op.inputs[0], op.args[1]
            dims, shape, order = index_layout(op)
            numbers = [d for d in dims if self.states[indices[d].name].numbers]
            samples = {self.broadcast_at(indices[d], shape) for d in dims} - {None}
            own = self.states[x.name]
            if (
                len(numbers) == 1
                and len(samples) == 1
                and own.kind == "split"
                and own.at == (numbers[0], 1)
                and x.shape[numbers[0]] == self.n
            ):
                (k,) = samples
                assert k is not None
                at_result = [i for i, d in enumerate(order) if d is None][k], 1
                if "put" not in op.target:
                    return [At("split", at_result)]
                values = self.states[op.args[2].name]
                if values.kind == "split" and values.at == at_result and len(op.args[2].shape) == len(order):
                    return [At("split", own.at)]
        raise self.mixes(op, NUMBERED)

    def broadcast_at(self, t: Tensor, shape: tuple[int, ...]) -> int | None:
        """Which dim of `shape`, that `t` broadcasts to, is the batch; -1 where it is but a part of one."""
        at = self.states[t.name].at
        if at is None:
            return None
        return at[0] + len(shape) - len(t.shape) if at[1] == 1 and t.shape[at[0]] == self.n else -1

    def split(self, op: Op, mine: Op, rule: Rule, states: list[At]) -> list[At | None]:
        found = {letter_at(rule.inputs[i], s.at, self.n, rule) for i, s in enumerate(states) if s.at is not None}
        (only, *others) = found
        if only is None or others:
            raise self.mixes(op)
        letter = only[0]
        factor = rule.factors[letter]
        if not factor.split or (factor.index and rule.kind != "random") or letter in rule.taken:
            raise self.mixes(op)
        shapes = tuple(t.shape for t in op.inputs), tuple(None if t is None else t.shape for t in op.outputs)
        want, outputs = placements(rule, {AXIS: only}, *shapes)
        if any((AXIS in w.where) != (s.kind == "split") for w, s in zip(want, states, strict=True)):
            raise self.mixes(op)
        made: list[At | None] = []
        for t, p in zip(op.outputs, outputs, strict=True):
            if t is None or p is None:
                made.append(None)
            elif AXIS in p.where:
                made.append(At("split", p.where[AXIS]))
                if rule.kind == "random":
                    self.edits.random[mine.name] = p.where[AXIS]
            elif all(s.data for s in states):
                made.append(At("sum" if p.reductions.get(AXIS) == "sum" and op.target not in MEANS else "known"))
            elif p.reductions.get(AXIS) == "sum":
                made.append(At("sum"))
                if op.target in MEANS or (op.target in REDUCES and op.arg(REDUCES[op.target], "reduction", MEAN) == MEAN):
                    self.edits.shares.append((mine.out.name, None))
            else:
                raise self.mixes(op)
        if op.target in REDUCES_BACK and op.arg(REDUCES_BACK[op.target], "reduction", MEAN) == MEAN:
            self.edits.shares.append((mine.out.name, None))
        return made

    def summed(self, op: Op, mine: Op, rule: Rule, states: list[At]) -> list[At | None]:
        """Of operands some of which are sums: what is linear in them is one."""
        which = frozenset(i for i, s in enumerate(states) if s.kind == "sum")
        rest = [s for i, s in enumerate(states) if i not in which]
        if op.target in LIKE:
            return [At("free") for _ in op.outputs]
        if all(s.kind == "free" for s in rest):
            zero = frozenset(i for i, t in enumerate(op.inputs) if t.name in self.zeros)
            if which in rule.linear or (zero and which | zero in rule.linear):
                return [None if t is None else At("sum") for t in op.outputs]
            if op.target in SHIFTS and len(states) == 1 and isinstance(op.args[1], (int, float)):
                if op.args[1] != 0:
                    if not is_float(op.out):
                        raise self.mixes(op)
                    share = op.args[1] * self.b / self.n
                    self.edits.numbers[mine.name] = replace(op, args=(op.args[0], share, *op.args[2:]))
                return [At("sum")]
            if op.target in ADDS and len(states) == 2:
                (other,) = (i for i in range(2) if i not in which)
                self.edits.shares.append((mine.inputs[other].name, mine.name))
                return [At("sum")]
        # What depends on data alone can be known before anything runs: it is given then, and so free.
        known = [i for i in which if states[i].data]
        if not known:
            raise self.mixes(op)
        for i in known:
            self.give(op.inputs[i], mine.inputs[i])
        return self.made(op, mine, rule)

    def give(self, t: Tensor, u: Tensor) -> None:
        if u.name not in self.edits.given:
            self.edits.given[u.name] = len(self.edits.wholes)
            self.edits.wholes.append(Whole(t.name))
        self.states[t.name] = At("free", data=True)

    def labelled(self, op: Op, mine: Op, rule: Rule, states: list[At]) -> list[At | None]:
        """nll_loss and its backward."""
        back = op.target in NLL_BACK
        scores, targets, weight = op.args[1:4] if back else op.args[:3]
        reduction = op.args[4] if back else op.args[3]
        of = {t.name: self.states[t.name] for t in op.inputs}
        if of[scores.name].kind == "free" and of[targets.name].kind == "free":
            raise self.mixes(op, "no sample is in it")
        want = {self.letter(rule, op, t) for t in (scores, targets)}
        if len(want) != 1 or None in want or (weight is not None and of[weight.name].kind != "free"):
            raise self.mixes(op)
        (only,) = want
        assert only is not None
        out = rule.outputs[0]
        assert out is not None
        shapes = tuple(t.shape for t in op.inputs), tuple(None if t is None else t.shape for t in op.outputs)
        _, placed = placements(rule, {AXIS: only}, *shapes)
        first = placed[0]
        assert first is not None
        if reduction == MEAN:
            if not of[targets.name].data or (weight is not None and not of[weight.name].data):
                raise self.mixes(op, "it is a mean by labels that are not known before it runs")
            if back:
                if op.args[6].name not in self.counts:
                    raise self.mixes(op)
                self.edits.labels[mine.name] = self.counts[op.args[6].name]
            else:
                self.edits.labels[mine.name] = len(self.edits.wholes)
                total = op.outputs[1]
                if total is not None:
                    self.counts[total.name] = len(self.edits.wholes)
                self.edits.wholes.append(Whole(targets.name, op.name))
        if back:
            grad = of[op.args[0].name]
            if grad.kind == "sum" or first.where.get(AXIS) is None:
                raise self.mixes(op)
            return [At("split", first.where[AXIS])]
        at = first.where.get(AXIS)
        return [At("sum") if at is None else At("split", at), None if op.outputs[1] is None else At("sum")]

    def letter(self, rule: Rule, op: Op, t: Tensor) -> tuple[str, int] | None:
        i = next(i for i, x in enumerate(op.inputs) if x is t or x.name == t.name)
        at = self.states[t.name].at
        return None if at is None else letter_at(rule.inputs[i], at, self.n, rule)

    def mixes(self, op: Op, why: str = "") -> MicroBatchError:
        return MicroBatchError(
            f"{op.target} mixes the samples of a batch{f' ({why})' if why else ''}, so the batch cannot be run as micro-batches one after the other",
            where=_where(op),
            fix=_fix(),
        )


def _fix(more: str = "") -> str:
    often = "pass micro_batches=1, or call the model with smaller batches and pass grad_accumulation= (its loss is then the mean of theirs)"
    return f"{more}; or {often}" if more else often


def _where(op: Op) -> str:
    return f"{op.name} of the {op.direction} pass" + (f", module {op.module!r}" if op.module else "")


def _is_zero(op: Op) -> bool:
    """Whether it makes nothing but zeros."""
    if op.target in ("aten.full.default", "aten.full_like.default"):
        return bool(op.args[1] == 0)
    return op.target in ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default") or (
        op.target == "aten.scalar_tensor.default" and op.args[0] == 0
    )


def _is_factory(op: Op) -> bool:
    return not op.inputs


def _differing(a: Any, b: Any, names: dict[str, str]) -> Iterator[str | None]:
    """Of two calls' argument what differs: "size" for numbers in a list, "number" for another, None for what must not."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and names.get(a.name) == b.name):
            yield None
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for x, y in zip(a, b, strict=True) if len(a) == len(b) else ((a, None),):
            yield from ("size" if kind == "number" else kind for kind in _differing(x, y, names))
    elif a != b:
        yield "number" if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool) else None
