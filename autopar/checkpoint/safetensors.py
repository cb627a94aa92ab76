"""Hugging Face safetensors in and out.

In: every rank opens the files and reads only the slices of its shards. Out: tensors are gathered one at a time, file by file; rank 0 writes, and
holds one file's worth. Names are the model's own; a tied parameter is stored once, under its first name. A checkpoint of the model inside
(`wte.weight` for `transformer.wte.weight`, as on the Hub) loads too, if it names everything. transformers renames or fuses the
tensors of some models when it loads them; that is not done here.
"""

from __future__ import annotations

import functools
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
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.checkpoint.dcp import some
from autopar.checkpoint.ranks import together
from autopar.distributed.failures import during
from autopar.errors import CheckpointError
from autopar.tensors.owned import local_box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PARTS = "model-*-of-*.safetensors"
WRITING = ".writing"  # behind the name of a file until all are written


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> int:
    """Fills `model` from a .safetensors file or a folder in Hugging Face layout, in the model's dtypes; returns the bytes this rank read.

    Raises CheckpointError, before any tensor is touched, where names or shapes do not match or a file is not whole.
    """
    where = _locations(Path(path))
    tensors = model.state_dict(keep_vars=True)
    stored = _match(model, where, Path(path))
    by_file: dict[Path, dict[str, torch.Tensor]] = {}
    for name, source in stored.items():
        by_file.setdefault(where[source], {})[source] = tensors[name]
    read = 0
    for fill in (False, True):
        for file, wanted in by_file.items():
            try:
                with safe_open(file, framework="pt") as f:
                    for source, t in wanted.items():
                        part = f.get_slice(source)
                        if list(part.get_shape()) != list(t.shape):
                            raise CheckpointError(
                                f"{source} is {part.get_shape()} in the checkpoint, {list(t.shape)} in the model", where=str(file)
                            )
                        if fill:
                            read += _fill(t, part)
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"the file cannot be read: {e}", where=str(file), fix="fetch it again") from e
    return read


def save_safetensors(model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int = 5 * 1000**3) -> None:
    """Writes `model` in Hugging Face layout, files of at most `max_shard_size` bytes (a larger tensor gets its own), in the place of
    any that are there, which stay until all is written. Collective."""
    out = Path(folder)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    tensors = model.state_dict(keep_vars=True)
    size_bytes = {names[0]: tensors[names[0]].numel() * tensors[names[0]].element_size() for names in _aliases(model).values()}
    files = list(_split(size_bytes, max_shard_size))
    file_names = [SINGLE] if len(files) == 1 else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]

    def clear() -> None:
        if writes:
            out.mkdir(parents=True, exist_ok=True)
            for cut_short in out.glob(f"*{WRITING}"):
                cut_short.unlink(missing_ok=True)

    def write(file: str, whole: dict[str, torch.Tensor]) -> None:
        if writes:
            save_file(whole, out / (file + WRITING), metadata={"format": "pt"})

    def settle() -> None:
        """All is written: the new files take the old ones' place."""
        if not writes:
            return
        names = list(file_names)
        if len(files) > 1:
            weights = {n: file for file, part in zip(file_names, files, strict=True) for n in part}
            (out / (INDEX + WRITING)).write_text(
                json.dumps({"metadata": {"total_size": sum(size_bytes.values())}, "weight_map": weights}, indent=2)
            )
            names.append(INDEX)
        for old in {out / INDEX, out / SINGLE, *out.glob(PARTS)} - {out / n for n in names}:
            old.unlink(missing_ok=True)
        for name in names:
            os.replace(out / (name + WRITING), out / name)

    with during("writing safetensors"):
        together(clear, out)
        for file, names in zip(file_names, files, strict=True):
            whole: dict[str, torch.Tensor] = {}
            for n in names:
                t = tensors[n].detach()
                t = t.full_tensor() if isinstance(t, DTensor) else t
                if writes:
                    whole[n] = t.cpu().contiguous()
            together(functools.partial(write, file, whole), out)
        together(settle, out)


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Identity of every tensor -> its names, first name first."""
    out: dict[int, list[str]] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor):
            out.setdefault(id(t), []).append(name)
    return out


def _match(model: nn.Module, where: dict[str, Path], path: Path) -> dict[str, str]:
    """Our first name of every tensor -> the name it is stored under."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    groups = list(_aliases(model).values())
    known = {n for names in groups for n in names}
    ours = {n: n if n in known or prefix + n not in known else prefix + n for n in where}  # stored name -> our name
    stored = {n: s for s, n in ours.items()}
    missing = [names[0] for names in groups if not any(n in stored for n in names)]
    unknown = [s for s, n in ours.items() if n not in known]
    if missing or unknown:
        parts = [f"missing: {some(missing)}"] * bool(missing) + [f"unknown to the model: {some(unknown)}"] * bool(unknown)
        raise CheckpointError(
            f"the checkpoint is of another model; {'; '.join(parts)}",
            where=str(path),
            fix="if transformers stores this kind of model under names other than its modules' (ViT, Mixtral), convert it once, in one process: "
            "save_safetensors(Model.from_pretrained(...), folder)",
        )
    return {names[0]: next(stored[n] for n in names if n in stored) for names in groups}


def _locations(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    single, index = (path / SINGLE, path / INDEX) if path.is_dir() else (path, None)
    try:
        if index is not None and index.is_file() and not single.is_file():
            return {n: path / str(f) for n, f in json.loads(index.read_text())["weight_map"].items()}
        if single.is_file():
            with safe_open(single, framework="pt") as f:
                return dict.fromkeys(f.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"the checkpoint cannot be read: {e}", where=str(path), fix="fetch it again") from e
    raise CheckpointError("there is no safetensors checkpoint", where=str(single), fix=f"expected {SINGLE} or {INDEX}")


@torch.no_grad()
def _fill(t: torch.Tensor, source: Any) -> int:
    """Reads this rank's part of `source` into `t`; returns its bytes."""
    local, box = t, tuple((0, n, 1) for n in t.shape)
    if isinstance(t, DTensor):
        local, box = _torch.local_tensor(t), local_box(t.shape, t.device_mesh, t.placements)
    if not local.numel():
        return 0
    piece = source[tuple(slice(start, start + n) for start, n, _ in box)] if box else source[...]
    local.copy_(piece.reshape(local.shape))
    return int(piece.numel() * piece.element_size())


def _split(size_bytes: dict[str, int], limit_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    total_bytes = 0
    for n, size in size_bytes.items():
        if names and total_bytes + size > limit_bytes:
            yield names
            names, total_bytes = [], 0
        names.append(n)
        total_bytes += size
    yield names
