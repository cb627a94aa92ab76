"""Eager PyTorch with operands that lie dense: a kernel that then says otherwise is wrong by itself.

torch's CPU kernel of batch norm's backward takes operands whose strides fit two memory formats (sizes of 1) for the other one of them (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

KEPT = ("as_strided", "set_", "resize")  # what they do is about memory


class Dense(TorchDispatchMode):
    """Copies operands of operators that neither write nor return views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        touches = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
        if not touches and not any(k in schema.name for k in KEPT):
            args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dense(x: Any) -> Any:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) and x.layout == torch.strided else x
