"""Checkpoints: torch.distributed.checkpoint (DCP) for the tensors, a JSON manifest for everything else.

    save(path, model, optimizer, step=..., extra=...)         load(path, model, optimizer) -> {"step", "extra"}

Every rank writes its shards; a checkpoint saved on one mesh loads on another or on one process, the tensors equal byte for byte. The
manifest names every tensor with shape and dtype, and every file with its length and CRC-32, so that a checkpoint of another model and a damaged
one are refused, by name, before any tensor is touched. To check the sums, all files are read once more than loading needs, each by one rank.

    path/autopar.json                    the manifest
    path/autopar-<id>/.metadata, *.distcp    what DCP wrote, in a folder of this save alone

A save over an earlier checkpoint leaves that one as it is until the new one is whole: it writes into a folder of its own, then puts its manifest in the place of the
earlier one's, in one step, and only then removes what that one named. One that is cut short is never named by a manifest, and the next
save removes what it left. A folder without a manifest is a first save that was cut short.

Nothing executable is read: DCP's own index is a pickle, and it is opened with an unpickler that knows only DCP's plain record types. The
sums find accidents, not forgeries: whoever can write the folder can write other weights.

What fails on one rank raises CheckpointError on all of them, so that none waits for one that has given up; one that is killed, LostRankError.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from autopar import _torch
from autopar.checkpoint.place import Place, place_of
from autopar.distributed import presence
from autopar.distributed.failures import during, is_of_others
from autopar.errors import CheckpointError

FORMAT = 2
FLAT = 1  # the format before: DCP's files beside the manifest
MANIFEST = "autopar.json"
INDEX = ".metadata"  # DCP's
DATA = re.compile(r"autopar-[0-9a-f]{32}")  # folders of one save
READ_BYTES = 1 << 24
EARLIER = "load an earlier checkpoint"

T = TypeVar("T")


class Resumed(TypedDict):
    """What `save` was told besides the model: `step`, and `extra` as JSON gives it back."""

    step: int | None
    extra: object


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, step: int | None = None, extra: object = None
) -> None:
    """Writes parameters, buffers, optimizer state, random counters, `step` and `extra` (anything JSON can hold, e.g. a scheduler's
    state_dict) into the folder `path`, or a URL that fsspec knows. Collective: every rank calls it.

    An earlier checkpoint there stays whole until this one is, so there must be room for both.
    """
    with during("checkpoint save"):
        _save(place_of(path), model, optimizer, step, extra)


def _save(place: Place, model: nn.Module, optimizer: Optimizer | None, step: int | None, extra: object) -> None:
    tensors = _model_tensors(model)
    if optimizer is not None:
        tensors.update(_optimizer_tensors(model, optimizer))

    rng_state = getattr(model, "rng_state", None)  # a compiled model's

    def describe() -> dict[str, Any]:
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "extra": extra,
            "rng": None if rng_state is None else rng_state(),
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "groups": [] if optimizer is None else _groups(model, optimizer),
            "numbers": {} if optimizer is None else _optimizer_numbers(model, optimizer),
            "tensors": {n: _kind(t) for n, t in tensors.items()},
        }
        try:
            manifest = json.loads(json.dumps(manifest))
        except TypeError as e:
            raise CheckpointError(f"extra cannot be written as JSON: {e}", fix="pass numbers, strings, lists and dicts only") from e
        return manifest

    def begin() -> str:
        if _rank() != 0:
            return ""
        place.make()
        _clean(place)
        return f"autopar-{uuid.uuid4().hex}"

    def write() -> None:
        dcp.save(dict(tensors), checkpoint_id=data.id, no_dist=not dist.is_initialized())

    def commit() -> None:
        manifest["data"] = name
        manifest["files"] = {n: s for found in sums for n, s in found.items()}
        if _rank() == 0:
            manifest["replaces"] = _flat_files(place)
            data.settle()
            place.put(MANIFEST, json.dumps(manifest).encode())
            with contextlib.suppress(Exception):  # the next save tries again
                _clean(place)

    _meet()
    manifest = together(describe, place)
    name = _gather(together(begin, place))[0]
    data = place.inside(name)
    try:
        together(write, place)
        sums = _gather(together(lambda: {n: _sum(data, n) for n in _my_part(sorted(_read_index(data)))}, place))
        together(commit, place)
    except BaseException:
        if _rank() == 0:
            with contextlib.suppress(Exception):
                _clean(place)
        raise


def _clean(place: Place) -> None:
    """Removes what saves have left that were cut short, or could not remove what they replaced. What the manifest names stays; all does where it cannot be read."""
    used: dict[str, Any] = {}
    if place.has(MANIFEST):
        try:
            with place.open(MANIFEST) as f:
                used = dict(json.loads(f.read()))
        except (ValueError, TypeError):
            return
    gone = _of_dcp(used["replaces"]) if used.get("format") == FORMAT else []
    for name in place.names():
        if (DATA.fullmatch(name) and name != used.get("data")) or name in gone or name == f"{MANIFEST}.tmp":
            place.remove(name)


def _flat_files(place: Place) -> list[str]:
    """The files of a checkpoint of the format before, which lie beside its manifest, also where they could not be removed yet."""
    try:
        with place.open(MANIFEST) as f:
            old = json.loads(f.read())
        return _of_dcp(old["files" if old["format"] == FLAT else "replaces"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _of_dcp(names: Iterable[str]) -> list[str]:
    return [n for n in names if n == INDEX or re.fullmatch(r"[\w.-]+\.distcp", n)]


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Resumed:
    """Fills `model` (and `optimizer`) in place from the folder or URL `path`; returns {"step", "extra"}. Collective.

    Raises CheckpointError for a checkpoint of another model (with the names), an incomplete or a damaged one (with the tensors it damages).
    """
    with during("checkpoint load"):
        return _load(place_of(path), model, optimizer)


def _load(place: Place, model: nn.Module, optimizer: Optimizer | None) -> Resumed:
    def check() -> tuple[dict[str, Any], Place]:
        manifest = _read_manifest(place)
        saved = manifest["tensors"]
        _compare({n: v for n, v in saved.items() if n.startswith("model.")}, _model_tensors(model), place)
        if optimizer is not None:
            _compare_optimizer(model, optimizer, manifest, place)
        data = place if manifest["format"] == FLAT else place.inside(manifest["data"])
        _check_files(data, manifest)
        return manifest, data

    def read() -> None:
        tensors = _model_tensors(model)
        if optimizer is not None:
            _make_state(model, optimizer, manifest)
            tensors.update(_optimizer_tensors(model, optimizer))
        dcp.load(tensors, checkpoint_id=data.id, storage_reader=_torch.restricted_reader(data.id), no_dist=not dist.is_initialized())
        if optimizer is not None:
            _load_groups(optimizer, manifest["groups"])
        load_rng_state = getattr(model, "load_rng_state", None)
        if manifest["rng"] and load_rng_state is not None:
            load_rng_state(manifest["rng"])

    _meet()
    manifest, data = together(check, place)
    together(read, place)
    return {"step": manifest["step"], "extra": manifest["extra"]}


# ---- what is in it -----------------------------------------------------------------------------------------------


def _kind(t: torch.Tensor) -> list[Any]:
    return [list(t.shape), str(t.dtype).removeprefix("torch.")]


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


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps of our parameters, as "key.parameter"; no key has a dot."""
    names = _names(model)
    return {f"{key}.{names[id(p)]}": v for p, state in optimizer.state.items() if id(p) in names for key, v in state.items()}


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {f"optimizer.{n}": v for n, v in _state(model, optimizer).items() if isinstance(v, torch.Tensor)}


