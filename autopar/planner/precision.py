"""Which dtypes a step computes in and reduces gradients in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.errors import AutoparError


@dataclass(frozen=True)
class Precision:
    """param: dtype float32 parameters are gathered and computed in; reduce: dtype gradients are reduced in."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @staticmethod
    def of(p: Precision | str | torch.dtype | None) -> Precision:
        if p is None or isinstance(p, Precision):
            return p or Precision()
        dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "float32": None}
        if isinstance(p, str):
            if p not in dtypes:
                raise AutoparError(
                    f"unknown precision {p!r}", fix=f"use one of {', '.join(dtypes)}, a torch dtype or autopar.Precision(...)"
                )
            found = dtypes[p]
        else:
            found = p
        return Precision(found, torch.float32) if found is not None else Precision()
