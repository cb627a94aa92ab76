"""Checkpoints: torch.distributed.checkpoint (DCP) for the tensors, a JSON manifest for everything else.

    save(path, model, optimizer, step=..., extra=...)         load(path, model, optimizer) -> {"step", "extra"}

Every rank writes its shards; a checkpoint saved on one mesh loads on another or on one process, the tensors equal byte for byte. The manifest
names every tensor with shape and dtype and is written last: a folder without one is an unfinished checkpoint, and a
checkpoint of another model is refused by name before any tensor is touched. Nothing executable is read: DCP's own index is a pickle, and it is
opened with an unpickler that knows only DCP's plain record types.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import CheckpointError

FORMAT = 1
MANIFEST = "autopar.json"


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, step: int | None = None, extra: Any = None
) -> None:
    """Writes parameters, buffers, optimizer state, random counters, `step` and `extra` (anything JSON can hold, e.g. a scheduler's
    state_dict) into the folder `path`. Collective: every rank calls it.

    Raises CheckpointError if `extra` is not JSON.
    """
    folder = Path(path)
    tensors = _model_tensors(model)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        tensors.update(_optimizer_tensors(model, optimizer))
        groups = _groups(model, optimizer)
    try:
        rest = json.dumps({"step": step, "extra": extra, "groups": groups})
    except TypeError as e:
        raise CheckpointError(f"extra cannot be written as JSON: {e}", fix="pass numbers, strings, lists and dicts only") from e
    manifest = {
        "format": FORMAT,
        "tensors": {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()},
        "rng": model.rng_state() if hasattr(model, "rng_state") else None,
        **json.loads(rest),
    }
    if _rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
    _barrier()
    dcp.save(dict(tensors), checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    _barrier()
    if _rank() == 0:
        temporary = folder / (MANIFEST + ".tmp")
        temporary.write_text(json.dumps(manifest))
        temporary.replace(folder / MANIFEST)
    _barrier()


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Fills `model` (and `optimizer`) in place from the folder `path`; returns {"step", "extra"}. Collective.

    Raises CheckpointError, on every rank, for a checkpoint of another model (with the names), an incomplete or a damaged one.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    saved: dict[str, Any] = manifest["tensors"]
    tensors = _model_tensors(model)
    _compare({n: v for n, v in saved.items() if n.startswith("model.")}, tensors, folder)
    if optimizer is not None:
        wanted = {n: v for n, v in saved.items() if n.startswith("optimizer.")}
        _make_state(model, optimizer, wanted, folder)
        tensors.update({n: t for n, t in _optimizer_tensors(model, optimizer).items() if n in wanted})
    try:
        dcp.load(
            dict(tensors), checkpoint_id=str(folder), storage_reader=_torch.restricted_reader(folder), no_dist=not dist.is_initialized()
        )
    except (Exception, CheckpointException) as e:  # DCP's own is no Exception
        raise CheckpointError(
            f"the checkpoint is damaged: {type(e).__name__}: {str(e)[:400]}", where=str(folder), fix="load an earlier checkpoint"
        ) from e
    if optimizer is not None:
        _load_groups(model, optimizer, manifest["groups"], folder)
    if manifest.get("rng") and hasattr(model, "load_rng_state"):
        model.load_rng_state(manifest["rng"])
    return {"step": manifest.get("step"), "extra": manifest.get("extra")}


# ---- what is in it -----------------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, a tied one once, under its first name."""
    out: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor) and id(t) not in seen:
            seen.add(id(t))
            out["model." + name] = t.detach()
    return out


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = _names(model)
    out = {}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and id(p) in names:
                out[f"optimizer.{key}.{names[id(p)]}"] = value
    return out


def _groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameter groups with names for parameters; options that JSON cannot hold are left to the program that builds the optimizer."""
    names = _names(model)
    out = []
    for g in optimizer.param_groups:
        options = {k: v for k, v in g.items() if k != "params" and isinstance(v, (int, float, str, bool, list, tuple, type(None)))}
        out.append({"params": [names.get(id(p), "") for p in g["params"]], **options})
    return out


def _load_groups(model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], folder: Path) -> None:
    names = _names(model)
    mine = [[names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups]
    if groups and mine != [g["params"] for g in groups]:
        raise CheckpointError(
            "the optimizer has other parameter groups than the saved one", where=str(folder), fix="build it as the saving program did"
        )
    for g, saved in zip(optimizer.param_groups, groups, strict=False):
        for k, v in saved.items():
            if k != "params" and k in g:
                g[k] = tuple(v) if isinstance(g[k], tuple) else v


def _make_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], folder: Path) -> None:
    """Empty state tensors of the saved names, so that DCP has where to read to: like their parameter where they have its shape."""
    params = dict(model.named_parameters())
    ours = {id(p) for g in optimizer.param_groups for p in g["params"]}
    optimizer.state.clear()
    for full, (shape, dtype) in saved.items():
        _, key, name = full.split(".", 2)
        p = params.get(name)
        if p is None or id(p) not in ours:
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {name!r}, which this optimizer does not train", where=str(folder)
            )
        kind = getattr(torch, dtype)
        if list(p.shape) == shape:
            optimizer.state[p][key] = torch.zeros_like(p, dtype=kind)
        else:
            optimizer.state[p][key] = torch.zeros(shape, dtype=kind)


def _compare(saved: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    mine = {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
    problems = []
    for what, names in (
        ("missing in the checkpoint", sorted(set(mine) - set(saved))),
        ("unknown to the model", sorted(set(saved) - set(mine))),
        ("of another shape or dtype", [f"{n} ({saved[n]} saved, {mine[n]} here)" for n in mine if n in saved and saved[n] != mine[n]]),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{what}: {', '.join(n.removeprefix('model.') for n in names[:5])}{more}")
    if problems:
        raise CheckpointError("the checkpoint is of another model; " + "; ".join(problems), where=str(folder))


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError("there is no checkpoint", where=str(folder), fix="check the path; every rank must see the same folder")
    if not file.is_file():
        raise CheckpointError(
            "the checkpoint is incomplete: its manifest, which is written last, is missing",
            where=str(file),
            fix="load an earlier checkpoint",
        )
    try:
        manifest = json.loads(file.read_text())
        assert isinstance(manifest, dict) and isinstance(manifest["tensors"], dict)
        assert all(isinstance(s, list) and isinstance(d, str) for s, d in manifest["tensors"].values())
    except (ValueError, KeyError, AssertionError, TypeError) as e:
        raise CheckpointError("the checkpoint's manifest cannot be read", where=str(file), fix="load an earlier checkpoint") from e
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has format {manifest.get('format')}, this autopar reads {FORMAT}", where=str(file))
    return manifest


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
