"""Collectives inside an operator: what its local lowering (`autopar.passes.local`) all-reduces where its loops are split. They block,
but for the hops of attention's keys and values (`ring.py`).

nll_loss, mean or sum      [sum, count], in float32 at least, over all axes that split the scores
nll_loss, one per target   the losses, over the axes that split the classes
softmax, log_softmax       a maximum and a sum for every row, over the axes that split the row; backward: a sum
a head without logits      the largest score of a token, then sums, over the axes that split words (`loss_head.py`)
batch_norm in training     a number for every channel, twice, forward and backward, over the axes that split anything else
"""

from __future__ import annotations

import math

from autopar.cost import experts, loss_head
from autopar.cost.compute import local_sizes
from autopar.cost.memory import base_name, of_batch_statistics
from autopar.cost.ring import Within, hops
from autopar.graph.graph import DTYPE_BYTES, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy

_SOFTMAX = {"_softmax": 2, "_log_softmax": 2, "_safe_softmax": 2, "_softmax_backward_data": 1, "_log_softmax_backward_data": 1}
MEAN, SUM = 1, 2


def inside(op: Op, rule: Rule, strategy: Strategy, ins: tuple[Placement, ...], mesh: Mesh, imbalance: float = 1.0) -> tuple[Within, ...]:
    """Each of them. imbalance: of routed experts (`experts.load_of`)."""
    if rule.kind == "attention":
        return hops(op, rule, strategy, local_sizes(rule, strategy, mesh), mesh)
    return tuple(Within(*c) for c in _blocking(op, rule, strategy, ins, mesh, imbalance))


def _blocking(
    op: Op, rule: Rule, strategy: Strategy, ins: tuple[Placement, ...], mesh: Mesh, imbalance: float
) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """(kind, axes, bytes a rank sends) of each."""
    name = base_name(op)
    if experts.is_experts(op):
        return experts.exchanged(op, rule, strategy, ins, mesh, imbalance)
    if loss_head.is_loss_head(op):
        return loss_head.exchanged(op, strategy, ins, mesh)
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        scores, each = op.inputs[0], op.args[3] not in (MEAN, SUM)
        axes = _axes(mesh, {a for a, (x, _) in strategy.items() if x == "c" or not each})
        n = math.prod(ins[1].local_shape(mesh)) if each else 2
        return _reduced(mesh, axes, n * (_itemsize(scores) if each else _wide(scores)), 1)
    if name in _SOFTMAX:
        x, at = op.inputs[-1], ins[-1]
        dim = op.args[1 if len(op.inputs) == 1 else 2] % max(len(x.shape), 1)
        axes = _axes(mesh, {s.axis for s in at.splits if s.dim == dim})
        local = at.local_shape(mesh)
        return _reduced(mesh, axes, math.prod(local) // max(local[dim], 1) * _wide(x), _SOFTMAX[name])
    if name == "native_batch_norm_backward" or of_batch_statistics(op):
        x, at = op.inputs[0], ins[0]
        axes = _axes(mesh, {s.axis for s in at.splits if s.dim != 1})
        return _reduced(mesh, axes, at.local_shape(mesh)[1] * _wide(x), 2)
    return ()


def _axes(mesh: Mesh, names: set[str]) -> tuple[str, ...]:
    return tuple(a.name for a in mesh.axes if a.name in names and a.size > 1)


def _reduced(mesh: Mesh, axes: tuple[str, ...], nbytes: float, times: int) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    w = mesh.sizes_product(axes)
    return (("all_reduce", axes, 2 * nbytes * (w - 1) / w),) * times if axes else ()


def _itemsize(t: Tensor) -> int:
    return DTYPE_BYTES.get(t.dtype, 4)


def _wide(t: Tensor) -> int:
    """Sums are made in float32 at least."""
    return max(_itemsize(t), 4)
