"""Adapters of peft in and out, in peft's own files: small beside the model, so whole on the rank that writes, and on every rank that reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.dcp import some
from autopar.checkpoint.ranks import rank, together
from autopar.distributed.failures import during
from autopar.errors import CheckpointError

FILE = "adapter_model.safetensors"


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is one of peft's, which saves its adapters alone."""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "get_base_model", None))


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes the adapters of a peft model and their configs. Collective; rank 0 writes. Raises CheckpointError."""
    from peft import get_peft_model_state_dict

    peft: Any = model
    state = dict(model.state_dict(keep_vars=True))
    saved = {id(t) for a in peft.peft_config for t in get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=a).values()}
    with during("writing adapters"), torch.no_grad():
        whole = {}
        for name, t in state.items():
            if id(t) in saved:
                there = (t.full_tensor() if isinstance(t, DTensor) else t).detach()
                if rank() == 0:
                    whole[name] = there.cpu().clone()
        together(lambda: peft.save_pretrained(str(folder), state_dict=whole) if rank() == 0 else None, Path(folder))


def load_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fills every adapter of a peft model from the files that `save_adapters` or peft wrote. Every rank reads them. Raises CheckpointError, before any tensor is
    touched, where a file is missing or of another adapter."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    peft: Any = model
    read = {}
    for adapter in peft.peft_config:
        file = Path(folder) / ("" if adapter == "default" else adapter) / FILE
        try:
            read[adapter] = load_file(file)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"the adapter cannot be read: {e}", where=str(file), fix="pass the folder that it was saved in") from e
        mine = get_peft_model_state_dict(model, state_dict=dict(model.state_dict(keep_vars=True)), adapter_name=adapter)
        other = sorted(set(mine) ^ set(read[adapter])) or [n for n, t in mine.items() if t.shape != read[adapter][n].shape]
        if other:
            raise CheckpointError(f"the checkpoint is of another adapter; different: {some(other)}", where=str(file))
    for adapter, state in read.items():
        set_peft_model_state_dict(model, state, adapter)
