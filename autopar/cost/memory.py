"""Which tensors an op reads from device memory and which it writes, taken by itself. `fusion.py` says what remains of it in company.

views                  nothing: another look at the same memory
constants, `x_like`    read nothing; uninitialised memory is not written either
lookups                of the table only the rows that are asked for
everything else        every distinct operand once, every output once
batch statistics       what they are of once more: each channel's are complete before the first element of the result is known, and no cache holds so much
"""

from __future__ import annotations

import math

from autopar.graph.graph import DTYPE_BYTES, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules.grammar import Rule

# Of the ops whose rule is a view's, those that write a tensor of their own.
_COPIES = """
    clone copy lift_fresh_copy repeat slice_backward slice_scatter split_with_sizes_copy cat stack select_backward select_scatter
    constant_pad_nd flip roll unfold_backward diagonal_backward im2col col2im as_strided_scatter pixel_shuffle pixel_unshuffle
"""
COPIES = frozenset(_COPIES.split())
LOOKUPS = frozenset(("embedding", "gather", "index_select", "index", "_unsafe_index"))
# By name: which argument says that the statistics are the batch's, not given ones.
_TRAINING = {
    "_native_batch_norm_legit_functional": -3,
    "native_batch_norm": -3,
    "_native_batch_norm_legit": -3,
    "native_batch_norm_backward": 7,
}


def base_name(op: Op) -> str:
    """mm, of aten.mm.default."""
    return op.target.split(".")[1] if "." in op.target else op.target


def is_view(op: Op, rule: Rule) -> bool:
    """Whether the op's result is another look at its first operand's memory, and so free."""
    return rule.kind == "view" and base_name(op) not in COPIES


def reads(op: Op) -> tuple[Tensor, ...]:
    """Distinct tensors whose contents matter."""
    name = base_name(op)
    if name.endswith("_like") or name.startswith("new_"):
        return ()
    return tuple({t.name: t for t in op.inputs}.values())


def writes(op: Op) -> tuple[Tensor, ...]:
    name = base_name(op)
    if name.startswith(("empty", "new_empty")):
        return ()
    return tuple(o for o in op.outputs if o is not None)


def of_batch_statistics(op: Op) -> bool:
    """Whether `op` makes numbers of a whole batch, one a channel, and then goes over the batch with them: batch_norm in training, and its backward."""
    at = _TRAINING.get(base_name(op))
    return at is not None and bool(op.args[at])


def again_bytes(op: Op, ins: tuple[Placement, ...], mesh: Mesh) -> float:
    """Bytes of operands that one rank reads in a pass of its own, whatever the op's kernel reads besides."""
    if not of_batch_statistics(op):
        return 0.0
    return sum(local_bytes(t, p, mesh) for t, p in zip(op.inputs, ins, strict=True) if t.shape == op.inputs[0].shape)


def local_bytes(t: Tensor, at: Placement, mesh: Mesh) -> float:
    """Bytes of one rank's part of `t`."""
    return float(math.prod(at.local_shape(mesh)) * DTYPE_BYTES.get(t.dtype, 4))


def moved_bytes(
    op: Op,
    ins: tuple[Placement, ...],
    outs: tuple[Placement | None, ...],
    mesh: Mesh,
    read: frozenset[str],
    written: frozenset[str],
) -> float:
    """Bytes that one rank reads of the tensors named `read` and writes of those named `written`."""
    held = {t.name: local_bytes(t, p, mesh) for t, p in zip(op.inputs, ins, strict=True)}
    made = {t.name: local_bytes(t, p, mesh) for t, p in zip(op.outputs, outs, strict=True) if t is not None and p is not None}
    if base_name(op) in LOOKUPS:
        table = op.inputs[0].name
        held[table] = min(held[table], sum(made.values()))
    return sum(b for t, b in held.items() if t in read) + sum(b for t, b in made.items() if t in written)
