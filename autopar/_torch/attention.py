"""Which of its attention kernels torch would run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

CUDNN_HEAD = 128  # elements of a head up to which cuDNN has a backward on every GPU that it runs on


def prefers_cudnn_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Of tensors on a GPU, without a mask."""
    if max(q.shape[-1], v.shape[-1]) > CUDNN_HEAD:
        return False
    found: int = torch.ops.aten._fused_sdp_choice(q, k, v, None, 0.0, is_causal)
    return found == SDPBackend.CUDNN_ATTENTION.value
