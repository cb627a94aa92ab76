"""Weights of a compiled model in the files of the libraries that models come from: transformers' folders, and peft's of adapters."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from autopar.checkpoint.adapters import has_adapters, load_adapters, save_adapters
from autopar.checkpoint.ranks import rank, together
from autopar.checkpoint.safetensors import load_safetensors, save_safetensors


def write_pretrained(compiled: nn.Module, model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int) -> None:
    """Weights, and the configs of `model`, which `compiled` has inside. Collective; see `ParallelModule.save_pretrained`."""
    if has_adapters(model):
        save_adapters(model, folder)
        return
    save_safetensors(compiled, folder, max_shard_size)

    def configs() -> None:
        for part in ("config", "generation_config"):
            if rank() == 0 and hasattr(getattr(model, part, None), "save_pretrained"):
                getattr(model, part).save_pretrained(folder)

    together(configs, Path(folder))  # nobody goes on before they are there


def read_pretrained(compiled: nn.Module, model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fills `compiled` in place; see `ParallelModule.load_pretrained`."""
    if has_adapters(model):
        load_adapters(model, folder)
    else:
        load_safetensors(compiled, folder)
