"""Times as people read them, and what a plan says besides its step time: the rate, MFU, exposed communication."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.hardware.cluster import Cluster
from autopar.planner.figures import exposed_s
from autopar.solver.problem import Account, Arc, Choice, Decision, End, Flow, Problem, Value
from autopar.text.sizes import format_amount
from autopar.text.times import format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (1.234e-7, "0.123 us"), (9.9999e-6, "10.00 us"), (99.999e-6, "100.0 us"), (9.99996e-4, "1.000 ms"), (0.931154, "931.2 ms"),
        (0.9999999, "1.000 s"), (16.9251, "16.93 s"), (59.99, "59.99 s"), (59.999, "1 min 0 s"), (485.004207, "8 min 5 s"), (3599.6, "1 h 0 min"),
        (7199.0, "2 h 0 min"), (7260.0, "2 h 1 min"), (86_399.0, "1 d 0 h"), (200_000.0, "2 d 8 h"), (-0.5, "-500.0 ms"),
    ],
)  # fmt: skip
def test_times_are_said_with_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_exposed_communication_is_what_the_step_would_save_without_any() -> None:
    """Forward: 3 s of kernels and 1 s inside an operator, 2 s waited for at once; backward: 5 s of kernels beside 7 s on the link."""
    accounts = (Account(0, "compute"), Account(0, "intra"), Account(1, "compute"), Account(1, "inter"))
    inside = Choice("op", ("s",), ({0: 3.0 + 1.0, 1: 1.0, 2: 5.0},))
    ends = (End(0, (0,)),), (End(0, (1,)),)
    waited, beside = (Flow((Arc(0, 1, times),), *ends) for times in ({0: 2.0, 1: 2.0}, {3: 7.0}))
    problem = Problem(
        choices=(inside,), values=(Value("x", ("a", "b"), waited, beside),), reruns=(), rows=(), accounts=accounts, stages=("forward", "backward"),
        budget_bytes=0.0,
    )  # fmt: skip
    decision = Decision((0,), {}, frozenset(), {(0, 0): frozenset({0}), (0, 1): frozenset({0})})
    assert exposed_s(problem, decision, {}) == pytest.approx((4.0 + 2.0 - 3.0) + (7.0 - 5.0))
    assert exposed_s(problem, decision, {0: 0.5}) == pytest.approx((4.0 + 2.0 - 3.5) + (7.0 - 5.0))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 1024)
        self.a = nn.Linear(1024, 4096, bias=False)
        self.b = nn.Linear(4096, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.table(x)))).square().mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1024, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).square().mean()


def test_a_plan_says_tokens_and_mfu_of_the_model() -> None:
    """6 FLOPs for each token and weight of a product: two forward, four backward. The table is none."""
    tokens, weights = 64 * 128, 1024 * 4096 + 4096 * 512
    p = autopar.plan(Pair(), {"x": (64, 128)}, "h100:8", "8", precision="bf16").predicted
    assert p["tokens_per_s"] == pytest.approx(tokens / p["step_time_s"])
    assert p["mfu"] == pytest.approx(6 * tokens * weights / (p["step_time_s"] * 8 * Cluster.of("h100:8").device.peak("bfloat16")))
    assert 0 <= p["exposed_s"] < p["step_time_s"]


def test_what_has_no_tokens_is_counted_in_samples() -> None:
    made = autopar.plan(Images(), {"x": torch.empty(64, 1024, device="meta")}, "h100:2", "2", precision="bf16")
    p = made.predicted
    assert p["samples_per_s"] == pytest.approx(64 / p["step_time_s"]) and "tokens_per_s" not in p
    # The input has no gradient: two products of the three.
    assert p["mfu"] == pytest.approx(4 * 64 * 1024 * 4096 / (p["step_time_s"] * 2 * Cluster.of("h100:2").device.peak("bfloat16")))
    assert "samples/s" in made.text() and "exposed communication" in made.text()


def test_rates_have_units_too() -> None:
    assert [format_amount(n, "FLOP/s") for n in (0, 999, 3.844e8, 8.018e10)] == [
        "0 FLOP/s",
        "999 FLOP/s",
        "384.40 MFLOP/s",
        "80.18 GFLOP/s",
    ]
