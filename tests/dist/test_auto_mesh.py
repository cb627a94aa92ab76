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
from tests.dist.launch import run
from tests.dist.trained import trained_beside
from tests.models import ZOO

BATCH, SEQ, SEED = 8, 16, 3


def between(bandwidth: float) -> Cluster:
    """Four devices that hand each other so many bytes a second."""
    cluster = Cluster.of("cpu:4x1")
    return cluster.model_copy(update={k: getattr(cluster, k).model_copy(update={"bandwidth_Bps": bandwidth}) for k in ("intra", "inter")})


def _trained(bandwidth: float) -> dict[str, Any]:
    torch.manual_seed(SEED)
    reference, batch = ZOO["llama"].build(4).train(), ZOO["llama"].inputs(BATCH, SEQ)
    torch.manual_seed(SEED)
    compiled = autopar.compile(
        copy.deepcopy(reference), "auto", example_inputs=batch, cluster=between(bandwidth), backend="aot_eager", options={"gap": 0.05}
    )
    worst = trained_beside(reference, compiled, batch, SEED, 3)
    pipeline = compiled.plan.pipeline
    return {**worst, "ranks": 1 if pipeline is None else pipeline.ranks, "told": compiled.plan.solver.get("pipelines", "")}


def test_a_pipeline_where_links_are_slow() -> None:
    for found in run(_trained, 4, 1e6, timeout=900):
        assert max(found[k] for k in ("loss", "gradients", "parameters")) < 2e-4, found
        assert found["ranks"] > 1 and "micro-batches" in found["told"], found


def _refused() -> list[str]:
    model, batch = ZOO["llama"].build(2), ZOO["llama"].inputs(BATCH, SEQ)
    out = []
    for how in (
        {"mesh": "4"},
        {"mesh": "auto"},
        {"mesh": "auto", "example_inputs": batch, "layout": "fsdp"},
        {"mesh": "auto", "example_inputs": batch, "inputs": "local"},
        {"mesh": "auto", "example_inputs": {**batch, "use_cache": False}},
    ):
        with pytest.raises((AutoparError, InputError)) as e:
            autopar.compile(model, **how)
        out.append(str(e.value))
    return out


def test_refusals() -> None:
    (found,) = run(_refused, 1)
    wanted = ("a mesh of '4'", "example_inputs", "layout=", "has been", "use_cache")
    assert all(w in text for w, text in zip(wanted, found, strict=True)), found


if __name__ == "__main__":
    print(run(_trained, 4, 1e6, timeout=900))
