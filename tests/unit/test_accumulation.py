"""Gradient accumulation: buffers of unreduced gradients in the memory rows, and its share of the reductions and of the optimizer's step in the times."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import _torch
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from tests.live import LiveBytes
from tests.models import ZOO
from tests.wide import cases

STATE_BYTES = 8.0  # AdamW's, per parameter; it is not made here


@functools.cache
def peaks(micro_batches: int, batch: int) -> tuple[float, list[int]]:
    """Predicted bytes of a call, and those measured in each of a step's calls."""
    torch.manual_seed(0)
    zoo = ZOO["gpt2"]
    model, inputs = zoo.build(2).train(), zoo.inputs(batch, 32)
    try:
        compiled = autopar.compile(model, (1,), backend="aot_eager", grad_accumulation=micro_batches)
        measured = []
        for call in range(2 * micro_batches):
            if call % micro_batches == 0:
                compiled.zero_grad()
            with LiveBytes([*(p.to_local() for p in compiled.parameters()), *compiled.buffers(), *inputs.values()]) as live:
                held = sum(
                    w.local.nbytes for w in compiled._sync.buffers.values()
                )  # those of earlier calls: LiveBytes has not seen them made
                compiled(**inputs).loss.backward()
            measured.append(live.peak + held)
    finally:
        _torch.unalias_process_groups()
        dist.destroy_process_group()
    state = STATE_BYTES * sum(p.numel() for p in compiled.parameters())
    return compiled.plan.predicted["peak_memory_bytes"] - state, measured[micro_batches:]


@pytest.mark.parametrize("batch", cases([4, 32], [4]))
def test_measured(batch: int) -> None:
    """batch 4: gradients are most of the memory; batch 32: activations are."""
    predicted, measured = peaks(3, batch)
    assert max(measured) == pytest.approx(predicted, rel=0.03), (predicted, measured)
    assert max(measured) <= 1.001 * predicted


def test_buffers_are_freed_as_they_are_added_to() -> None:
    """The calls before the last do not hold what is accumulated twice."""
    _, (first, second, last) = peaks(3, 4)
    weights = sum(p.numel() * 4 for p in ZOO["gpt2"].build(2).parameters())
    assert second < first + 1.2 * weights and last < first + 1.2 * weights


def test_times() -> None:
    """A call bears its share of the reductions of gradients and of the optimizer's step; all else is as without accumulation. (Where backward waits for reductions, it makes
    again for nothing what forward then need not write: its time is told where it does not.)"""
    zoo = ZOO["gpt2"]
    model, h100 = zoo.build(2), Cluster.of("h100:1x8")
    slow, fast = (
        h100.model_copy(update={"intra": h100.intra.model_copy(update={"latency_s": 0.0, "bandwidth_Bps": x})}) for x in (1e8, 1e18)
    )

    def predicted(m: int, cluster: Cluster) -> dict[str, float]:
        shapes = {k: tuple(v.shape) for k, v in zoo.inputs(8, 32).items()}
        return autopar.plan(model, shapes, cluster, {"dp": 8}, layout="ddp", grad_accumulation=m).predicted

    once, four = predicted(1, slow), predicted(4, slow)
    assert four["optimizer_s"] == pytest.approx(once["optimizer_s"] / 4)
    assert four["backward_s"] < once["backward_s"]
    assert four["peak_memory_bytes"] > once["peak_memory_bytes"]
    once, four = predicted(1, fast), predicted(4, fast)
    assert four["forward_s"] == pytest.approx(once["forward_s"])
    assert four["backward_s"] == pytest.approx(once["backward_s"])


def test_wrong() -> None:
    with pytest.raises(AutoparError, match="at least 1"):
        autopar.plan(ZOO["gpt2"].build(1), {"input_ids": (2, 8), "labels": (2, 8)}, "h100:1x2", grad_accumulation=0)
