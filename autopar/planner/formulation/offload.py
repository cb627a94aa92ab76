"""Kept away from the device, in host memory or on local disks: which values may be, what moving them takes, and what bounds it.

A tensor is sent as soon as forward has made it, and its memory is free at the end of the next stretch (`windows`). It is brought back from the
start of the stretch before the one that first reads it in backward. So it shall cost no time:

    d2h of what is made in stretch j  <=  compute of stretch j + 1          in forward, and the same for writes to disk
    h2d of what is read in stretch j  <=  compute of stretch j - 1          in backward, and the same for reads from disk

with 0 where there is no such stretch: what the last layer keeps has nowhere to hide. What goes to disk crosses the host's link too. All of it
together fits the host's memory, or the disk. (SSDTrain, Wu et al. 2024, section 3; Yuan et al., USENIX ATC '24, section 3.2: the share of
activations that is offloaded is what the link carries beside compute.)

Repeated layers. A copy's stretch and the next one's stand for all of them: one row for each copy that the graph has. Of policies that are means over the
layers only the sum of these rows over the stack holds (`Problem.relaxed_limits`).
"""

from __future__ import annotations

from collections import defaultdict

from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.planner.formulation.where_kept import LINKS
from autopar.solver.problem import DEVICE, HOST, NVME, Key, Limit, Problem


def limits(life: Lifetimes, problem: Problem) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    """What bounds the policies of `problem` that are not on the device; and as much of it as holds for policies that are means over layers."""
    f = life.f
    if not f.training.media:
        return (), ()
    sent: dict[tuple[str, int], dict[Key, float]] = defaultdict(lambda: defaultdict(float))  # resource, stretch -> seconds
    held: dict[str, dict[Key, float]] = {HOST: defaultdict(float), NVME: defaultdict(float)}
    for v, value in enumerate(problem.values):
        for k, policy in enumerate(value.policies):
            if policy.medium != DEVICE:
                size = life.sizes(v)[policy.node]
                for tensor in f.program.q.members[value.name]:
                    held[policy.medium]["y", v, k] += f.program.q.tensor_times[tensor] * size
                    for resource, d in LINKS[policy.medium]:
                        at = life.first_need(tensor) if d else life.made(tensor)
                        sent[resource, life.windows.at(at)]["y", v, k] += f.cost.transfer_s(resource, size)
    most = {HOST: f.training.host_bytes, NVME: f.training.nvme_bytes}
    whole = tuple(Limit(f"{medium} memory", most[medium], tuple(sorted(terms.items()))) for medium, terms in held.items() if terms)
    busy = _busy(life)
    starts, turn = life.windows.starts, life.turn
    tight: list[Limit] = []
    summed: dict[tuple[str, int], dict[Key, float]] = defaultdict(lambda: defaultdict(float))
    relaxed: list[Limit] = []
    for (resource, j), seconds in sorted(sent.items()):
        forward = starts[j] < turn
        beside = j + 1 if forward else j - 1
        exists = 0 <= beside < len(starts) and (starts[beside] < turn) == forward
        terms = dict(seconds)
        for key, t in busy[beside].items() if exists else ():
            terms[key] = terms.get(key, 0.0) - t
        where = f.program.graph.ops[starts[j]].name
        row = Limit(f"{resource} beside compute, {'forward' if forward else 'backward'} at {where}", 0.0, tuple(sorted(terms.items())))
        tight.append(row)
        home = life.stack_of(starts[j])
        if home is None:
            relaxed.append(row)
        else:
            for key, t in terms.items():
                summed[resource, home][key] += f.program.q.times[where] * t
    relaxed += [Limit(f"{r} beside compute", 0.0, tuple(sorted(terms.items()))) for (r, _), terms in sorted(summed.items())]
    return (*whole, *tight), (*whole, *relaxed)


def _busy(life: Lifetimes) -> list[dict[Key, float]]:
    """Seconds of compute per stretch, of one copy of each layer."""
    f = life.f
    out: list[dict[Key, float]] = [defaultdict(float) for _ in life.windows.starts]
    for op in f.program.q.classes.ops:
        if f.is_chained(op):
            continue
        c, stage = f.clusters.of[op.name], int(op.direction == "backward")
        compute = account(stage, "compute")
        copies = f.program.copies[op.name]
        n = sum(f.program.q.times[copy.name] for copy in copies)
        for s, times in enumerate(f.times.of(op, stage)):
            if seconds := times.get(compute, 0.0):
                for copy in copies:
                    out[life.windows.at(life.position[copy.name])]["x", c, s] += seconds / n
    return out


def in_flight(life: Lifetimes, tensor: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last position at which a tensor kept away still is on the device behind its last use in forward, and is again before and
    while backward reads it."""
    made = life.made(tensor)
    last = max(life.users(tensor, "forward"), default=made)
    gone = max(last, min(life.windows.awaited(made), life.turn - 1))
    first = life.windows.issued(life.first_need(tensor))
    return (last + 1, gone), (first, life.last_need(tensor))
