"""Values between neighbouring stages of a pipeline.

A message is what one stage hands to the next, of one micro-batch: all its values, one after the other. Each directed pair of ranks has a communicator for forward and one for
backward, since what is posted on one of NCCL's holds up what is posted behind it. On each, messages come in the order in which the sender's list makes them, which both ends know;
where the receiver wants a later one first, those before it wait here.

The next message of a channel is asked for as soon as one has come, so it may arrive beside what is computed meanwhile. Sends are not waited for until the end of a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed.groups import Groups
from autopar.passes.stages.cut import Crossing
from autopar.pipeline.actions import FORWARD, WEIGHT, Lists

Key = tuple[str, int, int]  # "F" or "B", the stage that receives it, the micro-batch


@dataclass
class _Channel:
    """From one rank to another. expected: what is still to be asked for; asked: what was, with its buffers."""

    peer: int
    group: Any
    expected: deque[Key] = field(default_factory=deque)
    asked: deque[tuple[Key, list[torch.Tensor], list[Any]]] = field(default_factory=deque)


class Channels:
    """Of this rank, for calls by one schedule. ranks: of the job, by rank of the pipeline. Making them is collective over a pipeline's ranks."""

    def __init__(self, groups: Groups, ranks: Sequence[int], rank: int, lists: Lists) -> None:
        self.ranks, self.rank, self.lists = ranks, rank, lists
        self.incoming: dict[tuple[int, str], _Channel] = {}
        self.outgoing: dict[tuple[int, str], _Channel] = {}
        where = lists.where
        pairs = {(a, b, "F") for a, b in pairwise(where)} | {(b, a, "B") for a, b in pairwise(where)}
        for a, b, kind in sorted(pairs):  # on all ranks in one order, so that nobody waits for another in a circle
            if a != b and rank in (a, b):
                ends = sorted((ranks[a], ranks[b]))
                group = groups.between(ends, f"pipeline.{kind}.{ranks[a]}to{ranks[b]}")
                (self.outgoing if rank == a else self.incoming)[b if rank == a else a, kind] = _Channel(ranks[b if rank == a else a], group)
        self.shapes: Callable[[Key], Sequence[Crossing]] = lambda key: ()
        self.device = torch.device("cpu")
        self.here: dict[Key, list[torch.Tensor]] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []

    def open(
        self, shapes: Callable[[Key], Sequence[Crossing]], device: torch.device, orders: Iterable[Iterable[Any]] | None = None
    ) -> None:
        """Begins a call. shapes: of the values of a message; orders: every rank's actions, by default the schedule's."""
        self.shapes, self.device = shapes, device
        for c in self.incoming.values():
            c.expected.clear()
            c.asked.clear()
        self.here.clear()
        last = self.lists.stages - 1
        for rank, actions in enumerate(self.lists.ranks if orders is None else orders):
            for a in actions:
                kind = "F" if a.kind == FORWARD else "B"
                to = a.stage + (1 if kind == "F" else -1)
                if a.kind != WEIGHT and 0 <= to <= last and rank != self.rank and self.lists.where[to] == self.rank:
                    self.incoming[rank, kind].expected.append((kind, to, a.micro_batch))

    def send(self, key: Key, values: list[torch.Tensor]) -> None:
        """Hands a message to the stage that it is for."""
        to = self.lists.where[key[1]]
        if to == self.rank:
            self.here[key] = values
            return
        channel = self.outgoing[to, key[0]]
        for t in values:
            raw = _raw(t.contiguous())
            self.sent.append((dist.isend(raw, channel.peer, group=channel.group), raw))
        self.sent = [(work, t) for work, t in self.sent if not work.is_completed()]

    def receive(self, key: Key) -> list[torch.Tensor]:
        """The message, once it is there."""
        source = self.lists.where[key[1] + (-1 if key[0] == "F" else 1)]
        if source != self.rank:
            channel = self.incoming[source, key[0]]
            while key not in self.here:
                self._ask(channel)
                found, buffers, works = channel.asked.popleft()
                self._ask(channel)
                for w in works:
                    w.wait()
                self.here[found] = buffers
        return self.here.pop(key)

    def _ask(self, channel: _Channel) -> None:
        """Posts the receives of the next message, if none is."""
        if channel.asked or not channel.expected:
            return
        key = channel.expected.popleft()
        buffers = [torch.empty(c.shape, dtype=c.dtype, device=self.device) for c in self.shapes(key)]
        works = [dist.irecv(_raw(t), channel.peer, group=channel.group) for t in buffers]
        channel.asked.append((key, buffers, works))

    def close(self) -> None:
        """Waits until all that was sent has arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def _raw(t: torch.Tensor) -> torch.Tensor:
    """Its bytes: of whatever dtype, and of no dims."""
    return t.reshape(-1).view(torch.uint8)
