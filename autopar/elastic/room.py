"""Whether a machine's memory has room for the copies that its processes are to keep: where it is full, Linux ends a process without a word."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.distributed.last_checkpoint import last_checkpoint
from autopar.errors import AutoparError
from autopar.hardware.host_memory import free_bytes
from autopar.text.sizes import format_bytes

VERSIONS = 2  # of a shard are kept at once


@dataclass(frozen=True)
class Need:
    """Of a process. machine: its name; more_bytes: of host memory, than it has now; free_bytes: of the machine, or of what its limit leaves."""

    machine: str
    more_bytes: int
    free_bytes: int

    @staticmethod
    def of(shard_bytes: int, ward_bytes: int, held_bytes: int) -> Need:
        """Of a process with such a shard, and its ward's copy, that keeps so much already."""
        return Need(socket.gethostname(), max(0, VERSIONS * (shard_bytes + ward_bytes) - held_bytes), free_bytes())


def refuse_full(needs: Sequence[Need]) -> None:
    """needs: of all processes, the same list on each. Raises AutoparError, on all of them, where a machine has no room for what its processes need together."""
    for machine in dict.fromkeys(n.machine for n in needs):
        mine = [n for n in needs if n.machine == machine]
        more, free = sum(n.more_bytes for n in mine), min(n.free_bytes for n in mine)
        if more > free:
            raise AutoparError(
                f"host memory is full: copies of shards need {format_bytes(more)} more, and {format_bytes(free)} are free",
                where=f"machine {machine}, {len(mine)} processes",
                fix=f"free host memory there, spread the state over more processes, or leave elastic= out; start again, from {last_checkpoint()}",
            )