def _optimizer_numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The part of the state that is no tensor, such as a count of steps."""
    numbers = {n: v for n, v in _state(model, optimizer).items() if not isinstance(v, torch.Tensor)}
    for n, v in numbers.items():
        if not isinstance(v, (int, float, str, type(None))):
            raise CheckpointError(f"the optimizer's state {n!r} is a {type(v).__name__}; only tensors and numbers can be saved")
    return numbers


def _groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameter groups with names for parameters; options that JSON cannot hold are left to the program that builds the optimizer."""
    names = _names(model)
    out = []
    for g in optimizer.param_groups:
        options = {k: float(v) if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in g.items() if k != "params"}
        options = {k: v for k, v in options.items() if isinstance(v, (int, float, str, bool, list, tuple, type(None)))}
        out.append({"params": [names.get(id(p), "") for p in g["params"]], **options})
    return out


def _load_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for g, saved in zip(optimizer.param_groups, groups, strict=True):
        for k, v in saved.items():
            if k != "params" and isinstance(g.get(k), torch.Tensor):
                g[k].fill_(v)
            elif k != "params" and k in g:
                g[k] = tuple(v) if isinstance(g[k], tuple) else v


def _make_state(model: nn.Module, optimizer: Optimizer, manifest: dict[str, Any]) -> None:
    """State of the saved names, for DCP to read into: like the parameter where it has its shape, else a plain tensor (a count of steps)."""
    params = dict(model.named_parameters())
    saved = {tuple(n.split(".", 2)[1:]): kind for n, kind in manifest["tensors"].items() if n.startswith("optimizer.")}
    scalars = {key for (key, name), (shape, _) in saved.items() if not shape and params[name].dim()}
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    optimizer.state.clear()
    for (key, name), (shape, dtype) in saved.items():
        p, kind = params[name], getattr(torch, dtype)
        if list(p.shape) == shape and key not in scalars:
            optimizer.state[p][key] = torch.zeros_like(p, dtype=kind, requires_grad=False)
        else:
            on_device = any(group_of[id(p)].get(option) for option in ("capturable", "fused"))
            optimizer.state[p][key] = torch.zeros(shape, dtype=kind, device=p.device if on_device else "cpu")
    for n, v in manifest["numbers"].items():
        key, name = n.split(".", 1)
        optimizer.state[params[name]][key] = v


