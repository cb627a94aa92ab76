"""What can be said of a pipeline without replaying it: in time that does not grow with the micro-batches.

With f, b the forward and backward of one chunk on even stages, and hops that take nothing, every schedule here takes

    T = m v (f + b) + (p - 1) (f + b)                    bubble / work = (p - 1) / (v m)

(Narayanan et al., SC21, sections 2.2.1 and 2.2.2; Huang et al., "GPipe", 2019, for v = 1).

**A lower bound for any stages.** Take one rank; let others have no queues, so that what it needs comes as early as the path of one micro-batch allows.
Let W be its compute of the whole step, `head` the path of a micro-batch to its first forward and `tail` from its last backward to the end. Its order
has n forwards before its first backward, which needs micro-batch 0 to have been through the whole model, and (by symmetry) n backwards after
its last forward, which the last micro-batch must still follow to the end. So

    T >= head + W + tail + max(0, gain_1) + max(0, gain_2)

    gain_1 = path to its first backward - head - its first n forwards           it waits so long before its first backward, at least
    gain_2 = path from the end of its last forward - tail - its last n backwards

and where it has no forward after its first backward, only the larger gain counts: both are of the same wait. The bound is the maximum over ranks,
and the path of one micro-batch. In gpipe, forwards are a flow shop of equal jobs and backwards another, so

    T = sum of f + (m - 1) max f + sum of b + (m - 1) max b + hops.

Hops are on the paths. Exposed, each also holds up the rank that receives, so it counts as compute of that rank (`replay.py`: a >= hop received).
"""

from __future__ import annotations

from itertools import accumulate

from autopar.pipeline.schedule import Schedule
from autopar.pipeline.times import Times, check


def bubble_fraction(schedule: Schedule) -> float:
    """Idle over busy time on even stages whose hops take nothing: (p - 1) / (v m). Exact there.  SC21, section 2.2."""
    return (schedule.ranks - 1) / (schedule.chunks * schedule.micro_batches)


def in_flight(schedule: Schedule, rank: int) -> int:
    """The most chunks that a rank has in flight, each with one micro-batch: its warm-up and the forward of the first pair. Exact.

    gpipe: m.  1f1b: min(m, p - rank), PipeDream-Flush.  interleaved: min(v m, 2 (p - 1 - rank) + (v - 1) N + 1), Megatron-LM's
    num_warmup_microbatches and one more.
    """
    return min(schedule.warmup(rank) + 1, schedule.micro_batches * schedule.chunks)


def step_time_s(schedule: Schedule, times: Times) -> float:
    """An estimate: m x slowest rank + a chunk's forward and backward on each other rank + the hops of one round, forward and backward.

    Exact on even stages whose hops take nothing (the formula above); otherwise neither exact nor a bound: it leaves out that uneven stages wait for
    each other, that a rank which is not the slowest may hide its share, and that exposed hops come with every micro-batch. `replay` is
    exact, `lower_bound_s` never too high.
    """
    check(schedule, times)
    by_rank = [times.rank_s(r) for r in range(schedule.ranks)]
    slowest = max(by_rank)
    return schedule.micro_batches * slowest + (sum(by_rank) - slowest) / schedule.chunks + sum(times.lags_s) / schedule.chunks


def lower_bound_s(schedule: Schedule, times: Times) -> float:
    """No replay of these times is shorter (the module says why). Exact for even stages whose hops take nothing, and for gpipe with hops beside compute."""
    check(schedule, times)
    rows_s, lags_s = times.rows_s, times.lags_s
    if times.exposed:
        rows_s, lags_s = tuple(t + lag for t, lag in zip(rows_s, lags_s, strict=True)), (0.0,) * len(lags_s)
    p, m, s, v = schedule.ranks, schedule.micro_batches, schedule.stages, schedule.chunks
    ends_s = list(accumulate(t + lag for t, lag in zip(rows_s, lags_s, strict=True)))
    path_s = best_s = ends_s[-1]
    for r in range(p):
        forward = rows_s[r:s:p]
        backward = rows_s[2 * s - 1 - r : s - 1 : -p]
        n = in_flight(schedule, r)
        last_forward, first_backward = s - p + r, s + p - 1 - r
        head_s = ends_s[r] - rows_s[r]
        tail_s = path_s - ends_s[2 * s - 1 - r]
        first_s = sum(k * t for k, t in zip(_turns(schedule, n), forward, strict=True))
        early = _turns(schedule, m * v - n)[::-1]  # backwards before the last n
        last_s = sum((m - k) * t for k, t in zip(early, backward, strict=True))
        gain_1 = ends_s[first_backward] - rows_s[first_backward] - head_s - first_s
        gain_2 = path_s - ends_s[last_forward] - tail_s - last_s
        gain_s = max(0.0, gain_1) + max(0.0, gain_2) if n < m * v else max(0.0, gain_1, gain_2)
        best_s = max(best_s, head_s + m * (sum(forward) + sum(backward)) + tail_s + gain_s)
    if schedule.kind == "gpipe":
        best_s = max(best_s, path_s + (m - 1) * (max(rows_s[:s]) + max(rows_s[s:])))
    return best_s


def _turns(schedule: Schedule, n: int) -> list[int]:
    """How many of a rank's first n forwards are of each chunk."""
    m, v, size = schedule.micro_batches, schedule.chunks, schedule.size
    group, left = divmod(n, size * v)
    before = min(group * size, m)
    here = min(size, m - before)  # the last group may be smaller
    return [before + min(max(left - c * here, 0), here) for c in range(v)]
