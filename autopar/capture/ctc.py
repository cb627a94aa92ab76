"""While capturing, ctc_loss becomes an op of ours whose results have known sizes (`kernels.ctc`), of padded targets and of lengths in tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels.ctc import ctc_loss

MEAN, SUM = 1, 2


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int] | Tensor, target_lengths: Sequence[int] | Tensor, blank: int = 0,
    reduction: int = MEAN, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    single = log_probs.dim() == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
    lengths, sizes = _tensor(input_lengths), _tensor(target_lengths)
    if targets.dim() == 1:
        longest = max(target_lengths, default=0) if not isinstance(target_lengths, Tensor) else log_probs.shape[0] + 1
        targets = _padded(targets, sizes, longest)
    # What is longer than the time there is has no path, however much longer it is.
    loss: Tensor = ctc_loss(log_probs, targets, lengths, sizes.clamp(max=targets.shape[1]), blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == MEAN:
        return (loss / sizes.clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction == SUM else loss.squeeze(0) if single else loss


def _tensor(lengths: Sequence[int] | Tensor) -> Tensor:
    given = lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), dtype=torch.int64)
    return given.to(torch.int64).reshape(-1)


def _padded(targets: Tensor, sizes: Tensor, longest: int) -> Tensor:
    """Targets one after another, as rows. What a row has behind its own is never read."""
    longest = min(longest, targets.shape[0])
    if not longest:
        return targets.new_zeros((sizes.shape[0], 0))
    at = (sizes.cumsum(0) - sizes).unsqueeze(1) + torch.arange(longest)
    return targets[at.clamp(max=targets.shape[0] - 1)]


REPLACED = {torch.ops.aten.ctc_loss.IntList: _ctc, torch.ops.aten.ctc_loss.Tensor: _ctc}