# ---- is it ours, and whole? --------------------------------------------------------------------------------------


def some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def _compare(saved: dict[str, Any], tensors: dict[str, torch.Tensor], place: Place) -> None:
    mine = {n: _kind(t) for n, t in tensors.items()}
    problems = []
    for what, names in (
        ("missing in the checkpoint", sorted(set(mine) - set(saved))),
        ("unknown to the model", sorted(set(saved) - set(mine))),
        ("of another shape or dtype", [f"{n} ({saved[n]} saved, {mine[n]} here)" for n in mine if n in saved and saved[n] != mine[n]]),
    ):
        if names:
            problems.append(f"{what}: {some([n.removeprefix('model.') for n in names])}")
    if problems:
        raise CheckpointError("the checkpoint is of another model; " + "; ".join(problems), where=str(place))


def _compare_optimizer(model: nn.Module, optimizer: Optimizer, manifest: dict[str, Any], place: Place) -> None:
    same = "build the optimizer as the saving program did, or load the model alone"
    if manifest["optimizer"] is None:
        raise CheckpointError("the checkpoint holds no optimizer", where=str(place), fix="load the model alone")
    if manifest["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {manifest['optimizer']}, not of {type(optimizer).__name__}", where=str(place), fix=same
        )
    saved, mine = ([g["params"] for g in groups] for groups in (manifest["groups"], _groups(model, optimizer)))
    if saved != mine:
        theirs, ours = ({n for g in groups for n in g} for groups in (saved, mine))
        differ = sorted(theirs ^ ours)
        what = f"; only one of them trains {some(differ)}" if differ else ""
        raise CheckpointError(f"the optimizer has other parameter groups than the saved one{what}", where=str(place), fix=same)


