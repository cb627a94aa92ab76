"""Hugging Face safetensors in and out.

In: every rank opens the files and reads only the slices of its shards. Out: tensors are gathered one at a time, file by file; rank 0 writes. Names are
the model's own; a tied parameter is stored once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from autopar import _torch
from autopar.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> int:
    """Fills `model` from a .safetensors file or a folder in Hugging Face layout; returns the bytes this rank read.

    Raises CheckpointError where names or shapes do not match, or a file cannot be read.
    """
    where = _locations(Path(path))
    names = _aliases(model)
    known = {n for group in names.values() for n in group}
    missing = [group[0] for group in names.values() if not any(n in where for n in group)]
    unknown = [n for n in where if n not in known]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing[:5])}"] if missing else []
        parts += [f"unknown to the model: {', '.join(unknown[:5])}"] if unknown else []
        raise CheckpointError(f"the checkpoint is of another model; {'; '.join(parts)}", where=str(path))
    tensors = model.state_dict(keep_vars=True)
    read = 0
    by_file: dict[Path, list[list[str]]] = {}
    for group in names.values():
        found = next(n for n in group if n in where)
        by_file.setdefault(where[found], []).append([found, group[0]])
    for file, wanted in by_file.items():
        try:
            with safe_open(file, framework="pt") as f:
                for stored, name in wanted:
                    read += _fill(tensors[name], f.get_slice(stored), stored, file)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"the file cannot be read: {e}", where=str(file)) from e
    return read


def save_safetensors(model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int = 5 * 1000**3) -> None:
    """Writes `model` in Hugging Face layout, files of at most `max_shard_size` bytes (a larger tensor gets its own). Collective."""
    out = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors = model.state_dict(keep_vars=True)
    kept = [group[0] for group in _aliases(model).values()]
    files = list(_split([(n, tensors[n].numel() * tensors[n].element_size()) for n in kept], max_shard_size))
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for i, names in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        whole: dict[str, torch.Tensor] = {}
        for n in names:
            t = tensors[n].detach()
            t = t.full_tensor() if isinstance(t, DTensor) else t
            if rank == 0:
                whole[n] = t.cpu().contiguous()
            index[n] = file
        if rank == 0:
            save_file(whole, out / file, metadata={"format": "pt"})
    if rank == 0 and len(files) > 1:
        total = sum(tensors[n].numel() * tensors[n].element_size() for n in kept)
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    if dist.is_initialized():
        dist.barrier()


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Identity of every tensor -> its names, first name first."""
    out: dict[int, list[str]] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor):
            out.setdefault(id(t), []).append(name)
    return out


def _locations(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    try:
        if path.is_dir() and (path / INDEX).is_file():
            return {n: path / str(f) for n, f in json.loads((path / INDEX).read_text())["weight_map"].items()}
        file = path / SINGLE if path.is_dir() else path
        if not file.is_file():
            raise CheckpointError("there is no safetensors checkpoint", where=str(file), fix=f"expected {SINGLE} or {INDEX}")
        with safe_open(file, framework="pt") as f:
            return dict.fromkeys(f.keys(), file)
    except (SafetensorError, ValueError, KeyError, AttributeError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint cannot be read: {e}", where=str(path)) from e


def _fill(t: torch.Tensor, source: Any, name: str, file: Path) -> int:
    if list(source.get_shape()) != list(t.shape):
        raise CheckpointError(f"{name} is {source.get_shape()} in the checkpoint, {list(t.shape)} in the model", where=str(file))
    with torch.no_grad():
        if isinstance(t, DTensor):
            local, slices = _torch.local_tensor(t), local_slices(t)
            piece = source[slices] if slices else source[:]
        else:
            local, piece = t, source[:] if t.dim() else source[...]
        if local.numel():
            local.copy_(piece.reshape(local.shape))
    return int(piece.numel() * piece.element_size())


def local_slices(t: DTensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor: chunks of ceil(size / W), axis by axis."""
    start, size = [0] * t.dim(), list(t.shape)
    coordinate = t.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, p in enumerate(t.placements):
        if isinstance(p, Shard):
            width = t.device_mesh.size(axis)
            chunk = -(-size[p.dim] // width)
            begin = min(coordinate[axis] * chunk, size[p.dim])
            start[p.dim] += begin
            size[p.dim] = min(chunk, size[p.dim] - begin)
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def _split(sizes: list[tuple[str, int]], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for n, size in sizes:
        if names and total + size > limit:
            yield names
            names, total = [], 0
        names.append(n)
        total += size
    if names:
        yield names
