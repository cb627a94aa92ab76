"""What plans say of Triton kernels: of the devices that they are made for, whatever is here; and what a step says that runs on a device at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.hardware.cluster import Cluster
from autopar.kernels import triton, triton_takes
from autopar.plan.plan import Plan
from autopar.runtime import step as steps
from tests.models import ZOO

pytestmark = pytest.mark.usefixtures("one_process")


class Head(nn.Module):
    """A table, a linear layer and a cross-entropy."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(512, 16, dtype=dtype), nn.Linear(16, 512, bias=False, dtype=dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(words)).flatten(0, 1), words.flatten())


def inputs() -> dict[str, torch.Tensor]:
    return {"words": torch.arange(256).view(8, 32) % 512}


def planned(cluster: str | Cluster, dtype: torch.dtype = torch.float32) -> Plan:
    return autopar.plan(Head(dtype), inputs(), cluster=cluster, mesh={"dp": 2}, loss_head="chunked", precision=None)


def line(plan: Plan) -> str:
    return next((x for x in plan.text().splitlines() if x.startswith("Triton kernels: ")), "")


def told(device: str, **changed: Any) -> Cluster:
    c = Cluster.of(f"{device}:2")
    return c.model_copy(update={"device": c.device.model_copy(update=changed)})


BOTH = "scores in linear_log_prob (1 x), linear_log_prob_backward (1 x)"


def test_names_of_dtypes() -> None:
    assert [str(d) for d in triton.DTYPES] == [f"torch.{d}" for d in triton_takes.DTYPES]


def test_a_plan_says_which_run_or_why_none_does() -> None:
    assert line(planned("h100:2")) == f"Triton kernels: {BOTH}"
    assert line(planned("cpu:2")) == f"Triton kernels: none; {BOTH} by torch: kernels are for GPUs"
    assert line(planned("h100:2", torch.float64)) == f"Triton kernels: none; {BOTH} by torch: no kernel takes float64"
    unknown = told("h100", without_triton=type(Cluster.of("h100").device).model_fields["without_triton"].default)
    assert "description of the device does not say" in line(planned(unknown))


def test_a_plan_without_such_operators_says_nothing() -> None:
    plain = autopar.plan(Head(), inputs(), cluster="h100:2", mesh={"dp": 2}, loss_head="plain", precision=None)
    assert not line(plain) and "triton" not in plain.solver


def test_layers_are_counted_as_the_program_has_them() -> None:
    """Of five, which are planned as three."""
    plan = autopar.plan(ZOO["mixtral"].build(5).train(), ZOO["mixtral"].inputs(4, 32), cluster="h100:2", mesh={"dp": 2}, precision=None)
    each = "experts (5 x), experts_backward (5 x)"
    assert line(plan) == f"Triton kernels: combine in {each}; gate in {each}"


def test_the_kernels_passes_are_priced() -> None:
    """The same device without them: as many FLOPs, more time and more memory."""
    fast, slow = (planned(told("h100", without_triton=reason)).predicted for reason in ("", "no triton is there"))
    assert fast["step_time_s"] < slow["step_time_s"] and fast["peak_memory_bytes"] < slow["peak_memory_bytes"]
    kept = planned(told("cpu", without_triton="anything"))
    assert kept.predicted == planned("cpu:2").predicted


@pytest.mark.parametrize("reason", ["", "triton 3.1.0 is older than 3.6"])
def test_a_step_says_what_its_device_runs(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the plan says that it was given. A step on a CPU leaves what was planned for a GPU."""
    model = autopar.compile(Head(), {"dp": 1}, cluster="h100:1x1", loss_head="chunked", backend="aot_eager")
    step = model.prepare(**inputs())
    assert line(step.plan) == f"Triton kernels: {BOTH}"
    monkeypatch.setattr(steps, "why_not", lambda device, dtype: reason)
    step.settings = replace(step.settings, device=torch.device("cuda", 0))
    said = replace(step.plan, solver=step.told(step.base))
    assert line(said) == (f"Triton kernels: none; {BOTH} by torch: {reason}" if reason else f"Triton kernels: {BOTH}")


def test_a_hand_layout_says_it_too() -> None:
    model = autopar.compile(Head(), {"dp": 1}, layout="ddp", loss_head="chunked", backend="aot_eager")
    assert line(model.prepare(**inputs()).plan) == f"Triton kernels: none; {BOTH} by torch: the tensors are on a cpu, kernels are for GPUs"
