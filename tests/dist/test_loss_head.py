"""A model compiled without its logits trains on processes as on one device; what asks for logits all the same gets them.

python -m tests.dist.test_loss_head --processes 2 --backend aot_eager
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.kernels.random import EagerRandom
from autopar.planner.loss_head import is_chunked
from tests.dist.launch import run
from tests.dist.test_planned import _cluster
from tests.heads import HEADS
from tests.models import ZOO
from tests.wide import cases, wide

BATCH, SEQ, SEED = 8, 16, 3


def _built(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(SEED)
    if name == "toy-dropout":
        return ZOO[name].build().train(), ZOO[name].inputs(BATCH, SEQ)
    model, given, _ = HEADS[name](BATCH, SEQ)
    return model.train(), given


def _compiled(model: torch.nn.Module, backend: str, **how: Any) -> autopar.ParallelModule:
    given = {} if "plan" in how or "layout" in how else {"cluster": _cluster(), "options": {"gap": 0.05, "seconds": 30}}
    return autopar.compile(model, backend=backend, **given, **how)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _assert_as_eager(module: autopar.ParallelModule, model: torch.nn.Module, given: dict[str, Any], step: int) -> None:
    """The next call's loss and gradients."""
    out = module(**given)
    out.loss.backward()
    with EagerRandom(SEED, step):
        loss = model(**given).loss
    loss.backward()
    assert abs(float(out.loss.detach()) - float(loss.detach())) <= 2e-6 * abs(float(loss.detach()))
    mine = dict(module.named_parameters())
    for n, p in model.named_parameters():
        want, got = p.grad, mine[n].grad
        assert (want is None) == (got is None), n
        if want is not None and got is not None:
            assert float((_whole(got) - want).norm()) <= 2e-5 * float(want.norm()) + 1e-7, n
    module.zero_grad()
    model.zero_grad()


def trains(name: str, backend: str, path: str) -> tuple[bool, str]:
    model, given = _built(name)
    eager = copy.deepcopy(model)
    torch.manual_seed(SEED)
    module = _compiled(copy.deepcopy(model), backend, loss_head="chunked")
    _assert_as_eager(module, eager, given, 0)
    plan = module.plan
    assert plan is not None
    module.plan.save(path)
    # The logits that the step did not make are made when they are asked for, and by later calls at once.
    module.eval()
    eager.eval()
    with torch.no_grad():
        out = module(**given)
        torch.testing.assert_close(out.loss, eager(**given).loss, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out.logits, eager(**given).logits, rtol=1e-4, atol=1e-5)
    torch.manual_seed(SEED)
    again = _compiled(copy.deepcopy(model), backend, plan=path)
    _assert_as_eager(again, eager.train(), given, 0)
    with pytest.raises(AutoparError, match="of a program whose head makes no logits"):
        _compiled(copy.deepcopy(model), backend, plan=path, loss_head="plain")
    return is_chunked(plan), plan.text()


@pytest.mark.parametrize(
    ("name", "backend"), cases([("toy-dropout", "aot_eager"), ("llama", "aot_eager"), ("gpt2", "inductor")], [("toy-dropout", "aot_eager")])
)
def test_trains_as_on_one_device(name: str, backend: str, tmp_path: Path) -> None:
    for chunked, text in run(trains, 2, name, backend, str(tmp_path / "plan.json")):
        assert chunked and "fused: a linear layer under a cross-entropy" in text


def by_hand(layout: str, form: str) -> bool:
    model, given = _built("gemma2")
    eager = copy.deepcopy(model)
    torch.manual_seed(SEED)
    module = _compiled(copy.deepcopy(model), "aot_eager", layout=layout, loss_head=form)
    _assert_as_eager(module, eager, given, 0)
    assert module.plan is not None
    return is_chunked(module.plan)


@pytest.mark.parametrize(("layout", "form"), cases([("fsdp", "chunked"), ("tp", "chunked"), ("fsdp", "auto")], [("fsdp", "chunked")]))
def test_hand_layouts_make_logits_unless_they_are_told(layout: str, form: str) -> None:
    assert run(by_hand, 2, layout, form) == [form == "chunked"] * 2


def in_parts(name: str, number: int) -> tuple[bool, int]:
    """Micro-batches of a call, whose targets are not counted evenly."""
    model, given = _built(name)
    eager = copy.deepcopy(model)
    torch.manual_seed(SEED)
    module = _compiled(copy.deepcopy(model), "aot_eager", loss_head="chunked", micro_batches=number)
    _assert_as_eager(module, eager, given, 0)
    assert module.plan is not None
    return is_chunked(module.plan), module.plan.micro_batches


@pytest.mark.parametrize("name", cases(("toy-dropout", "llama", "weighted"), ("toy-dropout",)))
def test_micro_batches(name: str) -> None:
    assert run(in_parts, 2, name, 2) == [(True, 2)] * 2


def of_any_length(name: str) -> bool:
    """One program for sequences of all lengths."""
    model, given = _built(name)
    eager = copy.deepcopy(model)
    torch.manual_seed(SEED)
    module = _compiled(copy.deepcopy(model), "aot_eager", loss_head="chunked", dynamic=True)
    for step, length in enumerate((SEQ, SEQ - 3, SEQ - 7)):
        _assert_as_eager(module, eager, {k: v[:, :length].contiguous() for k, v in given.items()}, step)
    assert module.plan is not None
    return is_chunked(module.plan)


@wide
@pytest.mark.parametrize("name", ("toy-dropout", "llama"))
def test_lengths_that_vary(name: str) -> None:
    assert run(of_any_length, 2, name) == [True] * 2


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="llama", choices=list(HEADS))
    a.add_argument("--processes", type=int, default=2)
    a.add_argument("--backend", default="aot_eager")
    o = a.parse_args()
    print(run(trains, o.processes, o.model, o.backend, "/tmp/plan.json")[0][1])


if __name__ == "__main__":
    main()
