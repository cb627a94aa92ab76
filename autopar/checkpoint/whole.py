"""Whole tensors on one rank, in and out, where the others have none.

    load_state_dict(model, state, from_rank=0)         state_dict(model, to_rank=0) -> {name: tensor}, {} elsewhere

In: a tensor is broadcast some rows at a time, and every rank keeps those of its shard. Out: tensors are gathered one at a time. So a rank beside the one that has
or wants the whole holds its shards and a piece, or one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.checkpoint.contents import of_stages
from autopar.checkpoint.dcp import some
from autopar.checkpoint.ranks import meet, rank, together
from autopar.distributed.failures import during
from autopar.errors import CheckpointError
from autopar.tensors.owned import local_box

PIECE_BYTES = 1 << 26  # of a broadcast; a row that is larger is one piece


def load_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor] | None, from_rank: int = 0) -> None:
    """Fills `model` in place with the whole tensors that rank `from_rank` passes, in the model's dtypes. Collective; the other ranks pass None or {}.

    Names are those of `model.state_dict()`; of a tied tensor one name is enough.

    Raises CheckpointError on all ranks, before any tensor is touched, where names or shapes do not match.
    """
    _check_rank("from_rank", from_rank)
    _refuse_stages(model)
    tensors = _by_first_name(model)

    def source() -> dict[str, torch.Tensor]:
        if rank() == from_rank:
            return _matched(tensors, state or {})
        if state:
            raise CheckpointError(
                f"rank {rank()} passes tensors, too",
                fix=f"pass None on all ranks but {from_rank}; where all have them, model.load_state_dict takes them",
            )
        return {}

    with during("loading a state dict"), torch.no_grad():
        if dist.is_initialized():
            meet()
        given = together(source)
        for name, (_, t) in tensors.items():
            for piece, start in _pieces(given.get(name), t, from_rank):
                _keep(t, piece, start)


def state_dict(model: nn.Module, to_rank: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors of `model` in host memory on rank `to_rank`, {} on the others. Collective. Tied tensors have all their names, and stay one."""
    _check_rank("to_rank", to_rank)
    _refuse_stages(model)
    out: dict[str, torch.Tensor] = {}
    with during("gathering a state dict"), torch.no_grad():
        for names, t in _by_first_name(model).values():
            whole = t.full_tensor().detach() if isinstance(t, DTensor) else t.detach()
            if rank() == to_rank:
                out |= dict.fromkeys(names, whole.cpu() if isinstance(t, DTensor) else whole.cpu().clone())
    return {n: out[n] for n in model.state_dict(keep_vars=True) if n in out}


def _refuse_stages(model: nn.Module) -> None:
    if of_stages(model):
        raise CheckpointError(
            "this model lies on the stages of a pipeline, and no rank has all names of it",
            fix="save it with autopar.checkpoint.save and load that where it is whole; before its first call, weights can be loaded as a whole",
        )


def _check_rank(what: str, which: int) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not 0 <= which < ranks:
        raise CheckpointError(f"{what}={which}: there are ranks 0 to {ranks - 1}", fix="pass one of these, the same on all ranks")


def _by_first_name(model: nn.Module) -> dict[str, tuple[list[str], torch.Tensor]]:
    """First name -> all names, and the tensor."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor):
            found.setdefault(id(t), ([], t))[0].append(name)
    return {names[0]: (names, t) for names, t in found.values()}


def _matched(tensors: Mapping[str, tuple[list[str], torch.Tensor]], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our first name -> the tensor that is given for it."""
    known = {n for names, _ in tensors.values() for n in names}
    given = {first: state[n] for first, (names, _) in tensors.items() for n in reversed(names) if n in state}
    problems = {
        "missing": [n for n in tensors if n not in given],
        "unknown to the model": [n for n in state if n not in known],
        "of another shape": [
            f"{n} ({list(t.shape)} given, {list(tensors[n][1].shape)} here)" for n, t in given.items() if t.shape != tensors[n][1].shape
        ],
    }
    said = "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names)
    if said:
        raise CheckpointError(f"the state dict is of another model; {said}", fix="pass the state_dict() of the same model")
    return given


def _pieces(whole: torch.Tensor | None, t: torch.Tensor, from_rank: int) -> Iterator[tuple[torch.Tensor, int]]:
    """`whole`, which `from_rank` has, some rows at a time on every rank, and the number of the first. In t's dtype, on its device."""
    device = _torch.local_tensor(t).device if isinstance(t, DTensor) else t.device
    rows = t.shape[0] if t.dim() else 1
    row_bytes = max(t.numel() * t.element_size() // max(rows, 1), 1)
    n = max(PIECE_BYTES // row_bytes, 1)
    for start in range(0, rows, n):
        shape = (min(n, rows - start), *t.shape[1:]) if t.dim() else ()
        piece = torch.empty(shape, dtype=t.dtype, device=device)
        if whole is not None:
            piece.copy_(whole[start : start + n] if t.dim() else whole)
        if dist.is_initialized():
            dist.broadcast(piece, src=from_rank)
        yield piece, start


def _keep(t: torch.Tensor, piece: torch.Tensor, start: int) -> None:
    """What of the rows from `start` on is this rank's."""
    if not isinstance(t, DTensor):
        (t[start : start + len(piece)] if t.dim() else t).copy_(piece)
        return
    local, box = _torch.local_tensor(t), local_box(t.shape, t.device_mesh, t.placements)
    if not box:
        local.copy_(piece)
        return
    (first, n, _), *others = box
    begin, end = max(first, start), min(first + n, start + len(piece))
    if begin < end and local.numel():
        local[begin - first : end - first].copy_(piece[(slice(begin - start, end - start), *(slice(a, a + m) for a, m, _ in others))])
