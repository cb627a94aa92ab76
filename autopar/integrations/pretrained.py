"""A model of transformers from a folder, onto a mesh, without a whole copy of it anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.api import compile as compile_model
from autopar.errors import CheckpointError
from autopar.runtime.module import ParallelModule


def from_pretrained(
    cls: type,
    folder: str | os.PathLike[str],
    mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> ParallelModule:
    """A compiled model of class `cls` with the weights of `folder`: it is built on the meta device, and every rank reads the slices of its shards. Collective.

    cls: a class of transformers, or one of its Auto classes. folder: config and safetensors, as `save_pretrained` writes them (of the Hub: what
        `huggingface_hub.snapshot_download` returns). dtype: of parameters; default: the config's, else torch's default. mesh, options: those of `autopar.compile`.

    Raises CheckpointError where the folder has no config, or its tensors are not the model's (transformers renames those of some models when it loads them).
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            "there is no model's config",
            where=str(Path(folder) / "config.json"),
            fix="pass a folder on disks that all ranks see; snapshot_download(...) makes one of a name",
        )
    config = AutoConfig.from_pretrained(folder)
    model_of: Any = cls
    build = model_of.from_config if hasattr(cls, "from_config") else model_of._from_config  # of an Auto class, or a model's own
    with torch.device("meta"):
        model = build(config, dtype=dtype or getattr(config, "dtype", None) or torch.get_default_dtype())
    given: dict[str, Any] = dict(options)
    module = compile_model(model, mesh, **given)
    module.load_pretrained(folder)
    return module
