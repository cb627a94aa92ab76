"""Survivors on a new group agree on a version and move it to where their layout has it, from owner to owner, each piece straight from one that has it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autopar.distributed.last_checkpoint import last_checkpoint
from autopar.elastic.boxes import Moves, Sizes, Spec, elements, laid_out, missing, offsets, within
from autopar.elastic.copies import Copies, Holdings
from autopar.elastic.member import Member, StoppedError
from autopar.elastic.protocol import Shard, sources, version_to_go_on_from
from autopar.elastic.state import Alike, Packed, State
from autopar.runtime.module import ParallelModule

LIVE = -1  # the generation of what all ranks have whole
Random = tuple[torch.Tensor, bool]  # torch's own random state, and whether it is that where the step began: else the loader may yet draw


@dataclass(frozen=True)
class Moved:
    """bytes: that ranks sent each other; least_bytes: what they could not do without: of each rank's new shard, what it has neither as an owner nor as a partner."""

    bytes: int
    least_bytes: int = 0


class Recovering(Protocol):
    """What is asked of a session."""

    model: ParallelModule
    optimizer: Optimizer
    state: State
    member: Member | None
    holdings: Holdings
    copies: Copies | None
    alike: dict[int, Alike]
    given: Random | None
    version: int
    is_live: bool

    def random_at(self, version: int) -> Random: ...


def recover(session: Recovering, was_split: bool) -> Moved:
    """Model, optimizer and session go back to, or stay at, the version that all go on from. was_split: whether a rank had parts that others did not have. Collective.

    Raises StoppedError, on all ranks, where no version is left whole."""
    copies = session.copies
    assert copies is not None
    is_split = session.state.is_split()
    mine = {shard: packed for shard, packed in session.holdings.all().items() if packed.whole}
    own = {shard for shard in session.holdings.own if shard in mine}
    if not was_split and session.is_live:
        live = Shard(session.version, LIVE, 1, 0)
        mine[live] = session.state.pack_whole()
        own.add(live)
        if is_split:  # of what one rank alone had, each gets a part: it is kept until the copies of those are whole
            session.holdings.own[live] = mine[live]
    told = copies.gathered((sorted(mine), sorted(own)))
    held = [shards for shards, _ in told]
    chosen = version_to_go_on_from(held)
    if chosen is None:
        raise StoppedError(_lost(held), where=f"rank {copies.rank} of {copies.ranks}", fix=f"start again, from {last_checkpoint()}")
    version, _, ranks = chosen
    owns = [next((s for s in owned if (s.version, s.generation, s.ranks) == chosen), None) for _, owned in told]
    given = {s.rank: p for s, p in mine.items() if (s.version, s.generation, s.ranks) == chosen}
    specs, olds = _laid(copies, next(((p.specs, p.sizes) for p in given.values()), None))
    assert math.prod(olds) == ranks
    builder = session.model._builder
    sizes = session.state.sizes
    places = {n: builder.lies(n, tuple(p.shape)) for n, p in session.state.parameters()}
    after = laid_out(specs, session.state.lies(specs, places))
    _, length = offsets(after, copies.rank, sizes)
    new = Packed(after, copies.rank, sizes, torch.empty(length, dtype=torch.uint8))
    held_boxes = {s.name: [s.box(r, olds) for r in given] for s in specs}
    least = sum(missing(s.box(copies.rank, sizes), held_boxes[s.name]) * s.element_bytes for s in after)
    moved = _exchange(copies, least, Moves(specs, olds, after, sizes, sources(chosen, held, owns)), given, new)
    alike, random = _alike(copies, None if version not in session.alike else (session.alike[version], session.random_at(version)))
    # Nothing below waits for others: a loss finds the tensors as they were, or all as they are to be.
    counts = session.state.put(new, places)
    alike = replace(alike, counts={**alike.counts, **counts})
    session.state.put_alike(alike)
    session.alike[version], session.version, session.is_live = alike, version, True
    session.given = random
    return moved


def _exchange(copies: Copies, least: int, moves: Moves, given: dict[int, Packed], new: Packed) -> Moved:
    """Fills `new`. least: bytes that this rank has to get; given: by rank of the old layout, what this rank has. One message for each pair of ranks that has anything to move."""
    views = {r: p.views() for r, p in given.items()}
    mine, me = new.views(), copies.rank
    sending: dict[int, list[torch.Tensor]] = {}
    coming: dict[int, list[tuple[torch.Tensor, int]]] = {}
    for m in moves.to(me):
        there = mine[m.spec.name][within(m.piece, m.new_box)]
        if m.by == me:
            there.copy_(views[m.old][m.spec.name][within(m.piece, m.old_box)])
        else:
            coming.setdefault(m.by, []).append((there, elements(m.piece) * m.spec.element_bytes))
    for to in range(copies.ranks):
        for m in moves.to(to, only=me) if to != me else ():
            piece = views[m.old][m.spec.name][within(m.piece, m.old_box)].contiguous()
            sending.setdefault(to, []).append(piece.reshape(-1).view(torch.uint8))
    told = copies.gathered((sum(n for pieces in coming.values() for _, n in pieces), least))
    works: list[Any] = []
    out = {to: torch.cat(pieces) for to, pieces in sending.items()}
    into = {by: torch.empty(sum(n for _, n in pieces), dtype=torch.uint8) for by, pieces in coming.items()}
    works += [dist.irecv(buffer, group=copies.group, group_src=by) for by, buffer in into.items()]
    works += [dist.isend(buffer, group=copies.group, group_dst=to) for to, buffer in out.items()]
    for w in works:
        w.wait()
    for by, pieces in coming.items():
        at = 0
        for there, length in pieces:
            there.copy_(into[by][at : at + length].clone().view(there.dtype).view(there.shape))
            at += length
    return Moved(sum(got for got, _ in told), sum(needed for _, needed in told))


def _laid(copies: Copies, mine: tuple[tuple[Spec, ...], Sizes] | None) -> tuple[tuple[Spec, ...], Sizes]:
    """How the version that is taken lies, on a mesh of which sizes: a rank that does not have it is told."""
    laid: tuple[tuple[Spec, ...], Sizes] = next(laid for laid in copies.gathered(mine) if laid is not None)
    return laid


def _alike(copies: Copies, mine: tuple[Alike, Random] | None) -> tuple[Alike, Random]:
    """What all have alike of the version that is taken, and torch's random state there; the first that has it gives it to those that do not."""
    have = copies.gathered(mine is not None)
    if all(have):
        assert mine is not None
        return mine
    said: list[Any] = [mine]
    dist.broadcast_object_list(said, group=copies.group, group_src=have.index(True))
    found: tuple[Alike, Random] = said[0] if mine is None else mine
    return found


def _lost(held: list[list[Shard]]) -> str:
    """What is missing of the newest version of which there is something."""
    there = [s for theirs in held for s in theirs]
    if not there:
        return "every process that is left was in the midst of a step of the optimizer, and no version of the state is whole"
    newest = max((s.version, s.generation, s.ranks) for s in there)
    missing = sorted(set(range(newest[2])) - {s.rank for s in there if (s.version, s.generation, s.ranks) == newest})
    return (
        f"more was lost than can be survived at once: of version {newest[0]} nobody has the shard{'s' if len(missing) > 1 else ''} of rank "
        f"{', '.join(map(str, missing))} of {newest[2]}, neither its owner nor the partner that had a copy"
    )
