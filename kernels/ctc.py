"""Connectionist temporal classification as one op, whose results have sizes that are known beforehand.

`autopar::ctc_loss_v1` (log_probs [T, N, C], targets [N, S], lengths [N], target_lengths [N], blank) -> (loss [N], alpha [N, T, 2 S + 1])

torch's own gives an alpha that is as wide as the longest target of the batch: a size that depends on data, and on a rank's part of it. Here it is as wide as
the targets are padded, -inf beyond a sample's own lengths. An infinite loss (no path is long enough) has a zero gradient, as `zero_infinity` asks; without it the loss says so.
Lengths are read on the host, as torch's kernels do. When a body changes so must the name: compiled graphs are cached by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_loss_v1", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    loss, alpha = aten._ctc_loss(
        log_probs.contiguous(), targets.contiguous(), lengths.tolist(), target_lengths.tolist(), blank, zero_infinity
    )
    alpha = F.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2]))
    at = lengths.to(alpha.device)[:, None, None] > torch.arange(alpha.shape[1], device=alpha.device)[:, None]
    at = at & (2 * target_lengths.to(alpha.device)[:, None, None] >= torch.arange(alpha.shape[2], device=alpha.device))
    return loss, alpha.masked_fill(~at, -math.inf)  # torch leaves what is beyond a sample's own lengths as its memory was


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    t, n, _ = log_probs.shape
    return log_probs.new_empty((n,)), log_probs.new_empty((n, t, 2 * targets.shape[1] + 1))


@torch.library.custom_op("autopar::ctc_loss_backward_v1", mutates_args=())
def ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, loss: Tensor, alpha: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    sizes = target_lengths.tolist()
    alpha = alpha[..., : 2 * max(sizes, default=0) + 1].contiguous()
    operands = (grad.contiguous(), log_probs.contiguous(), targets.contiguous(), lengths.tolist(), sizes, loss.contiguous(), alpha)
    grads: Tensor = aten._ctc_loss_backward(*operands, blank, zero_infinity)
    return grads.contiguous()


@ctc_loss_backward.register_fake
def _(
    grad: Tensor, log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, loss: Tensor, alpha: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    return log_probs.new_empty(log_probs.shape)


def _setup(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = (blank, zero_infinity)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return found, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_setup)
