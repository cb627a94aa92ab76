"""What loops do around a model in a pipeline, against one device; and what is refused.

python -m tests.dist.test_pipeline_loops --processes 2
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError, InputError, LostRankError
from autopar.kernels.random import EagerRandom
from autopar.runtime.outputs import NotComputedError
from tests.dist.launch import run
from tests.dist.test_pipelines import BATCH, SEED, built
from tests.dist.trained import difference
from tests.models import ZOO
from tests.wide import cases, wide


class Mlp(nn.Module):
    """Layers in a Sequential, a loss that is a mean over elements."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"out": x} if y is None else {"loss": F.mse_loss(x, y), "out": x}


def _mlp(layers: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(1)
    return Mlp(layers), {"x": torch.randn(BATCH, 6, generator=g), "y": torch.randn(BATCH, 6, generator=g)}


def _compiled(model: nn.Module, **more: Any) -> Any:
    torch.manual_seed(SEED)
    return autopar.compile(
        copy.deepcopy(model), {"pp": dist.get_world_size()}, **{"layout": "fsdp", "backend": "aot_eager", "micro_batches": 4, **more}
    )


def _equal_gradients(reference: nn.Module, compiled: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for n, q in compiled.named_parameters():
        want = theirs[n].grad
        assert (want is None) == (q.grad is None), n
        if want is not None and q.grad is not None:
            assert difference(want, q.grad) < 2e-5, n


def _loops(name: str, folder: str) -> None:
    reference, batch = built(name, 2)
    compiled = _compiled(reference)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-3) for m in (reference, compiled)]

    # Evaluation before the first step: the loss, then all outputs, on every rank; it decides where layers are.
    for m in (reference, compiled):
        m.eval()
    with torch.no_grad():
        ours, theirs = compiled(**batch), reference(**batch)
        assert difference(theirs.loss, ours.loss) < 2e-6
        assert difference(theirs.logits, ours.logits) < 2e-5
        without = {k: v for k, v in batch.items() if k != "labels"}
        assert difference(reference(**without).logits, compiled(**without).logits) < 2e-5
    for m in (reference, compiled):
        m.train()
    assert set(compiled.state_dict()) < set(reference.state_dict())

    # A scaled loss, clipped over all stages.
    drawn = compiled.rng_state()["step"]
    for step, scale in enumerate((1.0, 256.0, 256.0)):
        with EagerRandom(SEED, drawn + step):
            want = reference(**batch).loss
            (want * scale).backward()
        loss = compiled(**batch).loss
        (loss * scale).backward()
        assert difference(want.detach(), loss.detach()) < 2e-6
        _equal_gradients(reference, compiled)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (reference, compiled)]
        assert difference(norms[0], norms[1]) < 2e-5
        _equal_gradients(reference, compiled)
        for o in optimizers:
            o.step()
            o.zero_grad()

    # Gradients that are added up, of two calls with a loss of their own weight.
    drawn = compiled.rng_state()["step"]
    for i, weight in enumerate((3.0, 0.5)):
        with EagerRandom(SEED, drawn + i):
            (reference(**batch).loss * weight).backward()
    with compiled.no_sync():
        (compiled(**batch).loss * 3.0).backward()
    assert all(p.grad is None for p in compiled.parameters())
    (compiled(**batch).loss * 0.5).backward()
    _equal_gradients(reference, compiled)

    # A call's other outputs, and a second backward.
    out = compiled(**batch)
    with pytest.raises(NotComputedError, match="4 micro-batches"):
        out.logits  # noqa: B018
    out.loss.backward(retain_graph=True)
    with pytest.raises(AutoparError, match="backward runs twice"):
        out.loss.backward()
    for m in (reference, compiled):
        m.zero_grad()
    with pytest.raises(InputError, match="do not make 4 micro-batches"):
        compiled(**{k: v[:6] for k, v in batch.items()})
    of_transformers = (compiled.generate, lambda x: compiled.save_pretrained(folder)) if name == "gpt2" else ()
    for call in (*of_transformers, copy.deepcopy):
        with pytest.raises(AutoparError, match="needs all of the model"):
            call(compiled if call is copy.deepcopy else batch["input_ids"])

    # A checkpoint of the pipeline: on one device, in a pipeline before its first call, and after.
    torch.manual_seed(compiled.rng_state()["seed"])
    autopar.checkpoint.save(folder, compiled, optimizers[1], step=3)
    again, _ = built(name, 2)
    state = torch.optim.AdamW(again.parameters(), 1e-3, eps=1e-3)
    assert autopar.checkpoint.load(folder, again, state)["step"] == 3
    theirs = dict(again.named_parameters())
    for n, q in compiled.named_parameters():
        assert torch.equal(theirs[n].detach(), q.full_tensor()), n
    later, _ = built(name, 2)
    resumed = _compiled(later)
    fresh = torch.optim.AdamW(resumed.parameters(), 1e-3, eps=1e-3)
    autopar.checkpoint.load(folder, resumed, fresh)
    for m in (compiled, resumed):
        m(**batch).loss.backward()
    optimizers[1].step()
    fresh.step()
    have = dict(resumed.named_parameters())
    for n, q in compiled.named_parameters():
        assert torch.equal(q.full_tensor(), have[n].full_tensor()), n
    autopar.checkpoint.load(folder, resumed, fresh)
    for n, q in resumed.named_parameters():
        assert torch.equal(theirs[n].detach(), q.full_tensor()), n

    # state_dict: of this rank's stages; a whole one is loaded in parts.
    compiled.load_state_dict({n: p.detach() for n, p in again.state_dict().items()})
    for n, q in compiled.named_parameters():
        assert torch.equal(theirs[n].detach(), q.full_tensor()), n
    compiled.load_state_dict(compiled.state_dict())
    with pytest.raises(RuntimeError, match="missing"):
        compiled.load_state_dict({})


