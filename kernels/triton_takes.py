"""What Triton kernels (`autopar.kernels.triton`) take, by name: for prices and plans, which are made without torch, or where there is no GPU."""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
NO_FORM = "other"  # with which names of gates begin (`gates.py`) that are of no form that a kernel has


def has_form(gate: str) -> bool:
    return not gate.startswith(NO_FORM)
