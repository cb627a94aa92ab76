"""Ranks that pass their own part of a batch: each may pad it by itself; ranks that would run different programs are refused on all of them, whenever it happens.

python -m tests.dist.test_ranks_sizes --models llama,t5 --processes 2 --layout planned [--buckets 16,32]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence

import autopar
from tests.dist.habits.common import Classes, features, labels, seeded
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases

Padded = dict[str, torch.Tensor]
STEPS = 5


def part(rank: int, step: int, decodes: bool) -> list[Padded]:
    """Samples of different lengths, the first label ignored here and there: what a rank draws in a step."""
    g = torch.Generator().manual_seed(100 * step + rank)
    out = []
    for _ in range(2):
        n, m = (int(torch.randint(5, 25, (), generator=g)) for _ in range(2))
        ids = torch.randint(4, 30, (n,), generator=g)
        answer = torch.randint(4, 30, (m,), generator=g) if decodes else ids.clone()
        answer[: 1 + rank] = -100
        out.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": answer})
    return out


def collated(samples: list[Padded]) -> Padded:
    """Padded to the longest of these, as a data collator does."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {k: pad_sequence([s[k] for s in samples], batch_first=True, padding_value=v) for k, v in fill.items()}


def train(name: str, layout: str | None, buckets: tuple[int, ...] | None) -> dict[str, Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    zoo = ZOO[name]
    torch.manual_seed(3)
    one = zoo.build(2)
    for m in one.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        if isinstance(getattr(m, "dropout", None), float):
            m.dropout = 0.0
    one.train()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    model = autopar.compile(
        copy.deepcopy(one), mesh, layout=layout, backend="aot_eager", inputs="local", buckets=buckets, options={"seconds": 5}, **zoo.compile
    )
    losses, wants, worst, lengths = [], [], 0.0, []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, one)]
    for step in range(STEPS):
        mine = collated(part(rank, step, name == "t5"))
        everyone = [s for r in range(n) for s in part(r, step, name == "t5")]
        got = model(**mine)
        want = one(**collated(everyone))
        losses.append(float(got.loss.detach()))
        wants.append(float(want.loss.detach()))
        if step == STEPS - 1:
            lengths = [got.logits.shape[1], mine["labels"].shape[1]]
            rows = want.logits[2 * rank : 2 * rank + 2, : lengths[1]].detach()
            kept = mine["labels"] != -100
            torch.testing.assert_close(got.logits.detach()[kept], rows[kept], rtol=1e-3, atol=1e-4)
        got.loss.backward()
        want.loss.backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            if q.grad is not None:
                worst = max(worst, float((p.grad.full_tensor() - q.grad).norm() / (q.grad.norm() + 1e-4)))
        for o in optimizers:
            o.step()
            o.zero_grad()
    return {"losses": losses, "wants": wants, "worst": worst, "lengths": lengths, "programs": model.programs}


def holds(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["losses"] == pytest.approx(r["wants"], rel=2e-4)
        assert r["worst"] < 2e-3, r["worst"]
        assert r["lengths"][0] == r["lengths"][1], "outputs keep what they were padded by"


CASES: list[tuple[str, str | None, tuple[int, ...] | None]] = [
    ("t5", "fsdp", None),
    ("llama", None, (16, 32)),
    ("bert", "ddp", None),
    ("llama", "fsdp", None),
]


@pytest.mark.parametrize(("name", "layout", "buckets"), cases(CASES, (CASES[2],)))
def test_ranks_that_pad_by_themselves(name: str, layout: str | None, buckets: tuple[int, ...] | None) -> None:
    holds(run(train, 2, name, layout, buckets, timeout=240, patience_s=120))


class Reads(torch.nn.Module):
    """Its forward reads an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = torch.nn.Linear(16, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x) * self.scale
        return y


def refused(says: str, doing: Callable[[], object]) -> None:
    with pytest.raises(autopar.AutoparError, match=says) as e:
        doing()
    assert e.value.fix


def parting() -> None:
    rank = dist.get_rank()
    kw: dict[str, Any] = {"backend": "aot_eager", "layout": "fsdp"}
    model = autopar.compile(seeded(Classes), (2,), inputs="local", dynamic=False, **kw)
    for batch in (2, 4, 2, 4):
        model(features(0, batch=batch))
    # Both know both sizes, and would run different programs.
    refused(r"local batches of other sizes: \[4, 16\] and \[2, 16\]", lambda: model(features(0, batch=4 - 2 * rank)))
    F.cross_entropy(model(features(rank, batch=2)), labels(rank, batch=2)).backward()

    model = autopar.compile(seeded(Classes), (2,), **kw)
    for _ in range(5):
        model(features(0, batch=4))
        with torch.no_grad():
            model(features(0, batch=4))
    refused("ranks 0 and 1 were given different batches", lambda: model(features(0, batch=4 - 2 * rank)))
    with torch.no_grad() if rank else contextlib.nullcontext():
        refused("do not call the model alike", lambda: model(features(0, batch=4)))

    model = autopar.compile(seeded(Reads), (2,), **kw)
    x = torch.ones(4, 16)
    for _ in range(5):
        model(x)
    model.scale = 1.0 + rank
    refused(r"(?s)rank 1 has to capture this call anew, and others do not.*scale", lambda: model(x))
    model.scale = 2.0
    assert torch.allclose(model(x), 2 * seeded(Reads)(x), atol=1e-6)


def test_ranks_that_would_run_different_programs() -> None:
    run(parting, 2, timeout=120, patience_s=60)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--models", default="llama,t5")
    a.add_argument("--processes", type=int, default=2)
    a.add_argument("--layout", default="planned")
    a.add_argument("--buckets", default="")
    o = a.parse_args()
    buckets = tuple(map(int, o.buckets.split(","))) if o.buckets else None
    for name in o.models.split(","):
        found = run(train, o.processes, name, None if o.layout == "planned" else o.layout, buckets, timeout=400)
        r = found[0]
        off = max(abs(x - y) for x, y in zip(r["losses"], r["wants"], strict=True))
        print(f"{name:12} loss off by {off:.1e}, gradients by {r['worst']:.1e}, {r['programs']}", flush=True)
        holds(found)


if __name__ == "__main__":
    main()
