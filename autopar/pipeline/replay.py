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
from autopar.pipeline.actions import FORWARD, WEIGHT, Lists
from autopar.pipeline.held import peak_by_chunk
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.times import Times, check


@dataclass(frozen=True)
class Replay:
    """total_s: from the start of the first exchange or forward to the end of the last backward.

    By rank, adding up to total_s: busy_s: compute; p2p_s: exchanges that hold it up; idle_s: waiting, the bubble.
    By rank and each of its stages: first_forward_s: when the first forward ends, until which its parameters have to be there; last_backward_s: when its last backward ends, from which on its gradients can be reduced; in_flight: the most micro-batches
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

    @property
    def bubble_rate(self) -> float:
        """Idle seconds of all ranks over all their seconds, as the papers on zero bubbles count it."""
        return sum(self.idle_s) / (len(self.idle_s) * self.total_s) if self.total_s else 0.0


def replay(schedule: Schedule | Lists, times: Times) -> Replay:
    """Raises LayoutError when the times have another shape than the schedule, or when ranks would wait for each other forever."""
    check(schedule, times)
    m, s = schedule.micro_batches, schedule.stages
    where = schedule.where if isinstance(schedule, Lists) else tuple(i % schedule.ranks for i in range(s))
    orders = _listed(schedule, times) if isinstance(schedule, Lists) else _by_rows(schedule, times)
    p, lags_s = len(orders), times.lags_between(where)
    gaps = [_gaps(o.rows, lags_s) if times.exposed else np.zeros(len(o.rows)) for o in orders]
    end_s, weights_s = _ends(m, s, orders, gaps, lags_s)
    done_s = np.asarray(end_s[m:]).reshape(2 * s, m)
    last_s = [max(float(done_s[2 * s - 1 - i].max()), weights_s[i]) for i in range(s)]

    # The last work's result is sent, too; whoever waits for it ends later, so the last work of all is the end.
    sent_s = [(*lags_s[1:], 0.0)[o.rows[-1]] if times.exposed and o.rows[-1] >= 0 else 0.0 for o in orders]
    total_s = max(max(end_s), *weights_s)
    mine = [[i for i in range(s) if where[i] == r] for r in range(p)]
    busy_s = tuple(m * sum(times.forward_s[i] + times.backward_s[i] for i in stages) for stages in mine)
    p2p_s = tuple(float(gaps[r].sum()) + sent_s[r] for r in range(p))
    return Replay(
        total_s=float(total_s),
        busy_s=busy_s,
        p2p_s=p2p_s,
        idle_s=tuple(float(total_s) - b - x for b, x in zip(busy_s, p2p_s, strict=True)),
        first_forward_s=tuple(tuple(float(done_s[i].min()) for i in stages) for stages in mine),
        last_backward_s=tuple(tuple(last_s[i] for i in stages) for stages in mine),
        in_flight=tuple(o.in_flight for o in orders),
    )


@dataclass(frozen=True)
class _Order:
    """A rank's works: each as row x m + micro-batch, its row, and what it takes; weight gradients, which nobody waits for, have -1 - stage for both.
    in_flight: the most micro-batches in flight in each of its stages."""

    works: NDArray[np.int64]
    rows: NDArray[np.int64]
    takes_s: NDArray[np.float64]
    in_flight: tuple[int, ...]


def _by_rows(schedule: Schedule, times: Times) -> list[_Order]:
    rows_s, out = np.asarray(times.rows_s), []
    for rank in range(schedule.ranks):
        works = schedule.order(rank)
        rows = works // schedule.micro_batches
        out.append(_Order(works, rows, rows_s[rows], peak_by_chunk(schedule, rank)))
    return out


def _listed(lists: Lists, times: Times) -> list[_Order]:
    m, s, out = lists.micro_batches, lists.stages, []
    for rank, actions in enumerate(lists.ranks):
        rows = [-1 - a.stage if a.kind == WEIGHT else a.stage if a.kind == FORWARD else 2 * s - 1 - a.stage for a in actions]
        works = [row if row < 0 else row * m + a.micro_batch for row, a in zip(rows, actions, strict=True)]
        takes = [times.action_s(a) for a in actions]
        peaks = tuple(Lists((tuple(a for a in actions if a.stage == i),)).in_flight(0) for i in lists.of_rank(rank))
        out.append(_Order(np.asarray(works), np.asarray(rows), np.asarray(takes), peaks))
    return out


def _gaps(rows: NDArray[np.int64], lags_s: tuple[float, ...]) -> NDArray[np.float64]:
    """a, before each of a rank's works."""
    received = np.asarray((*lags_s, 0.0))  # the last for weight gradients
    sent = np.append(received[1:-1], (0.0, 0.0))
    at = np.where(rows < 0, len(lags_s), rows)
    gaps = received[at]
    gaps[1:] = np.maximum(gaps[1:], sent[at[:-1]])
    return gaps


def _ends(
    m: int, stages: int, orders: list[_Order], gaps: list[NDArray[np.float64]], lags_s: tuple[float, ...]
) -> tuple[list[float], list[float]]:
    """When each work ends, at m + work; in front are the m inputs, there from the start. And when each stage's last weight gradients do.

    A rank goes on until its next input is missing, and is taken up again when that is made: every work is looked at once or twice.
    """
    end_s = [0.0] * m + [-1.0] * (2 * stages * m)
    weights_s = [0.0] * stages
    waiting = [-1] * len(end_s)  # the rank that waits for a work
    listed = [(o.works.tolist(), gap.tolist(), o.takes_s.tolist()) for o, gap in zip(orders, gaps, strict=True)]
    at, clock_s = [0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        (works, gap, takes), t = listed[rank], clock_s[rank]
        for k in range(at[rank], len(works)):
            work = works[k]
            if work < 0:
                t += gap[k] + takes[k]
                weights_s[-1 - work] = t
                continue
            came = end_s[work]  # of the row before: work + m - m
            if came < 0.0:
                waiting[work] = rank
                at[rank] = k
                break
            t += gap[k]
            came += lags_s[work // m]
            t = (t if t > came else came) + takes[k]
            work += m
            end_s[work] = t
            if waiting[work] >= 0:
                ready.append(waiting[work])
        else:
            at[rank] = len(works)
        clock_s[rank] = t
    stuck = [r for r, (works, _, _) in enumerate(listed) if at[r] < len(works)]
    if stuck:
        r = stuck[0]
        row, micro_batch = divmod(listed[r][0][at[r]], m)
        raise LayoutError(
            f"The pipeline's ranks {stuck} wait for each other forever.",
            where=f"rank {r}, work {at[r]}: row {row} of {2 * stages} of micro-batch {micro_batch} has no input",
            fix="Give every rank an order in which what it waits for does not wait for it: the known schedules have one.",
        )
    return end_s, weights_s
