"""`autopar.plan` where no mesh is asked for: pipelines are chosen where they are faster, and no hand layout is faster than the answer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import autopar
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import offline
from autopar.search import everywhere
from autopar.search.space import Space
from tests.models import ZOO
from tests.wide import cases

INPUTS = {"input_ids": (16, 64), "labels": (16, 64)}


def between(bandwidth: float) -> Cluster:
    """Four devices that hand each other so many bytes a second."""
    cluster = Cluster.of("cpu:4x1")
    return cluster.model_copy(update={k: getattr(cluster, k).model_copy(update={"bandwidth_Bps": bandwidth}) for k in ("intra", "inter")})


@functools.cache
def planned(bandwidth: float, number: int | str = "auto") -> Plan:
    torch.manual_seed(0)
    return autopar.plan(ZOO["llama"].build(4), INPUTS, between(bandwidth), micro_batches=number, precision="bf16")


@pytest.mark.parametrize("bandwidth", cases([3e5, 1e6, 3e6], [1e6]))
def test_a_pipeline_where_links_are_slow(bandwidth: float) -> None:
    """It says what was tried, is faster than what there is without, and than all that a search among hand layouts finds on all four devices."""
    plan = planned(bandwidth)
    alone = offline.plan(ZOO["llama"].build(4), INPUTS, between(bandwidth), micro_batches="auto", precision="bf16")
    assert plan.pipeline is not None and plan.pipeline.ranks > 1
    assert plan.predicted["step_time_s"] < alone.predicted["step_time_s"]
    said = f"pp={plan.pipeline.ranks} x dp={plan.mesh_axes['dp']}"
    assert said in str(plan.solver["pipelines"]) and "pipelines: tried" in str(plan)
    best = autopar.search(
        ZOO["llama"].build(4), INPUTS, between(bandwidth), global_batch=16, top_k=1, options={"idle": False, "offload": False}
    )
    # Replayed with the work of stages as operators say, where `predict` counts pieces: on links so slow that is a few percent.
    assert plan.predicted["step_time_s"] <= 1.1 * best[0].prediction.step_time_s, (plan.text(), best)


def test_not_looked_for_where_it_could_save_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where communication adds nothing that is worth the search, or what a pipeline needs chosen is said."""

    def search(*args: object, **how: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(everywhere, "search", search)
    assert planned(1e12).pipeline is None and "pipelines" not in planned(1e12).solver
    assert planned(1e6, 1).pipeline is None


def test_it_is_said_where_no_hand_layout_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everywhere, "search", lambda *args, **how: [])
    plan = autopar.plan(ZOO["llama"].build(4), INPUTS, between(1e6), micro_batches="auto", precision="bf16")
    assert plan.pipeline is None and "no hand layout takes less than" in str(plan)


@pytest.mark.parametrize(("name", "has_experts"), [("mixtral", True), ("llama", False)])
def test_layouts_that_share_experts_are_looked_at(name: str, has_experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For so many seconds; of models without, all are, since none is worth leaving out."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(everywhere, "search", lambda *args, **how: asked.update(how) or [])
    how = {"loss_fn": None, "precision": "bf16", "optimizer": "adamw", "in_subprocess": False, "imbalance": 1.0}
    assert everywhere.faster(ZOO[name].build(2), INPUTS, between(1e6), None, how, 40.0) == []
    assert asked.get("seconds") == (40.0 if has_experts else None)
    assert Space.of(asked["options"]).ep == (None if has_experts else (1,))


def test_experts_are_shared_within_stages() -> None:
    """The mesh that is planned for such a layout has an axis for them; the plan is about as fast as the layout, or faster."""
    model, where = ZOO["mixtral"].build(2), between(1e6)
    only = {"pp": [2], "ep": [2], "tp": [1], "cp": [1], "micro_batch": [2], "offload": False, "idle": False}
    (best,) = autopar.search(model, INPUTS, where, global_batch=16, top_k=1, options=only)
    assert (best.layout.pp, best.layout.ep) == (2, 2)
    axes, number = everywhere.asked_of(best, 16)
    assert (axes, number) == ({"pp": 2, "dp": 1, "ep": 2}, 4)
    plan = offline.plan(model, INPUTS, where, axes, micro_batches=number, precision="bf16")
    assert plan.pipeline is not None and plan.predicted["step_time_s"] <= 1.1 * best.prediction.step_time_s


def test_it_is_called_as_the_plan_without() -> None:
    assert inspect.signature(everywhere.plan) == inspect.signature(offline.plan)