@pytest.mark.parametrize("name", cases(("toy-dropout", "gpt2"), ("toy-dropout",)))
def test_loops(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(_loops, 2, name, folder)


def _refused() -> list[str]:
    said: list[str] = []

    def refusal(model: nn.Module, batch: dict[str, Any], **more: Any) -> None:
        with pytest.raises(AutoparError) as e:
            _compiled(model, **more)(**batch)
        said.append(str(e.value))

    model, batch = _mlp(4)
    refusal(_mlp(1)[0], batch)
    refusal(model, {k: v[:6] for k, v in batch.items()})
    refusal(model, {"x": batch["x"]})
    refusal(model, batch, schedule="2f2b")
    refusal(model, batch, schedule="1f1b", virtual_stages=2)
    refusal(model, batch, schedule="interleaved", virtual_stages=4)
    refusal(model, batch, micro_batches="auto")
    refusal(model, batch, outputs="all")
    refusal(model, {"x": batch["x"].clone().requires_grad_(), "y": batch["y"]})
    refusal(
        ZOO["convnet"].build(2).train(),
        {"x": torch.randn(8, 3, 16, 16), "target": torch.zeros(8, dtype=torch.int64)},
        loss_fn=F.cross_entropy,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.csv"
        path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
        refusal(model, batch, schedule=path, micro_batches=2)
        path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
        refusal(model, batch, schedule=path, micro_batches=2)
        path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        refusal(model, batch, schedule=path, micro_batches=4)
    mine = {k: v + dist.get_rank() for k, v in batch.items()}
    refusal(model, mine, inputs="local")
    refusal(model, mine)
    with pytest.raises(AutoparError) as e:
        autopar.compile(copy.deepcopy(model), {"dp": 2}, schedule="1f1b")
    return [*said, str(e.value)]


REFUSALS = (
    "needs as many layers", "do not make 4 micro-batches", "in parts for its loss", "no pipeline schedule '2f2b'", "1 stage a rank", "needs as many layers", "layout=",
    "outputs=", "wants a gradient", "batch_norm", "does F of micro-batch 1", "wait for each other", "2 ranks and 2 micro-batches",
    "the same place in their stages", "were given different batches", "no axis 'pp'",
)  # fmt: skip


def test_refusals() -> None:
    for said in run(_refused, 2):
        for text, wants in zip(said, REFUSALS, strict=True):
            assert wants in text, text
            assert "what to do" in text, text


def _accumulated() -> None:
    """Gradients of every second call, in bf16 products beside one device's."""
    reference, batch = built("llama", 2)
    compiled = _compiled(reference, grad_accumulation=2, precision="bf16", micro_batches=2)
    halves = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
    for i, half in enumerate(halves):
        reference(**half).loss.backward()
        loss = compiled(**half).loss
        loss.backward()
        assert difference(reference(**half).loss.detach(), loss.detach()) < 2e-2
        assert all((p.grad is None) == (i == 0) for p in compiled.parameters())
    theirs = dict(reference.named_parameters())
    for n, q in compiled.named_parameters():
        want = theirs[n].grad
        assert want is not None and q.grad is not None and q.grad.dtype == torch.float32
        assert difference(want, q.grad) < 5e-2, n


def test_accumulation_and_bf16() -> None:
    run(_accumulated, 2)


def _csv() -> float:
    """A schedule from a file in torch's notation, with what torch writes besides."""
    reference, batch = _mlp()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.csv"
        path.write_text("0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0F2,0B1,0B2\n1RECV_F0,1F0,1B0,1F1,1B1,,1F2,1B2\n")
        compiled = _compiled(reference, micro_batches=3, schedule=path)
        small = {k: v[:6] for k, v in batch.items()}
        reference(**small)["loss"].backward()
        compiled(**small)["loss"].backward()
    _equal_gradients(reference, compiled)
    return 0.0


def test_a_schedule_from_a_file() -> None:
    run(_csv, 2)


def _hangs() -> str:
    """A rank that does not come: the others say in which action, within the timeout."""
    model, batch = _mlp()
    compiled = _compiled(model)
    compiled(**batch)["loss"].backward()
    if dist.get_rank() == 1:
        channels = compiled._stages.executor.channels
        receive = channels.receive

        def late(key: Any) -> Any:
            if key[2] == 2:
                time.sleep(30)
            return receive(key)

        channels.receive = late
    try:
        compiled(**batch)["loss"].backward()
    except LostRankError as e:
        return str(e)
    except Exception as e:
        return f"other: {e}"
    return ""


@wide
def test_a_rank_that_does_not_come_is_said_with_the_action() -> None:
    said = run(_hangs, 2, patience_s=8)
    assert "of micro-batch" in said[0] and "(0B" in said[0], said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", default="gpt2")
    n, name = parser.parse_args().processes, parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        run(_loops, n, name, folder)
    print("loops: as on one device")


if __name__ == "__main__":
    main()
