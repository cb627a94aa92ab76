"""Triton kernels for passes over memory inside of our custom operators, whose bodies Inductor does not see: each file one kernel, called where `why_not` says nothing.

In: a GPU's tensors of one rank. Out: the same numbers as the operator's passes in torch, which run elsewhere and are what kernels are tested against. Triton is imported by the first call that
needs it, never by `import autopar`. **Add a kernel in a file of its own**, where an operator of ours makes several passes: what stands in the graph itself Inductor fuses.
"""

from __future__ import annotations

import functools
import importlib
import os
import re

import torch

from autopar.kernels import triton_takes

LEAST = (3, 6)  # the triton of torch 2.11
TYPES: tuple[str, ...] = ("cuda",)  # of devices; AMD's call themselves so as well
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, d) for d in triton_takes.DTYPES)
CAPABILITY = (8, 0)
AMD = ("gfx942", "gfx950")


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Why kernels of this folder do not take tensors of `dtype` on `device`, as a clause of a sentence; "" where they do."""
    if device.type not in TYPES:
        return f"the tensors are on a {device.type}, kernels are for GPUs"
    if dtype not in DTYPES:
        return f"no kernel takes {dtype}"
    if os.environ.get("AUTOPAR_TRITON", "1") in ("0", "off"):
        return "AUTOPAR_TRITON=0 asks for none"
    if device.type == "cuda" and (unlisted := _unlisted(torch.cuda.current_device() if device.index is None else device.index)):
        return unlisted
    return _missing()


@functools.cache
def _missing() -> str:
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as e:
        return f"triton cannot be imported ({e})"
    found = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    return "" if found >= LEAST else f"triton {version} is older than {'.'.join(map(str, LEAST))}"


@functools.cache
def _unlisted(index: int) -> str:
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
        return "" if name in AMD else f"kernels were not compiled for {name}, but for {' and '.join(AMD)}"
    found = torch.cuda.get_device_capability(index)
    least, own = (".".join(map(str, c)) for c in (CAPABILITY, found))
    return "" if found >= CAPABILITY else f"the GPU's compute capability is {own}, kernels are for {least} and later"
