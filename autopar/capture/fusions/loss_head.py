"""A linear layer under a cross-entropy, forward and backward: where there is one in a captured graph.

    nll_loss(log_softmax(rows of cap tanh(s (h w^T + b) / cap)), y), and with label smoothing a sum of the log-probabilities as well, with a z-loss the log-sum-exp of the same rows

Classes may have weights, but not where the loss is smoothed: the sum is then one of weighted log-probabilities, which the operator does not make.

In backward, what leads from that loss to the products that make the gradients of h and w is, by the chain rule, the derivative of what was found, however it is written; so
it is not compared operator by operator. It has to read nothing but what belongs to the pattern, and to lead nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.fusions.graph import SAME, VIEWS, aten, escapes, is_matrix, is_turned, looked_at, same, shape
from autopar.capture.fusions.logits import COPIES, Logits, logits_of

LOSS, LOSS_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
SOFTMAX, SOFTMAX_BACKWARD = aten._log_softmax.default, aten._log_softmax_backward_data.default


@dataclass
class Gradients:
    """What backward makes of the pattern. start: the loss's own; softmax: that of the scores; total: that of the sum of log-probabilities, one number a token; normal: those of
    the log-sum-exps, one number a token each, and the calls that multiply probabilities by them. Results: by h, w, w^T and b, the nodes that are their gradients."""

    start: fx.Node
    softmax: fx.Node
    total: fx.Node | None
    normal: list[tuple[fx.Node, fx.Node]]
    of_h: list[fx.Node]
    of_w: list[fx.Node]
    of_w_turned: list[fx.Node]
    of_b: list[fx.Node]

    @property
    def results(self) -> set[fx.Node]:
        return {*self.of_h, *self.of_w, *self.of_w_turned, *self.of_b}


@dataclass
class LossHead:
    """loss: the call; log_p: what it reads; total: the sum of all log-probabilities of a token, if the loss is smoothed; normal: log-sum-exps of the scores, as a z-loss reads
    them. gradients: None where there is no backward."""

    loss: fx.Node
    log_p: fx.Node
    total: fx.Node | None
    normal: list[fx.Node]
    logits: Logits
    gradients: Gradients | None

    @property
    def scores(self) -> int:
        """How many logits there are."""
        tokens, words = shape(self.log_p)
        return tokens * words


def loss_heads(graph: fx.Graph) -> list[LossHead]:
    return [head for n in graph.nodes if n.target is LOSS and (head := _head(n)) is not None]


def _head(loss: fx.Node) -> LossHead | None:
    log_p = same(loss.args[0])
    if not isinstance(log_p, fx.Node) or log_p.target is not SOFTMAX or len(shape(log_p)) != 2:
        return None
    if log_p.args[1] not in (1, -1) or log_p.args[2] or shape(log_p)[1] < 2:
        return None
    scores = log_p.args[0]
    logits = logits_of(scores) if isinstance(scores, fx.Node) else None
    if logits is None:
        return None
    totals = [u for u in _readers(log_p) if _summed(u) in ([1], [-1]) and not u.kwargs and u.args[2:] in ((), (False,))]
    backward = [n for n in _readers(log_p) if n.target is LOSS_BACKWARD]
    if len(totals) > 1 or len(backward) > 1:
        return None
    total = totals[0] if totals else None
    inside = _named({log_p, *logits.nodes})
    rows = _as_scores(logits)
    normal = list(dict.fromkeys(u for n in rows for u in _readers(n) if _is_normaliser(u, n)))  # one of another name is a reader of both
    gradients = None
    if backward:
        found = _gradients(backward[0], loss, log_p, logits, inside, rows, normal)
        if found is None:
            return None
        gradients, ours = found
        inside |= ours
    # The loss and the total are made of something else instead; all other users of what is inside have to be inside.
    if escapes(inside, {loss, *normal, *([total] if total is not None else []), *(gradients.results if gradients else ())}):
        return None
    return LossHead(loss, log_p, total, normal, logits, gradients)


def _as_scores(logits: Logits) -> list[fx.Node]:
    """What has the scores' rows, by other names, in other shapes or dtypes: the scores first."""
    out = list[fx.Node]()
    for n in logits.nodes:
        out.append(n)
        source = n.args[0]
        if n.target not in (*VIEWS, *COPIES) or not isinstance(source, fx.Node) or shape(source)[-1:] != shape(n)[-1:]:
            break
    return out


def _is_normaliser(u: fx.Node, of: fx.Node) -> bool:
    if u.target is not aten.logsumexp.default or u.kwargs:
        return False
    dims: Any = u.args[1]
    return list(dims) in ([-1], [len(shape(of)) - 1])


def _readers(n: fx.Node) -> list[fx.Node]:
    """Users, also of other names of it."""
    return [r for u in n.users for r in (_readers(u) if u.target in SAME else [u])]


