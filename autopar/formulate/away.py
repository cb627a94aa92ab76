"""Kept away from the device, in host memory or on local disks: which values may be, what moving them takes, and what bounds it.

A tensor is sent as soon as forward has made it, and its memory is free at the end of the next stretch (`stretches`). It is brought back from the
start of the stretch before the one that first reads it in backward. So it shall cost no time:

    d2h of what is made in stretch j  <=  compute of stretch j + 1          in forward, and the same for writes to disk
    h2d of what is read in stretch j  <=  compute of stretch j - 1          in backward, and the same for reads from disk

with 0 where there is no such stretch: what the last layer keeps has nowhere to hide. What goes to disk crosses the host's link too. All of it
together fits the host's memory, or the disk. (SSDTrain, Wu et al. 2024, section 3; Yuan et al., USENIX ATC '24, section 3.2: the share of
activations that is offloaded is what the link carries beside compute.)

Repeated layers. A copy's stretch and the next one's stand for all of them: one row for each copy that the graph has. Of fates that are means over the
layers only the sum of these rows over the stack holds (`Problem.loose_limits`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from autopar.solver.problem import DEVICE, HOST, NVME, Fate, Key, Limit, Problem

if TYPE_CHECKING:
    from autopar.formulate.memory import Rows
    from autopar.formulate.problem import Formulator

# Per medium, the links that its data crosses: (resource, direction).
LINKS = {HOST: (("d2h", 0), ("h2d", 1)), NVME: (("d2h", 0), ("nvme_write", 0), ("nvme_read", 1), ("h2d", 1))}


def fates(f: Formulator, nbytes: dict[int, float], count: int) -> tuple[Fate, ...]:
    """How a value may be kept. nbytes: of one tensor, per node at which it may be; count: how many tensors it is."""
    found = [Fate(n) for n in nbytes]
    for medium in f.setting.media:
        for n, size in nbytes.items():
            if size >= f.setting.least_bytes:
                times = {f.account(d, resource): count * f.cost.transfer_s(resource, size) for resource, d in LINKS[medium]}
                found.append(Fate(n, medium, times))
    return tuple(found)


def limits(rows: Rows, problem: Problem) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    """What bounds the fates of `problem` that are not on the device; and as much of it as holds for fates that are means over layers."""
    f = rows.f
    if not f.setting.media:
        return (), ()
    sent: dict[tuple[str, int], dict[Key, float]] = defaultdict(lambda: defaultdict(float))  # resource, stretch -> seconds
    held: dict[str, dict[Key, float]] = {HOST: defaultdict(float), NVME: defaultdict(float)}
    for v, value in enumerate(problem.values):
        for k, fate in enumerate(value.fates):
            if fate.medium != DEVICE:
                size = rows.sizes(v)[fate.node]
                for tensor in f.q.members[value.name]:
                    held[fate.medium]["y", v, k] += f.q.tensor_times[tensor] * size
                    for resource, d in LINKS[fate.medium]:
                        at = rows.first_need(tensor) if d else rows.made(tensor)
                        sent[resource, rows.stretches.at(at)]["y", v, k] += f.cost.transfer_s(resource, size)
    most = {HOST: f.setting.host_bytes, NVME: f.setting.nvme_bytes}
    whole = tuple(Limit(f"{medium} memory", most[medium], tuple(sorted(terms.items()))) for medium, terms in held.items() if terms)
    busy = _busy(rows)
    starts, turn = rows.stretches.starts, rows.turn
    tight: list[Limit] = []
    summed: dict[tuple[str, int], dict[Key, float]] = defaultdict(lambda: defaultdict(float))
    loose: list[Limit] = []
    for (resource, j), seconds in sorted(sent.items()):
        forward = starts[j] < turn
        beside = j + 1 if forward else j - 1
        exists = 0 <= beside < len(starts) and (starts[beside] < turn) == forward
        terms = dict(seconds)
        for key, t in busy[beside].items() if exists else ():
            terms[key] = terms.get(key, 0.0) - t
        where = f.graph.ops[starts[j]].name
        row = Limit(f"{resource} beside compute, {'forward' if forward else 'backward'} at {where}", 0.0, tuple(sorted(terms.items())))
        tight.append(row)
        home = rows.stack_of(starts[j])
        if home is None:
            loose.append(row)
        else:
            for key, t in terms.items():
                summed[resource, home][key] += f.q.times[where] * t
    loose += [Limit(f"{r} beside compute", 0.0, tuple(sorted(terms.items()))) for (r, _), terms in sorted(summed.items())]
    return (*whole, *tight), (*whole, *loose)


def _busy(rows: Rows) -> list[dict[Key, float]]:
    """Seconds of compute per stretch, of one copy of each layer."""
    f = rows.f
    out: list[dict[Key, float]] = [defaultdict(float) for _ in rows.stretches.starts]
    for op in f.q.classes.ops:
        if f.is_chained(op):
            continue
        c, stage = f.cl.of[op.name], int(op.direction == "backward")
        compute = f.account(stage, "compute")
        copies = f.copies[op.name]
        n = sum(f.q.times[copy.name] for copy in copies)
        for s, times in enumerate(f.time.of(op, stage)):
            if seconds := times.get(compute, 0.0):
                for copy in copies:
                    out[rows.stretches.at(rows.position[copy.name])]["x", c, s] += seconds / n
    return out


def in_flight(rows: Rows, tensor: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last position at which a tensor kept away still is on the device behind its last use in forward, and is again before and
    while backward reads it."""
    made = rows.made(tensor)
    last = max(rows.users(tensor, "forward"), default=made)
    gone = max(last, min(rows.stretches.awaited(made), rows.turn - 1))
    first = rows.stretches.issued(rows.first_need(tensor))
    return (last + 1, gone), (first, rows.last_need(tensor))
