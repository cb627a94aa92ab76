"""Collectives by kind, size and group, issued and awaited as a compiled step does it; and what they take from compute beside them.

Groups lie as a mesh's axes do: ranks in order, all groups of a size at once, as they run in training. Sizes rise from 1 kB to 256 MB of the whole tensor,
as long as there is time; amounts are the bytes that a rank sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import collectives
from autopar.hardware.calibrate.timing import Clock, Sample

SIZES = tuple(1024 << (2 * i) for i in range(10))  # to 256 MiB
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
BESIDE_BYTES, REPEATS = 1 << 24, 5


def groups(ranks: int) -> dist.ProcessGroup:
    """This rank's group of `ranks` neighbours (collective)."""
    world = dist.get_world_size()
    if ranks == world:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    mine: dist.ProcessGroup | None = None
    for first in range(0, world - world % ranks, ranks):
        made = dist.new_group(list(range(first, first + ranks)))
        if first <= dist.get_rank() < first + ranks:
            mine = made
    assert mine is not None, "worlds are multiples of their groups"
    return mine


def sent(kind: str, ranks: int, nbytes: float) -> float:
    """What a rank sends of a tensor of `nbytes` (`redistribution.Step.wire_bytes`)."""
    return nbytes if kind == "send" else nbytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def samples(clock: Clock, sizes: Sequence[int], seconds: float, local: int, on_progress: Callable[[str], None]) -> Iterator[Sample]:
    """local: processes of a node. seconds: for all of it."""
    world = dist.get_world_size()
    if world == 1:
        return
    every = sorted({n for n in (2, local, world) if n > 1 and world % n == 0 and (n <= local or n == world)})
    made = {n: groups(n) for n in every}
    end = time.monotonic() + seconds
    cases = [(kind, n) for n in every for kind in KINDS if kind != "send" or n == 2]
    for i, (kind, n) in enumerate(cases):
        on_progress(f"{kind} among {n}")
        until = time.monotonic() + max(0.0, end - time.monotonic()) / (len(cases) - i)
        for nbytes in sizes:
            # All must agree on whether there is time; once more of four times as much takes four times as long.
            began = time.monotonic()
            for s in timed(clock, kind, made[n], nbytes):
                yield Sample(kind, sent(kind, n, nbytes), s, ranks=n, nodes=-(-n // local))
            took = time.monotonic() - began
            if nbytes != sizes[-1] and clock.agreed(time.monotonic() + 2 * took - until) > 0:
                break


def timed(clock: Clock, kind: str, group: dist.ProcessGroup, nbytes: int) -> list[float]:
    """Mean seconds, of all ranks together, in every window."""
    found = averaged(clock, clock.rounds(collective(clock, kind, group, nbytes)))
    return [s / 2 for s in found] if kind == "send" else found


def averaged(clock: Clock, found: list[float]) -> list[float]:
    """Means over all processes."""
    mean = torch.tensor(found, dtype=torch.float64, device=clock.device)
    dist.all_reduce(mean)
    return [float(x) / dist.get_world_size() for x in mean]


def collective(clock: Clock, kind: str, group: dist.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    """One collective on a tensor of `nbytes` in float32."""
    n, name, device = group.size(), group.group_name, clock.device
    whole = max(nbytes // 4 // n, 1) * n
    x = torch.ones(whole // n if kind == "all_gather" else whole, device=device)

    def call() -> Any:
        if kind == "all_gather":
            out = collectives.all_gather_into_tensor(x, n, name)
        elif kind == "reduce_scatter":
            out = collectives.reduce_scatter_tensor(x, "sum", n, name)
        elif kind == "all_reduce":
            out = collectives.all_reduce(x, "sum", name)
        else:
            parts = [whole // n] * n
            out = collectives.all_to_all_single(x, parts, parts, name)
        return collectives.wait_tensor(out)

    if kind != "send":
        return call
    ranks = dist.get_process_group_ranks(group)
    here = dist.get_rank()
    y = torch.empty_like(x)

    def send() -> None:
        if here == ranks[0]:
            dist.send(x, ranks[1], group=group)
        elif here == ranks[1]:
            dist.recv(y, ranks[0], group=group)

    def there_and_back() -> None:
        """Both ways in turn: two of them."""
        send()
        if here == ranks[0]:
            dist.recv(y, ranks[1], group=group)
        elif here == ranks[1]:
            dist.send(x, ranks[0], group=group)

    return there_and_back


def contention(clock: Clock) -> tuple[float, ...]:
    """What compute loses while an all-reduce of everybody runs beside it, as a share of the all-reduce's own time; measured again and again."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD
    alone = collective(clock, "all_reduce", group, BESIDE_BYTES)
    sending_s = clock.agreed(min(clock.rounds(alone, 5)))
    a = torch.ones(512, 512, device=clock.device)
    product_s = clock.agreed(min(clock.windows(lambda: torch.mm(a, a))))
    n = max(1, round(2 * sending_s / product_s))
    x = torch.ones(BESIDE_BYTES // 4, device=clock.device)

    def work() -> None:
        for _ in range(n):
            torch.mm(a, a)

    def both() -> None:
        issued = collectives.all_reduce(x, "sum", group.group_name)
        work()
        collectives.wait_tensor(issued)

    found = []
    for _ in range(REPEATS):
        working_s, both_s, sending_s = (clock.agreed(min(clock.rounds(call, 3))) for call in (work, both, alone))
        found.append((both_s - working_s) / sending_s)
    return tuple(found)
