"""Causal attention whose queries are split, in stretches or in blocks that are dealt out, on processes: it trains like one device.

python -m tests.dist.test_split_sequences --model qwen3 --mesh dp=2,tp=2 --blocks 4 --backend inductor
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.kernels.random import EagerRandom
from autopar.planner.layout import Layout
from autopar.planner.planning import Planned
from autopar.planner.propagate import propagate
from tests.dist.launch import run
from tests.models import ZOO
from tests.spmd.test_causal_balance import split_evenly
from tests.wide import cases

SEED = 3
CASES = [
    (name, axes, blocks, letters, backend)
    for name in ("llama", "gpt2-attention", "qwen3", "gemma3")
    for axes, blocks, letters in (
        ({"a": 2}, 2, "q"), ({"a": 4}, 4, "q"), ({"dp": 2, "tp": 2}, 4, "q"), ({"a": 4}, 1, "q"),
        ({"a": 4}, 4, "s"), ({"dp": 2, "tp": 2}, 2, "s"), ({"dp": 2, "tp": 2}, 4, "sq"),
    )
    for backend in ("aot_eager", "inductor")
]  # fmt: skip
QUICK = [
    ("qwen3", {"dp": 2, "tp": 2}, 4, "q", "aot_eager"),
    ("llama", {"a": 4}, 4, "s", "aot_eager"),
    ("gemma3", {"a": 4}, 1, "s", "aot_eager"),
]


@contextlib.contextmanager
def split(blocks: int, letters: str, batch: int) -> Iterator[None]:
    """Plans are hand layouts whose attention is split so (`split_evenly`)."""

    def plan_graph(folded: Any, axes: dict[str, int], *_: Any, **more: Any) -> Planned:
        layout = Layout.of("ddp" if batch > 1 else "tp", Mesh.of(axes))
        plan = propagate(folded.graph, layout, axes, frozenset(folded.graph.params))
        return Planned(split_evenly(plan, folded.graph, blocks, letters), None, None, None)  # type: ignore[arg-type]

    with mock.patch("autopar.planner.request.plan_graph", plan_graph):
        yield


def trained(name: str, axes: dict[str, int], blocks: int, letters: str, backend: str, batch: int, seq: int, steps: int) -> list[str]:
    """Steps beside one device; which placements of queries the plan has."""

    torch.manual_seed(SEED)
    one, zoo = ZOO[name].build(2).train(), ZOO[name]
    inputs = zoo.inputs(batch, seq)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with split(blocks, letters, batch):
        model = autopar.compile(copy.deepcopy(one), mesh, backend=backend, cluster=Cluster.of(f"h100:{mesh.size()}"), **zoo.compile)
        model(**inputs).loss.backward()  # plans
        model.zero_grad()
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(one.parameters(), lr=1e-3)
    for i in range(steps):
        torch.manual_seed(SEED + 1 + i)
        got = model(**inputs).loss
        with EagerRandom(SEED + 1 + i, 0):
            want = one(**inputs).loss
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        got.backward()
        want.backward()
        for (n, mine), q in zip(model.named_parameters(), one.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    return sorted({str(dict(o.strategy)) for o in model.plan.ops.values() if o.kind == "attention"})


@pytest.mark.parametrize(("name", "axes", "blocks", "letters", "backend"), cases(CASES, QUICK), ids=str)
def test_trains_like_one_device(name: str, axes: dict[str, int], blocks: int, letters: str, backend: str) -> None:
    ranks = 1
    for n in axes.values():
        ranks *= n
    said = run(trained, ranks, name, axes, blocks, letters, backend, 1, 32, 2)
    assert all(f"'{x}'" in s for x in letters for rank in said for s in rank) and said[0]


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="qwen3", choices=sorted(ZOO))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--blocks", type=int, default=4)
    a.add_argument("--backend", default="aot_eager")
    a.add_argument("--batch", type=int, default=1)
    a.add_argument("--seq", type=int, default=32)
    a.add_argument("--letters", default="q", help="as of tests.spmd.test_causal_balance")
    a.add_argument("--steps", type=int, default=2)
    o = a.parse_args()
    axes: dict[str, int] = {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}
    ranks = 1
    for n in axes.values():
        ranks *= n
    found: list[Any] = run(trained, ranks, o.model, axes, o.blocks, o.letters, o.backend, o.batch, o.seq, o.steps)
    print("equal; attention split as", *found[0])


if __name__ == "__main__":
    main()
