"""What a head without logits (`autopar.kernels.loss_head`) computes, moves, sends and takes up on one rank, of t tokens, v words and d features:

    FLOPs      2 t v d forward; backward as much again for the scores, and for each of the gradients of h and w that is wanted
    memory     besides operands and results: every pass over a tile's scores; sums of several tiles, read and written for each of them
    workspace  a tile's scores and what is made of them; gradients that are added up in float32
    exchange   over the axes that split words: the largest score of every token, then a sum of two or three numbers a token

A pass counts where it reads or writes each score once: a product's result, a kernel's operand, another product's operand. Triton kernels leave

    forward    2 passes: the product writes scores, the kernel reads them
    backward   3, and one more for each of the gradients of h and w that is wanted: the product writes, the kernel reads and writes in place, products read

all in the operands' dtype, whether scores are scaled, capped or neither; and a tile's scores once, in that dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph.graph import DTYPE_BYTES, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware.parts import Device
from autopar.kernels.tiles import sides
from autopar.rules.loss_head import BACKWARD, FORWARD
from autopar.rules.strategy import Strategy

# In the operands' dtype, and in float32; more of the latter where scores are scaled, or capped.
NARROW_PASSES = {FORWARD: 3, BACKWARD: 5}
WIDE_PASSES = {FORWARD: 4, BACKWARD: 6}
SCALED_PASSES = {FORWARD: 3, BACKWARD: 5}
CAPPED_PASSES = {FORWARD: 7, BACKWARD: 18}
KERNELS = {FORWARD: 12, BACKWARD: 14}  # launches a tile
TRITON_PASSES = {FORWARD: 2, BACKWARD: 3}  # besides products of scores


def is_loss_head(op: Op) -> bool:
    return op.target in KERNELS


def _wanted(op: Op) -> tuple[bool, bool]:
    """Whether gradients of h and w are."""
    return (bool(op.args[11][0]), bool(op.args[11][1])) if op.target == BACKWARD else (False, False)


def _scaled(op: Op) -> tuple[float, float]:
    """Scale and cap."""
    at = 8 if op.target == BACKWARD else 5
    return float(op.args[at]), float(op.args[at + 1])


def _tile(op: Op) -> int:
    return int(op.args[10 if op.target == BACKWARD else 7])


def dtype(op: Op) -> str:
    """Of h and w, which products are made in."""
    return str(op.args[3 if op.target == BACKWARD else 0].dtype)


def _itemsizes(op: Op) -> tuple[int, int]:
    """Of the operands, and of scores."""
    narrow = DTYPE_BYTES.get(dtype(op), 4)
    return narrow, max(narrow, 4)


def _shape(op: Op, n: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Tokens and words of a tile, and how many of them there are along each."""
    chunk, block = sides(n["t"], n["v"], _tile(op))
    return chunk, block, -(-n["t"] // chunk), -(-n["v"] // block)


def products(op: Op) -> int:
    return 1 + sum(_wanted(op))


def in_triton(op: Op, device: Device) -> bool:
    """Whether kernels make the passes over scores."""
    return not device.why_no_triton(dtype(op))


def launches(op: Op, n: Mapping[str, int], triton: bool = False) -> int:
    """triton: as `in_triton` says. A product that is added to what is wider is two kernels."""
    _, _, along_tokens, along_words = _shape(op, n)
    if not triton:
        return along_tokens * along_words * KERNELS[op.target]
    narrow, wide = _itemsizes(op)
    of_h, of_w = _wanted(op)
    added = of_h * (1 + (narrow < wide and along_words > 1)) + of_w * (1 + (narrow < wide and along_tokens > 1))
    return along_tokens * along_words * (2 + added)


def passes_bytes(op: Op, n: Mapping[str, int], triton: bool = False) -> float:
    narrow, wide = _itemsizes(op)
    _, _, along_tokens, along_words = _shape(op, n)
    scale, cap = _scaled(op)
    more = CAPPED_PASSES[op.target] if cap else SCALED_PASSES[op.target] if scale != 1 else 0
    of_h, of_w = _wanted(op)
    if triton:
        each = (TRITON_PASSES[op.target] + of_h + of_w) * narrow
    else:
        each = NARROW_PASSES[op.target] * narrow + (WIDE_PASSES[op.target] + more) * wide
    scores = float(n["t"]) * n["v"] * each
    sums = 2.0 * wide * n["d"] * (of_h * n["t"] * (along_words - 1) + of_w * n["v"] * (along_tokens - 1))
    return scores + sums


def workspace_bytes(op: Op, n: Mapping[str, int], triton: bool = False) -> float:
    narrow, wide = _itemsizes(op)
    chunk, block, along_tokens, along_words = _shape(op, n)
    scale, cap = _scaled(op)
    of_h, of_w = _wanted(op)
    scores = float(chunk * block * (narrow if triton else 2 * wide if cap or scale != 1 else narrow + wide))
    # A block of dw while it is made; where products are narrower than sums, dh, and a product beside the sum that it goes into.
    gradients = float(n["d"] * block * of_w * (wide if along_tokens > 1 else narrow))
    if narrow < wide:
        sums_h, sums_w = of_h and along_words > 1, of_w and along_tokens > 1
        product = narrow * n["d"] * max(chunk * sums_h, block * sums_w)
        gradients += wide * n["d"] * n["t"] * sums_h
        scores = max(scores, chunk * block * narrow + product + 0.0)
    return scores + gradients


def exchanged(op: Op, strategy: Strategy, ins: tuple[Placement, ...], mesh: Mesh) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """(kind, axes, bytes a rank sends) of each collective inside."""
    axes = tuple(a.name for a in mesh.axes if a.size > 1 and strategy.get(a.name, ("", 0))[0] == "v")
    if op.target != FORWARD or not axes:
        return ()
    each = 2 * ins[0].local_shape(mesh)[0] * _itemsizes(op)[1] * (1 - 1 / mesh.sizes_product(axes))
    return ("all_reduce", axes, each), ("all_reduce", axes, each * (3 if op.args[4] else 2))
