"""A rank whose experts get more rows than the plan has memory for says so once, with the layer and by how much."""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist.launch import run
from tests.experts import build, inputs, skewed


def told(imbalance: float) -> list[str]:
    """Warnings of two steps in which all tokens go to the experts of the first rank."""
    one = build("gpt_oss")
    skewed(one, "one")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autopar.compile(one, mesh, layout="fsdp+ep", backend="aot_eager", imbalance=imbalance)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(2):
            model(**inputs(4, 16, seed=i)).loss.backward()
    return [str(w.message) for w in found if "routed experts" in str(w.message)]


def test_more_rows_than_assumed_are_told_once() -> None:
    (said,), other = run(told, 2, 1.5)
    assert "model.layers.0.mlp.experts got 2.00 times the rows of an even load on rank 0" in said and "counted for 1.5 times" in said
    assert "imbalance=2 " in said
    assert not other
