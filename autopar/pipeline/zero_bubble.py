"""Schedules that run the gradients of parameters, W, where a rank would wait.

Nobody waits for W, so it may come any time after its I. Stages are dealt out along a V, each rank having one on the way down and one on the way up,

    stage s of 2p on rank  s          for s < p
                           2p - 1 - s otherwise

so that the rank that starts a micro-batch also has its loss, and two neighbouring stages meet on the last rank without a hop.

    zbv     Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (ZB-V), in the order of torch.distributed.pipelining's ZBVZeroBubble: every rank holds p micro-batches in full, and
            with F = I = W waits p - 1 of the step's 6m + p - 1 units.
    dualpipev   DeepSeek-AI, "DualPipe" (DeepSeek-V3's technical report, 2024, section 3.2.1; its V form, 2025), in the order of torch's ScheduleDualPipeV: forward of one stage and backward of
            the other come in pairs, for a runtime that has the communication of one beside the other's compute; W is apart from I only where ranks would wait. A rank holds p and a half
            micro-batches in full.
    zb-h1   Qi et al., "Zero Bubble Pipeline Parallelism", 2023: one stage a rank, 1f1b's order of F and I. Every rank has p micro-batches in flight, as 1f1b's first rank has; with
            F = I = W it waits p - 1 units, a third of what it does in 1f1b.
"""

from __future__ import annotations

from collections import deque

from autopar.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Lists


def zbv(ranks: int, micro_batches: int) -> Lists:
    """ZB-V, with as many micro-batches as the schedule takes to fill, of which those that there are not are left out."""
    m = max(2 * ranks - 1, micro_batches)
    out = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        list_ = _Counting()
        for _ in range(2 * (ranks - rank) - 1):
            list_.add(down, FORWARD)
        for _ in range(rank):
            list_.add(up, FORWARD)
            list_.add(down, FORWARD)
        for _ in range(ranks - rank):
            list_.add(up, FORWARD, INPUT, WEIGHT)
        while list_.number(up, FORWARD) < list_.number(down, FORWARD) or list_.number(down, FORWARD) < m:
            if list_.number(down, FORWARD) < m:
                list_.add(down, FORWARD)
            list_.add(down, INPUT, WEIGHT)
            list_.add(up, FORWARD, INPUT, WEIGHT)
        for _ in range(rank):
            list_.add(down, INPUT)
            list_.add(up, INPUT)
        for _ in range(ranks - rank):
            list_.add(down, INPUT, WEIGHT)
        for stage in (up, down):
            while list_.number(stage, WEIGHT) < list_.number(stage, INPUT):
                list_.add(stage, WEIGHT)
        out.append(tuple(a for a in list_.actions if a.micro_batch < micro_batches))
    return Lists(tuple(out), "zbv")


def dualpipev(ranks: int, micro_batches: int) -> Lists:
    """DualPipe-V, with as many micro-batches as there are stages if there are fewer, of which those that there are not are left out."""
    m, out = max(2 * ranks, micro_batches), []
    for rank in range(ranks):
        down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank - 1
        list_ = _Counting()
        for _ in range(2 * behind):
            list_.add(down, FORWARD)
        for _ in range(rank + 1):
            list_.add(down, FORWARD)
            list_.add(up, FORWARD)
        for _ in range(behind):
            list_.add(up, INPUT)
            list_.add_waiting()
            list_.add(up, FORWARD)
        for _ in range(m - 2 * ranks + rank + 1):
            list_.add(down, FORWARD)
            list_.add(up, BACKWARD)
            list_.add(up, FORWARD)
            list_.add(down, BACKWARD)
        for _ in range(behind):
            list_.add(up, BACKWARD)
            list_.add(up, FORWARD)
            list_.add(down, BACKWARD)
        # The second half of what is left is split, so that W fills the waits at the end.
        turn = 2 * ((rank + 1) // 2) + (rank + 1) % 2
        for i in range(2 * (rank + 1)):
            list_.add(down if i % 2 else up, BACKWARD if i < turn else INPUT)
        for _ in range(behind):
            list_.add_waiting()
            list_.add(down, INPUT)
        while list_.waiting:
            list_.add_waiting()
        out.append(tuple(a for a in list_.actions if a.micro_batch < micro_batches))
    return Lists(tuple(out), "dualpipev")


class _Counting:
    """A list whose actions of each kind and stage take micro-batches in order, a whole backward that of I. waiting: W of what had an I, in the order of these."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: dict[tuple[int, str], int] = {}
        self.waiting: deque[tuple[int, int]] = deque()

    def add_waiting(self) -> None:
        """The first W that is waited for, if there is one."""
        if self.waiting:
            stage, i = self.waiting.popleft()
            self.actions.append(Action(stage, WEIGHT, i))

    def number(self, stage: int, kind: str) -> int:
        return self.counts.get((stage, kind), 0)

    def add(self, stage: int, *kinds: str) -> None:
        for kind in kinds:
            of = INPUT if kind == BACKWARD else kind
            i = self.number(stage, of)
            self.actions.append(Action(stage, kind, i))
            self.counts[stage, of] = i + 1
            if kind == INPUT:
                self.waiting.append((stage, i))


def zb_h1(ranks: int, micro_batches: int) -> Lists:
    """ZB-H1: rank r is r micro-batches behind with W."""
    m, out = micro_batches, []
    for rank in range(ranks):
        list_ = _Counting()
        for _ in range(min(m, ranks - rank)):
            list_.add(rank, FORWARD)
        for i in range(m):
            list_.add(rank, INPUT)
            if i >= rank:
                list_.add(rank, WEIGHT)
            if list_.number(rank, FORWARD) < m:
                list_.add(rank, FORWARD)
        while list_.number(rank, WEIGHT) < m:
            list_.add(rank, WEIGHT)
        out.append(tuple(list_.actions))
    return Lists(tuple(out), "zb-h1")
