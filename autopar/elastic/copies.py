"""A rank's shard, in two versions, beside a partner's: what a rank keeps in host memory, and how copies travel.

Sending begins after the optimizer and ends beside the next forward and backward; nobody waits for it before the commit (`autopar.elastic.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.distributed.last_checkpoint import last_checkpoint
from autopar.elastic.boxes import Sizes, Spec, offsets
from autopar.elastic.protocol import Shard, partner, ward
from autopar.elastic.state import Packed, crc_of
from autopar.errors import AutoparError

T = TypeVar("T")
PIECE_BYTES = 1 << 26  # of a message
HEADER = 3  # version, checksum, bytes


@dataclass
class Holdings:
    """Shards that this process can give after a failure."""

    own: dict[Shard, Packed] = field(default_factory=dict)
    wards: dict[Shard, Packed] = field(default_factory=dict)

    def all(self) -> dict[Shard, Packed]:
        return {**self.wards, **self.own}

    def bytes(self) -> int:
        return sum(p.buffer.numel() for p in (*self.own.values(), *self.wards.values()))


class Copies:
    """Of one generation. group: of all its ranks, for copies alone; None where there is one rank. stride: how far a rank's partner is."""

    def __init__(
        self, group: dist.ProcessGroup | None, generation: int, rank: int, ranks: int, holdings: Holdings, stride: int = 1
    ) -> None:
        self.group, self.generation, self.rank, self.ranks, self.holdings = group, generation, rank, ranks, holdings
        self.to, self.of = partner(rank, ranks, stride), ward(rank, ranks, stride)
        self.works: list[Any] = []
        self.coming: tuple[Shard, Packed, torch.Tensor] | None = None

    def place_for(self, before: int) -> torch.Tensor | None:
        """The buffer of a version older than the last one that was copied, to be written over: that one, `before`, is whole everywhere by now."""
        return self._given_up(self.holdings.own, before)

    def _given_up(self, held: dict[Shard, Packed], before: int) -> torch.Tensor | None:
        old = [s for s in held if s.generation == self.generation and s.version < before]
        buffers = [held.pop(s).buffer for s in old]
        return buffers[-1] if buffers else None

    def begin(self, version: int, packed: Packed, before: int) -> None:
        """Keeps this rank's shard, and puts it on its way. The ward's comes meanwhile, in place of one older than `before`."""
        self.holdings.own[Shard(version, self.generation, self.ranks, self.rank)] = packed
        if self.ranks == 1:
            return
        assert not self.works
        room = self._given_up(self.holdings.wards, before)
        coming = _empty(packed.specs, self.of, packed.sizes, room)
        header = torch.tensor([version, packed.crc, packed.buffer.numel()], dtype=torch.int64)
        told = torch.zeros(HEADER, dtype=torch.int64)
        self.works += [self._receive(told), self._send(header)]
        for piece in coming.buffer.split(PIECE_BYTES):
            self.works.append(self._receive(piece))
        for piece in packed.buffer.split(PIECE_BYTES):
            self.works.append(self._send(piece))
        self.coming = Shard(version, self.generation, self.ranks, self.of), coming, told

    def _send(self, t: torch.Tensor) -> Any:
        return dist.isend(t, group=self.group, group_dst=self.to)

    def _receive(self, t: torch.Tensor) -> Any:
        return dist.irecv(t, group=self.group, group_src=self.of)

    def wait(self) -> None:
        """Returns once this rank's copy is on its way whole, and its ward's is here and checked."""
        works, self.works = self.works, []
        for w in works:
            w.wait()
        if self.coming is None:
            return
        (shard, packed, told), self.coming = self.coming, None
        version, crc, length = told.tolist()
        if (version, length) != (shard.version, packed.buffer.numel()) or crc != crc_of(packed.buffer):
            raise AutoparError(
                f"the copy of version {shard.version} that rank {self.of} sent arrived damaged",
                where=f"rank {self.rank}: {length} bytes of version {version} with checksum {crc:#x}, {crc_of(packed.buffer):#x} here",
                fix=f"look at the memory and the network of these two machines; start again, from {last_checkpoint()}",
            )
        packed.crc = crc
        self.holdings.wards[shard] = packed

    def salvage(self) -> None:
        """After a loss, once no byte comes any more: the ward's copy, if it came whole without anybody having waited for it."""
        if self.coming is not None:
            (shard, packed, told), self.coming, self.works = self.coming, None, []
            if told.tolist() == [shard.version, crc_of(packed.buffer), packed.buffer.numel()]:
                packed.crc = int(told[1])
                self.holdings.wards[shard] = packed

    def gathered(self, mine: T) -> list[T]:
        """Of all ranks, by rank. Collective."""
        out: list[Any] = [mine]
        if self.ranks > 1:
            out = [None] * self.ranks
            dist.all_gather_object(out, mine, group=self.group)
        return out

    def meet(self, asks: bool = False) -> bool:
        """Returns once all ranks are here: whether any of them asks, the same on all."""
        told = torch.full((1,), float(asks))
        if self.ranks > 1:
            dist.all_reduce(told, group=self.group)
        return bool(told.item())


def _empty(specs: tuple[Spec, ...], rank: int, sizes: Sizes, into: torch.Tensor | None) -> Packed:
    _, length = offsets(specs, rank, sizes)
    if into is None or into.numel() != length:
        into = torch.empty(length, dtype=torch.uint8)
    return Packed(specs, rank, sizes, into)
