"""TRL's log-probabilities of labels, as operators that a graph can have.

TRL's trainers give a model a forward that scores labels by a kernel of theirs, tile by tile into buffers, so that no logits are made in memory; on GPUs it first picks out the
positions that count. Neither can be captured: its buffers are written in place, and how many positions count is data. A step of ours has no need for it: the plan splits the logits, and
they are fused with what is made of them.

`capturable` is that same forward, their code with these two names in it bound otherwise; the library itself, and models that are not compiled, keep theirs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNEL, PICKS = "_ChunkedLogProbFunction", "_use_triton"  # names in TRL's module


class LogProbabilities:
    """Called as TRL's kernel is."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """hidden: [tokens, width]; weight: [vocabulary, width]; targets: [tokens]. Log-probability of each target, and of the distribution what `outputs` names: entropy,
        log_sum_sq_probs (the log of the sum of squared probabilities), mean_logits, is_top1; None for the others. All are [tokens], float32; only the first two have
        gradients."""
        z = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)).float() * logit_scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / temperature
        log_p = z.log_softmax(-1)
        of_target = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        still = log_p.detach()
        return (
            of_target,
            -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None,
            (2 * still).logsumexp(-1) if "log_sum_sq_probs" in outputs else None,
            z.detach().mean(-1) if "mean_logits" in outputs else None,
            still.argmax(-1) == targets if "is_top1" in outputs else None,
        )


def _picks(device: torch.device) -> bool:
    return False


def is_fused(model: nn.Module) -> bool:
    """Whether TRL has put its forward into `model`."""
    forward = vars(model).get("forward")
    return isinstance(forward, types.MethodType) and {KERNEL, PICKS} <= set(getattr(forward.__func__, "__code__", _picks.__code__).co_names)


def capturable(model: nn.Module) -> None:
    """Puts a forward that can be captured in the place of TRL's."""
    theirs: Any = vars(model)["forward"].__func__
    names = {**theirs.__globals__, KERNEL: LogProbabilities, PICKS: _picks}
    ours = types.FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    ours.__wrapped__ = getattr(theirs, "__wrapped__", theirs)  # type: ignore[attr-defined]
    model.forward = types.MethodType(ours, model)