def _named(nodes: set[fx.Node]) -> set[fx.Node]:
    """With their other names."""
    out, todo = set(nodes), list(nodes)
    while todo:
        more = [u for u in todo.pop().users if u.target in SAME and u not in out]
        out.update(more)
        todo += more
    return out


def _gradients(
    start: fx.Node, loss: fx.Node, log_p: fx.Node, logits: Logits, forward: set[fx.Node], rows: list[fx.Node], normal: list[fx.Node]
) -> tuple[Gradients, set[fx.Node]] | None:
    """And all that lies on the way to them."""
    if any(same(a) != same(b) for a, b in zip(start.args[2:6], loss.args[1:5], strict=True)):
        return None
    softmax = [n for n in _readers(log_p) if n.target is SOFTMAX_BACKWARD]
    if len(softmax) != 1:
        return None
    total = _smoothed(softmax[0].args[0], start)
    if total is None:
        return None
    total_node, inside = total
    normals, probabilities = _normal(rows, normal)
    found = Gradients(start, softmax[0], total_node, normals, [], [], [], [])
    inside |= {start, softmax[0], *probabilities}
    reached = {softmax[0], *(product for _, product in normals)}
    for u in log_p.graph.nodes:
        of = [n for n in u.all_input_nodes if n in reached]
        if not of or u in inside:
            continue
        kind = next((k for n in of if (k := _result(u, n, logits))), "")
        if kind:
            getattr(found, kind).append(u)
            continue
        if u.op != "call_function" or any(a not in inside and a not in forward for a in u.all_input_nodes):
            return None
        inside.add(u)
        reached.add(u)
    return found, inside


def _normal(rows: list[fx.Node], normal: list[fx.Node]) -> tuple[list[tuple[fx.Node, fx.Node]], set[fx.Node]]:
    """Of the log-sum-exps: g exp(scores - lse), as its gradient has it; (g, that product), and all that they are made of but g."""
    found, inside = list[tuple[fx.Node, fx.Node]](), set[fx.Node]()
    for lse in normal:
        names = _named({lse})
        columns = _named({*names, *(u for n in names for u in n.users if u.target is aten.unsqueeze.default)})
        takers = [u for c in columns for u in c.users if u.target is aten.sub.Tensor and u.args[1] is c and not u.kwargs]
        for less in (u for u in takers if any(same(u.args[0]) is same(n) for n in rows)):
            for exp in (u for u in less.users if u.target is aten.exp.default):
                for product in (u for u in exp.users if u.target is aten.mul.Tensor and not u.kwargs):
                    others = [a for a in product.args if a is not exp]
                    if len(others) == 1 and isinstance(others[0], fx.Node) and shape(others[0]) == (*shape(product)[:-1], 1):
                        found.append((others[0], product))
                        inside |= {less, exp, product}
    return found, inside


def _smoothed(grad: Any, start: fx.Node) -> tuple[fx.Node | None, set[fx.Node]] | None:
    """The gradient of the sum of log-probabilities, where that of the log-probabilities is the loss's own, or that and the sum's; and what they are added by."""
    if same(grad) is start:
        return None, set()
    if (
        not isinstance(grad, fx.Node)
        or grad.target is not aten.add.Tensor
        or grad.kwargs
        or not all(isinstance(a, fx.Node) for a in grad.args)
    ):
        return None
    others = [a for a in grad.args if same(a) is not start]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].target is not aten.expand.default:
        return None
    expand = others[0]
    narrow = expand.args[0]
    if not isinstance(narrow, fx.Node) or shape(narrow) != (shape(grad)[0], 1):
        return None
    return narrow, {grad, expand}


def _result(n: fx.Node, of: fx.Node, logits: Logits) -> str:
    """Which gradient `n` is that a product of `of`, or a sum of it, makes; "" for none."""
    if n.target is aten.mm.default:
        a, b = n.args
        if a is of and is_turned(b, _turned(logits)) and shape(n) == shape(logits.h):
            return "of_h"
        if a is of and is_matrix(b, logits.h) and shape(of)[0] == shape(logits.w)[0] and shape(n) == shape(logits.w):
            return "of_w"
        if b is of and is_turned(a, logits.h) and shape(n) == shape(logits.w)[::-1]:
            return "of_w_turned"
    if logits.b is not None and shape(of)[-1:] == shape(logits.b)[-1:] and _summed(n) == list(range(len(shape(of)) - 1)):
        return "of_b"
    return ""


def _summed(n: fx.Node) -> Any:
    """Over which dims `n` is a sum; None where it is none."""
    dims: Any = n.args[1] if n.target is aten.sum.dim_IntList else None
    return dims if dims is None else list(dims)


def _turned(logits: Logits) -> fx.Node:
    """The transposed weight that the layer multiplies by."""
    turned = looked_at(logits.product.args[-1])
    assert isinstance(turned, fx.Node)
    return turned