def _read_manifest(place: Place) -> dict[str, Any]:
    file = f"{place}/{MANIFEST}"
    if not place.exists():
        raise CheckpointError("there is no checkpoint", where=str(place), fix="check the path; every rank must see the same folder")
    if not place.has(MANIFEST):
        raise CheckpointError("the checkpoint is incomplete: its manifest, which is written last, is missing", where=file, fix=EARLIER)
    try:
        with place.open(MANIFEST) as f:
            manifest: dict[str, Any] = json.loads(f.read())
        found = manifest["format"]
        if found in (FLAT, FORMAT):
            assert found == FLAT or DATA.fullmatch(manifest["data"])
            names = {n.split(".", 2)[2] for n in manifest["tensors"] if n.startswith("optimizer.")}
            names |= {n.split(".", 1)[1] for n in manifest["numbers"]}
            assert names <= {n for g in manifest["groups"] for n in g["params"]}
            assert all(isinstance(n, int) for kind in manifest["tensors"].values() for n in kind[0])
            assert all(isinstance(getattr(torch, kind[1]), torch.dtype) for kind in manifest["tensors"].values())
            assert INDEX in manifest["files"] and all(len(s) == 2 for s in manifest["files"].values())
            assert {"step", "extra", "rng", "optimizer"} <= manifest.keys()
    except (ValueError, KeyError, AssertionError, TypeError, AttributeError, IndexError) as e:
        raise CheckpointError("the checkpoint's manifest cannot be read", where=file, fix=EARLIER) from e
    if found not in (FLAT, FORMAT):
        raise CheckpointError(f"the checkpoint has format {found}, this autopar reads {FLAT} and {FORMAT}", where=file)
    return manifest


def _read_index(place: Place) -> dict[str, set[str]]:
    """File -> the tensors it holds (parts of), by DCP's index."""
    out: dict[str, set[str]] = {INDEX: set()}
    for where, info in _torch.restricted_reader(place.id).read_metadata().storage_data.items():
        out.setdefault(info.relative_path, set()).add(where.fqn)
    return out


def _sum(place: Place, name: str) -> list[int]:
    """Length in bytes and CRC-32."""
    n, crc = 0, 0
    with place.open(name) as f:
        while block := f.read(READ_BYTES):
            n, crc = n + len(block), zlib.crc32(block, crc)
    return [n, crc]


def _check_files(place: Place, manifest: dict[str, Any]) -> None:
    """Every rank checks the index, and its part of the files."""
    index: dict[str, set[str]] = {INDEX: set()}
    for name in [INDEX, *_my_part(sorted(set(manifest["files"]) - {INDEX}))]:
        try:
            is_whole = _sum(place, name) == manifest["files"][name]
        except OSError:
            is_whole = False
        if name == INDEX and is_whole:
            index = _read_index(place)
            if set(index) != set(manifest["files"]):
                raise CheckpointError("the checkpoint is damaged: its index and its manifest disagree", where=str(place), fix=EARLIER)
        if not is_whole:
            names = [n.removeprefix("model.") for n in sorted(index.get(name, ()))]
            holds = f", which holds {some(names)}," if names else ""
            raise CheckpointError(f"the checkpoint is damaged: {name}{holds} is not what was saved", where=str(place), fix=EARLIER)


# ---- ranks -------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _my_part(names: list[str]) -> list[str]:
    return names[_rank() :: dist.get_world_size() if dist.is_initialized() else 1]


def _gather(x: T) -> list[T]:
    if not dist.is_initialized():
        return [x]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, x)
    return out


def _meet() -> None:
    """Ranks tell each other who they are, so that one that is killed can be named."""
    presence.know(_gather(presence.this_process()))


def together(f: Callable[[], T], place: Place | Path) -> T:
    """f(), on every rank; when it raises on one, all raise."""
    try:
        value, error = f(), None
    except (Exception, dcp.CheckpointException) as e:
        if is_of_others(e):
            raise
        error = e if isinstance(e, CheckpointError) else CheckpointError(f"{type(e).__name__}: {str(e)[:400]}", where=str(place))
        error.__cause__ = None if error is e else e
    said = [e for e in _gather(error and (error.what, error.where, error.fix)) if e]
    if error:
        raise error
    if said:
        what, where, fix = said[0]
        raise CheckpointError(what, where=where, fix=fix)
    return value
