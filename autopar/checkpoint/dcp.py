"""Checkpoints: torch.distributed.checkpoint (DCP) for the tensors, a JSON manifest for everything else.

    save(path, model, optimizer, step=..., extra=...)         load(path, model, optimizer) -> {"step", "extra"}

`save(..., wait=False)` returns once every rank has copied its shards to host memory; the rest is done by a thread (`background.py`), in the same order.

Every rank writes its shards; a checkpoint saved on one mesh loads on another or on one process, the tensors equal byte for byte. The
manifest names every tensor with shape and dtype, and every file with its length and CRC-32, so that a checkpoint of another model and a damaged
one are refused, by name, before any tensor is touched. To check the sums, all files are read once more than loading needs, each by one rank.

    path/autopar.json                    the manifest
    path/autopar-<id>/.metadata, *.distcp    what DCP wrote, in a folder of this save alone
    path/autopar-<id>/autopar.json       the manifest of an earlier checkpoint that is kept

A save over an earlier checkpoint leaves that one as it is until the new one is whole: it writes into a folder of its own, then puts its manifest in the place of the
earlier one's, in one step, and only then removes what that one named and what it kept, but for what the new manifest keeps. One that is cut short is never named by a manifest, and the next
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
import warnings
import zlib
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from autopar import _torch
from autopar.checkpoint import background
from autopar.checkpoint.background import Saving
from autopar.checkpoint.contents import (
    all_of,
    groups_of,
    kind_of,
    load_groups,
    make_state,
    merged,
    model_tensors,
    of_stages,
    optimizer_numbers,
    optimizer_tensors,
)
from autopar.checkpoint.place import Place, place_of
from autopar.checkpoint.ranks import gather, meet, my_part, rank, together
from autopar.distributed.failures import during
from autopar.distributed.last_checkpoint import note
from autopar.errors import CheckpointError

FORMAT = 2
FLAT = 1  # the format before: DCP's files beside the manifest
MANIFEST = "autopar.json"
INDEX = ".metadata"  # DCP's
DATA = re.compile(r"autopar-[0-9a-f]{32}")  # folders of one save
READ_BYTES = 1 << 24
EARLIER = "load an earlier checkpoint"


class Resumed(TypedDict):
    """What `save` was told besides the model: `step`, and `extra` as JSON gives it back."""

    step: int | None
    extra: object


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: object = None,
    keep: int = 1,
    wait: bool = True,
    weights: bool = True,
) -> Saving:
    """Writes parameters, buffers, optimizer state, random counters, `step` and `extra` (anything JSON can hold, e.g. a scheduler's
    state_dict) into the folder `path`, or a URL that fsspec knows. Collective: every rank calls it.

    An earlier checkpoint there stays whole until this one is, so there must be room for both.

    keep: how many checkpoints stay in `path`, this one among them; `load(..., step=)` reads an earlier one.
    wait: False: returns once this rank's shards are copied to host memory, and writes them beside training. What is saved is what there was at the
        call. What the write raises is raised by `.wait()` of what this returns, or else by the next `save` or `load`. Wait before the program ends,
        or destroys its process group.
    weights: False: leaves the model's tensors out, for who saves them otherwise; `load` then fills the optimizer alone.

    Raises CheckpointError, on all ranks, where it fails on one.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep}: a save keeps at least itself", fix="pass keep=1 or more")
    with during("checkpoint save"):
        return _save(place_of(path), model, optimizer, step, extra, keep, wait, weights)


def _save(
    place: Place, model: nn.Module, optimizer: Optimizer | None, step: int | None, extra: object, keep: int, wait: bool, weights: bool
) -> Saving:
    tensors = model_tensors(model) if weights else {}
    if optimizer is not None:
        tensors.update(optimizer_tensors(model, optimizer))

    rng_state = getattr(model, "rng_state", None)  # a compiled model's

    def describe() -> dict[str, Any]:
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "extra": extra,
            "weights": weights,
            "rng": None if rng_state is None else rng_state(),
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "groups": [] if optimizer is None else groups_of(model, optimizer),
            "numbers": {} if optimizer is None else optimizer_numbers(model, optimizer),
            "tensors": {n: kind_of(t) for n, t in tensors.items()},
        }
        try:
            manifest = json.loads(json.dumps(manifest))
        except TypeError as e:
            raise CheckpointError(f"extra cannot be written as JSON: {e}", fix="pass numbers, strings, lists and dicts only") from e
        return manifest

    def begin() -> str:
        if rank() != 0:
            return ""
        place.make()
        _clean(place)
        return f"autopar-{uuid.uuid4().hex}"

    meet()
    together(background.settle, place)
    manifest = together(describe, place)
    if of_stages(model):
        manifest = merged(gather(manifest), [n for n, _ in all_of(model).named_parameters()])
    name = gather(together(begin, place))[0]
    if wait:
        _write(place, name, tensors, manifest, keep, None)
        return Saving()
    group = background.group(name)
    copies = together(lambda: background.staged(tensors), place)

    def work() -> None:
        with during("checkpoint save"):
            _write(place, name, copies, manifest, keep, group)

    return background.start(work)


def _write(
    place: Place, name: str, tensors: dict[str, torch.Tensor], manifest: dict[str, Any], keep: int, group: dist.ProcessGroup | None
) -> None:
    """name: of the folder of this save; group: of all ranks."""
    data = place.inside(name)

    def write() -> None:
        dcp.save(dict(tensors), checkpoint_id=data.id, process_group=group, no_dist=not dist.is_initialized())

    def commit() -> None:
        manifest["data"] = name
        manifest["files"] = {n: s for found in sums for n, s in found.items()}
        if rank() == 0:
            manifest["replaces"] = _flat_files(place)
            manifest["earlier"] = _kept(place, keep - 1)
            data.settle()
            place.put(MANIFEST, json.dumps(manifest).encode())
            with contextlib.suppress(Exception):  # the next save tries again
                _clean(place)

    try:
        together(write, place, group)
        sums = gather(together(lambda: {n: _sum(data, n) for n in my_part(sorted(_read_index(data)))}, place, group), group)
        together(commit, place, group)
        note(place.id, manifest["step"])
    except BaseException:
        if rank() == 0:
            with contextlib.suppress(Exception):
                _clean(place)
        raise


