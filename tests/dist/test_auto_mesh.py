"""`autopar.compile(mesh="auto")`: four processes that no mesh is given for find that a pipeline is fastest between them, and train as one device does.

python -m tests.dist.test_auto_mesh
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError, InputError
from autopar.hardware.cluster import Cluster
from autopar.pipeline import scheduled
from tests.dist.launch import run
from tests.dist.trained import trained_beside
from tests.models import ZOO
from tests.wide import cases

BATCH, SEQ, SEED = 8, 16, 3


def between(bandwidth: float) -> Cluster:
    """Four devices that hand each other so many bytes a second."""
    cluster = Cluster.of("cpu:4x1")
    return cluster.model_copy(update={k: getattr(cluster, k).model_copy(update={"bandwidth_Bps": bandwidth}) for k in ("intra", "inter")})


def _trained(bandwidth: float, at_once: bool) -> dict[str, Any]:
    torch.manual_seed(SEED)
    reference, batch = ZOO["llama"].build(4).train(), ZOO["llama"].inputs(BATCH, SEQ)
    torch.manual_seed(SEED)
    compiled = autopar.compile(
        copy.deepcopy(reference),
        "auto",
        example_inputs=batch if at_once else None,
        cluster=between(bandwidth),
        backend="aot_eager",
        options={"gap": 0.05},
    )
    if not at_once:  # evaluated and loaded before there is a mesh
        compiled.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(**batch).loss, reference.eval()(**batch).loss, rtol=1e-5, atol=1e-6)
        compiled.train()
        reference.train()
    worst = trained_beside(reference, compiled, batch, SEED, 3)
    pipeline = compiled.plan.pipeline
    return {**worst, "ranks": 1 if pipeline is None else pipeline.ranks, "told": compiled.plan.solver.get("pipelines", "")}


@pytest.mark.parametrize("at_once", cases([True, False], [False]))
def test_a_pipeline_where_links_are_slow(at_once: bool) -> None:
    for found in run(_trained, 4, 1e6, at_once, timeout=900):
        assert max(found[k] for k in ("loss", "gradients", "parameters")) < 2e-4, found
        assert found["ranks"] > 1 and "micro-batches" in found["told"], found


class Net(torch.nn.Module):
    """Called by position, with a loss function's target behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.relu(self.a(x)))
        return out


def _with_a_loss_function() -> tuple[float, float, int]:
    """And with state that an optimizer was given before there is a mesh."""
    torch.manual_seed(SEED)
    one = Net()
    ours = autopar.compile(copy.deepcopy(one), "auto", loss_fn=torch.nn.functional.cross_entropy, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, ours)]
    for m in (one, ours):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    for o in optimizers:
        o.step()
        o.zero_grad()
    x, y = torch.randn(8, 16), torch.arange(8) % 4
    for _ in range(3):
        loss, want = ours(x, y), torch.nn.functional.cross_entropy(one(x), y)
        loss.backward()
        want.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    worst = max(float((p.full_tensor() - q).abs().max()) for p, q in zip(ours.parameters(), one.parameters(), strict=True))
    return abs(float(loss) - float(want)), worst, len(ours.plan.mesh_axes)


def test_with_a_loss_function_and_state_from_before() -> None:
    for loss, worst, axes in run(_with_a_loss_function, 4, timeout=600):
        assert loss < 1e-6 and worst < 1e-6 and axes >= 1


def _refused() -> list[str]:
    model, batch = ZOO["llama"].build(2), ZOO["llama"].inputs(BATCH, SEQ)
    out = []
    for how in (
        {"mesh": "4"},
        {"mesh": "auto", "example_inputs": batch, "layout": "fsdp"},
        {"mesh": "auto", "example_inputs": batch, "inputs": "local"},
        {"mesh": "auto", "example_inputs": {**batch, "return_dict": True}},
        {"mesh": {"pp": 1}, "micro_batches": "auto", "layout": "fsdp"},
        {"mesh": {"pp": 1}, "micro_batches": "auto", "schedule": scheduled("1f1b", 1, 2)},
    ):
        with pytest.raises((AutoparError, InputError)) as e:
            autopar.compile(model, **how)
        out.append(str(e.value))
    return out


def _on_a_given_mesh(schedule: str | None) -> dict[str, Any]:
    torch.manual_seed(SEED)
    reference, batch = ZOO["gpt2"].build(4).train(), ZOO["gpt2"].inputs(BATCH, SEQ)
    torch.manual_seed(SEED)
    how: dict[str, Any] = {"micro_batches": "auto", "schedule": schedule, "backend": "aot_eager", "options": {"gap": 0.05}}
    compiled = autopar.compile(copy.deepcopy(reference), {"pp": 2, "dp": 1}, **how)
    worst = trained_beside(reference, compiled, batch, SEED, 3)
    p = compiled.plan.pipeline
    assert p is not None
    return {**worst, "schedule": p.schedule, "number": compiled.plan.micro_batches, "tried": "schedules" in compiled.plan.solver}


@pytest.mark.parametrize("schedule", cases([None, "1f1b"], [None]))
def test_the_number_of_micro_batches_of_a_mesh_with_stages(schedule: str | None) -> None:
    for found in run(_on_a_given_mesh, 2, schedule, timeout=600):
        assert max(found[k] for k in ("loss", "gradients", "parameters")) < 2e-4, found
        assert (
            BATCH % found["number"] == 0 and found["tried"] == (schedule is None) and found["schedule"] == (schedule or found["schedule"])
        )


def test_refusals() -> None:
    (found,) = run(_refused, 1)
    wanted = ("a mesh of '4'", "layout=", "has been", "return_dict", "layout=", "list of actions")
    assert all(w in text for w, text in zip(wanted, found, strict=True)), found


if __name__ == "__main__":
    print(run(_trained, 4, 1e6, False, timeout=900))
