"""`autopar::linear_log_prob_v1` in the place of a linear layer under a cross-entropy (`loss_head.py`): its logits are never in memory in whole.

    picked, total, lse = linear_log_prob(h, w, b, y),    logp = picked - lse,    nll_loss(logp as scores of one class, 0 where y counts)

The loss stays torch's own, on the log-probability of the target alone: its means, sums, counts and what it ignores. A target that is no class is still an error: as
floor(y / V) it is none of the one class either. Where classes have weights it is the loss of each token, and the rest is written out, as torch has it (F.cross_entropy):

    c[t] = weight[y[t]], 0 where y counts not,    sum: sum_t c[t] loss[t],    mean: that over sum_t c[t]

With label smoothing the sum of all log-probabilities is total - V lse; a z-loss reads lse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.fusions.graph import VIEWS, Writer, aten, shape
from autopar.capture.fusions.loss_head import LOSS, LOSS_BACKWARD, Gradients, LossHead
from autopar.kernels.loss_head import linear_log_prob, linear_log_prob_backward
from autopar.kernels.tiles import TILE

NONE, MEAN = 0, 1  # reductions
IGNORED = -100  # to the loss of one class; no floor(y / V) is
Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class Counted:
    """Of a loss with weights of classes. each: the weight of a token; whole: their sum, where a mean divides by it; total: second result of the loss, which its backward wants."""

    each: fx.Node
    whole: fx.Node | None
    total: fx.Node


def put_log_prob(head: LossHead, write: Writer) -> None:
    """Rewrites one; what is no longer used stays in the graph."""
    _Rewriting(head, write).run()


class _Rewriting:
    def __init__(self, head: LossHead, write: Writer) -> None:
        self.head, self.write, self.layer = head, write, head.logits
        self.words = shape(head.log_p)[1]
        self.narrow = head.log_p.meta["val"].dtype

    def run(self) -> None:
        loss = self.head.loss

        def forward(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return self.write.call(loss, self.layer.product, target, *args, **kwargs)

        counted: Counted | None = None
        h, steps = self.taken(forward)
        target, reduction, ignored = loss.args[1], *loss.args[3:5]
        b = self.layer.b
        operands = (h, self.layer.w, b if b is None or len(shape(b)) == 1 else forward(aten.view.default, b, [-1]), target)
        log_prob = forward(linear_log_prob._opoverload, *operands, self.head.total is not None, self.layer.scale, self.layer.cap, TILE)
        picked, lse = (forward(_torch.getitem, log_prob, i) for i in (0, 2))
        scores = forward(aten.unsqueeze.default, _cast(forward(aten.sub.Tensor, picked, lse), self.narrow, forward), 1)
        counts = forward(aten.div.Tensor_mode, target, self.words, rounding_mode="floor")
        classes = forward(aten.masked_fill.Scalar, counts, forward(aten.eq.Scalar, target, ignored), IGNORED)
        weight = loss.args[2]
        of_one = (scores, classes, None, reduction if weight is None else NONE, IGNORED)
        made = self.write.call(loss, loss, LOSS, *of_one)
        if weight is None:
            loss.replace_all_uses_with(made)
        else:
            counted = self.weighted(made, weight, target, reduction, ignored)
        if self.head.total is not None:
            total = forward(aten.sub.Tensor, forward(_torch.getitem, log_prob, 1), forward(aten.mul.Tensor, lse, self.words))
            self.later(self.head.total, _cast(total, self.narrow, forward))
        for n in self.head.normal:
            self.later(n, _cast(forward(aten.view.default, lse, list(shape(n))), n.meta["val"].dtype, forward))
        if self.head.gradients is not None:
            self.backward(self.head.gradients, of_one, operands, lse, steps, counted)

    def weighted(self, made: fx.Node, weight: Any, target: Any, reduction: Any, ignored: Any) -> Counted:
        """made: the loss of every token, by itself. What reads the loss reads what follows from it."""
        loss = self.head.loss

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return self.write.call(loss, loss, target, *args, **kwargs)

        out = call(aten.eq.Scalar, target, ignored)
        each = call(
            aten.masked_fill.Scalar, call(aten.index_select.default, weight, 0, call(aten.masked_fill.Scalar, target, out, 0)), out, 0
        )
        value = call(aten.mul.Tensor, call(_torch.getitem, made, 0), each)
        whole = call(aten.sum.default, each)
        if reduction != NONE:
            value = call(aten.sum.default, value)
        if reduction == MEAN:
            value = call(aten.div.Tensor, value, whole)
        for n in list(loss.users):
            n.replace_all_uses_with(value if n.args[1] == 0 else whole)
        return Counted(each, whole if reduction == MEAN else None, call(_torch.getitem, made, 1))

    def backward(
        self, g: Gradients, of_one: tuple[Any, ...], operands: tuple[Any, ...], lse: fx.Node, steps: list[fx.Node], counted: Counted | None
    ) -> None:
        order = {n: i for i, n in enumerate(self.write.graph.nodes)}
        last = max((g.softmax, *(product for _, product in g.normal)), key=order.__getitem__)  # then every gradient is there

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return self.write.call(last, g.softmax, target, *args, **kwargs)

        wide = lse.meta["val"].dtype
        grad, total = g.start.args[0], g.start.args[6]
        if counted is not None:
            grad, total = (
                call(aten.mul.Tensor, counted.each, grad if counted.whole is None else call(aten.div.Tensor, grad, counted.whole)),
                counted.total,
            )
        start = call(LOSS_BACKWARD, grad, *of_one, total)
        of_target = _cast(call(aten.squeeze.dim, start, 1), wide, call)
        of_total, of_lse = None, call(aten.neg.default, of_target)
        if g.total is not None:
            of_total = _cast(call(aten.squeeze.dim, g.total, 1), wide, call)
            of_lse = call(aten.sub.Tensor, of_lse, call(aten.mul.Tensor, of_total, self.words))
        for column, _ in g.normal:
            of_lse = call(aten.add.Tensor, of_lse, _cast(call(aten.view.default, column, list(shape(lse))), wide, call))
        wanted = [bool(g.of_h), bool(g.of_w or g.of_w_turned), bool(g.of_b)]
        given = (of_target, of_total, of_lse, *operands, lse, self.layer.scale, self.layer.cap, TILE, wanted)
        made = call(linear_log_prob_backward._opoverload, *given)
        dh, dw, db = (call(_torch.getitem, made, i) for i in range(3))
        if g.of_h:
            dh = _given_back(dh, steps, call)
        turned = [call(aten.t.default, dw) for _ in g.of_w_turned]
        for old, new in (
            *((n, dh) for n in g.of_h),
            *((n, dw) for n in g.of_w),
            *((n, db) for n in g.of_b),
            *zip(g.of_w_turned, turned, strict=True),
        ):
            new = new if shape(old) == shape(new) else call(aten.view.default, new, list(shape(old)))
            old.replace_all_uses_with(_cast(new, old.meta["val"].dtype, call))

    def later(self, old: fx.Node, new: fx.Node) -> None:
        """`new` for `old`, some of whose readers stand before it: they move behind it."""
        order = {n: i for i, n in enumerate(self.write.graph.nodes)}
        moved, todo = set[fx.Node](), list(old.users)
        while todo:
            n = todo.pop()
            if order[n] < order[new] and n not in moved:
                moved.add(n)
                todo += n.users
        last = new
        for n in sorted(moved, key=order.__getitem__):
            last.append(n)
            last = n
        old.replace_all_uses_with(new)

    def taken(self, call: Call) -> tuple[fx.Node, list[fx.Node]]:
        """The rows of h that the loss reads, and the calls that take them."""
        h, steps, features = self.layer.h, list[fx.Node](), shape(self.layer.h)[1]
        if all(n.target in VIEWS for n in self.layer.rows):
            return h, steps
        for n in self.layer.rows:
            if n.target in VIEWS:
                steps.append(h := call(aten.view.default, h, [*shape(n)[:-1], features]))
            else:
                steps.append(call(n.target, h, *n.args[1:]))
                h = call(aten.clone.default, steps[-1])
        return h, steps


def _given_back(grad: fx.Node, steps: list[fx.Node], call: Call) -> fx.Node:
    """The gradient of h, zero for the rows that were not taken."""
    for n in reversed(steps):
        source: Any = n.args[0]
        size = list(shape(source))
        if n.target in VIEWS:
            grad = call(aten.view.default, grad, size)
        else:
            taken: tuple[Any, ...] = (*n.args[1:], *(0, None, None, 1)[len(n.args) - 1 :])
            grad = call(aten.slice_backward.default, grad, size, taken[0], *slice(*taken[1:]).indices(size[taken[0]]))
    return grad


def _cast(n: fx.Node, dtype: Any, call: Call) -> fx.Node:
    return n if n.meta["val"].dtype == dtype else call(aten._to_copy.default, n, dtype=dtype)