def _kept(place: Place, n: int) -> list[dict[str, Any]]:
    """The last `n` checkpoints that are there, the newest first: their steps and folders. The newest one's manifest, which is about to be replaced, is put into its
    folder."""
    if n == 0 or not place.has(MANIFEST):
        return []
    with place.open(MANIFEST) as f:
        text = f.read()
    last = json.loads(text)
    if last["format"] != FORMAT:
        return []
    place.inside(last["data"]).put(MANIFEST, text)
    return [{"step": last["step"], "data": last["data"]}, *last.get("earlier", [])][:n]


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
    stays = {used.get("data"), *(e["data"] for e in used.get("earlier", []))}
    for name in place.names():
        if (DATA.fullmatch(name) and name not in stays) or name in gone or name == f"{MANIFEST}.tmp":
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


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, step: int | None = None) -> Resumed:
    """Fills `model` (and `optimizer`) in place from the folder or URL `path`; returns {"step", "extra"}. Collective.

    step: of an earlier checkpoint that `save(..., keep=)` has kept; default: the last one.

    Raises CheckpointError for a checkpoint of another model (with the names), an incomplete or a damaged one (with the tensors it damages), and for a
    step that is not there (with those that are). A save that is still written is waited for first, and its error raised.
    """
    with during("checkpoint load"):
        return _load(place_of(path), model, optimizer, step)


def _load(place: Place, model: nn.Module, optimizer: Optimizer | None, step: int | None) -> Resumed:
    def check() -> tuple[dict[str, Any], Place]:
        manifest = _read_manifest(place)
        if step is not None and manifest["step"] != step:
            manifest = _earlier(place, manifest, step)
        saved = manifest["tensors"]
        if manifest.get("weights", True):
            mine, every = model_tensors(model), model_tensors(all_of(model))
            there = {n: v for n, v in saved.items() if n.startswith("model.") and (n in mine or n not in every)}
            _compare(there, mine, place)
        if optimizer is not None:
            _compare_optimizer(optimizer, groups, manifest, place)
        data = place if manifest["format"] == FLAT else place.inside(manifest["data"])
        _check_files(data, manifest)
        return manifest, data

    def read() -> None:
        tensors = model_tensors(model) if manifest.get("weights", True) else {}
        if optimizer is not None:
            make_state(model, optimizer, manifest)
            tensors.update(optimizer_tensors(model, optimizer))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected mismatched keys")  # each stage of a pipeline has its own
            dcp.load(tensors, checkpoint_id=data.id, storage_reader=_torch.restricted_reader(data.id), no_dist=not dist.is_initialized())
        if optimizer is not None:
            load_groups(optimizer, manifest["groups"])
        load_rng_state = getattr(model, "load_rng_state", None)
        if manifest["rng"] and load_rng_state is not None:
            load_rng_state(manifest["rng"])

    meet()
    groups = [] if optimizer is None else groups_of(model, optimizer)
    if of_stages(model):
        found = [{"groups": g, "numbers": {}, "tensors": {}} for g in gather(groups)]
        groups = merged(found, [n for n, _ in all_of(model).named_parameters()])["groups"]
    together(background.settle, place)
    manifest, data = together(check, place)
    together(read, place)
    note(place.id, manifest["step"])
    return {"step": manifest["step"], "extra": manifest["extra"]}


# ---- is it ours, and whole? --------------------------------------------------------------------------------------


def some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def _compare(saved: dict[str, Any], tensors: dict[str, torch.Tensor], place: Place) -> None:
    mine = {n: kind_of(t) for n, t in tensors.items()}
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


def _compare_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], manifest: dict[str, Any], place: Place) -> None:
    same = "build the optimizer as the saving program did, or load the model alone"
    if manifest["optimizer"] is None:
        raise CheckpointError("the checkpoint holds no optimizer", where=str(place), fix="load the model alone")
    if manifest["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {manifest['optimizer']}, not of {type(optimizer).__name__}", where=str(place), fix=same
        )
    saved, mine = ([g["params"] for g in found] for found in (manifest["groups"], groups))
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
            assert all(DATA.fullmatch(e["data"]) and "step" in e for e in manifest.get("earlier", []))
    except (ValueError, KeyError, AssertionError, TypeError, AttributeError, IndexError) as e:
        raise CheckpointError("the checkpoint's manifest cannot be read", where=file, fix=EARLIER) from e
    if found not in (FLAT, FORMAT):
        raise CheckpointError(f"the checkpoint has format {found}, this autopar reads {FLAT} and {FORMAT}", where=file)
    return manifest


def _earlier(place: Place, last: dict[str, Any], step: int) -> dict[str, Any]:
    """The manifest of the last checkpoint of that step."""
    for e in last.get("earlier", []):
        if e["step"] == step:
            return _read_manifest(place.inside(e["data"]))
    there = ", ".join(str(e["step"]) for e in (last, *last.get("earlier", [])))
    raise CheckpointError(
        f"there is no checkpoint of step {step}; there are those of {there}", where=str(place), fix="pass one of these as step="
    )


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
    for name in [INDEX, *my_part(sorted(set(manifest["files"]) - {INDEX}))]:
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
