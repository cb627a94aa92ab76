"""A step of a pipeline, work by work: when each ends, and who waits.

A work starts when its rank and its input are there:

    start = max( end of the rank's last work + a,  end of the work it follows on the micro-batch's path + hop )

hop is 0 where the input does not cross ranks. Beside compute (`exposed` off), a = 0: a transfer is delay and takes nobody's time, and links are never the
bottleneck (a hop has all the time of a chunk). Exposed, a rank that has finished a work sends its result and receives its next input in one
exchange, and computes only when both are through: a = max(hop it sends over, hop it receives over), and a receiver that comes late pays the
whole hop. These are Megatron-LM's batched calls (send_forward_recv_backward and its mirror image), except that a sender does not wait for its receiver.

Works end in an order that respects both lists, so one pass over them is exact; no clock is advanced. It is a longest path: no time that grows makes
any work end earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import LayoutError
from autopar.pipeline.held import peak_by_chunk
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.times import Times, check


@dataclass(frozen=True)
class Replay:
    """total_s: from the start of the first exchange or forward to the end of the last backward.

    By rank, adding up to total_s: busy_s: compute; p2p_s: exchanges that hold it up; idle_s: waiting, the bubble.
    By rank and chunk: first_forward_s: when the first forward ends, until which its parameters have to be there; last_backward_s: when the last backward ends, from which on its gradients can be reduced; in_flight: the most micro-batches
    that are between forward and backward.
    """

    total_s: float
    busy_s: tuple[float, ...]
    p2p_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    first_forward_s: tuple[tuple[float, ...], ...]
    last_backward_s: tuple[tuple[float, ...], ...]
    in_flight: tuple[tuple[int, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle seconds of all ranks over their busy seconds, as SC21 counts the bubble."""
        return sum(self.idle_s) / sum(self.busy_s)


def replay(schedule: Schedule, times: Times) -> Replay:
    """Raises LayoutError when the times have another shape than the schedule, or when ranks would wait for each other forever."""
    check(schedule, times)
    p, m, s = schedule.ranks, schedule.micro_batches, schedule.stages
    orders = [schedule.order(r) for r in range(p)]
    gaps = [_gaps(order // m, times) for order in orders]
    end_s = _ends(m, [o.tolist() for o in orders], [g.tolist() for g in gaps], times)
    done_s = np.asarray(end_s[m:]).reshape(2 * s, m)

    # The last work's result is sent, too; whoever waits for it ends later, so the last work of all is the end.
    sent_s = [(*times.lags_s[1:], 0.0)[orders[r][-1] // m] if times.exposed else 0.0 for r in range(p)]
    total_s = max(end_s)
    busy_s = tuple(m * times.rank_s(r) for r in range(p))
    p2p_s = tuple(float(gaps[r].sum()) + sent_s[r] for r in range(p))
    return Replay(
        total_s=float(total_s),
        busy_s=busy_s,
        p2p_s=p2p_s,
        idle_s=tuple(float(total_s) - b - x for b, x in zip(busy_s, p2p_s, strict=True)),
        first_forward_s=tuple(tuple(float(done_s[c * p + r].min()) for c in range(schedule.chunks)) for r in range(p)),
        last_backward_s=tuple(tuple(float(done_s[2 * s - 1 - c * p - r].max()) for c in range(schedule.chunks)) for r in range(p)),
        in_flight=tuple(peak_by_chunk(schedule, r) for r in range(p)),
    )


def _gaps(rows: NDArray[np.int64], times: Times) -> NDArray[np.float64]:
    """a, before each of a rank's works."""
    if not times.exposed:
        return np.zeros(len(rows))
    received = np.asarray(times.lags_s)
    sent = np.append(received[1:], 0.0)
    gaps = received[rows]
    gaps[1:] = np.maximum(gaps[1:], sent[rows[:-1]])
    return gaps


def _ends(m: int, orders: list[list[int]], gaps: list[list[float]], times: Times) -> list[float]:
    """When each work ends, at m + work; in front are the m inputs, there from the start.

    A rank goes on until its next input is missing, and is taken up again when that is made: every work is looked at once or twice.
    """
    rows_s, lags_s = times.rows_s, times.lags_s
    end_s = [0.0] * m + [-1.0] * (len(rows_s) * m)
    waiting = [-1] * len(end_s)  # the rank that waits for a work
    at, clock_s = [0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order, gap, t = orders[rank], gaps[rank], clock_s[rank]
        for k in range(at[rank], len(order)):
            work = order[k]
            came = end_s[work]  # of the row before: work + m - m
            if came < 0.0:
                waiting[work] = rank
                at[rank] = k
                break
            row = work // m
            t += gap[k]
            came += lags_s[row]
            t = (t if t > came else came) + rows_s[row]
            work += m
            end_s[work] = t
            if waiting[work] >= 0:
                ready.append(waiting[work])
        else:
            at[rank] = len(order)
        clock_s[rank] = t
    stuck = [r for r, order in enumerate(orders) if at[r] < len(order)]
    if stuck:
        r = stuck[0]
        row, micro_batch = divmod(orders[r][at[r]], m)
        raise LayoutError(
            f"The pipeline's ranks {stuck} wait for each other forever.",
            where=f"rank {r}, work {at[r]}: row {row} of {len(rows_s)} of micro-batch {micro_batch} has no input",
            fix="Give every rank an order in which what it waits for does not wait for it: the known schedules have one.",
        )
    return end_s
