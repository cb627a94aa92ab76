"""One GPU, bf16, Inductor: loss and gradients of a small Llama are as close to float32's as eager bf16 is."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from tests.eager import whole
from tests.gpu.where import DEVICE, error, mesh, only_here

pytestmark = only_here
__all__ = ["mesh"]


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights, representable in bf16, for every dtype."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).to(DEVICE, dtype)


def loss_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: whole(p.grad).float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_llama_bf16(mesh: DeviceMesh, layout: str) -> None:
    ids = torch.randint(1024, (4, 512), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    exact_loss, exact = loss_and_gradients(llama(torch.float32), ids)
    eager_loss, eager = loss_and_gradients(llama(torch.bfloat16), ids)
    model = autopar.compile(llama(torch.bfloat16), mesh, layout=layout, backend="inductor")
    loss, gradients = loss_and_gradients(model, ids)

    print(f"\n{layout}: loss float32 {exact_loss:.6f}, eager bf16 {eager_loss:.6f}, autopar bf16 {loss:.6f}")
    print(f"{layout}: gradient error against float32: eager bf16 {error(eager, exact):.2e}, autopar bf16 {error(gradients, exact):.2e}")
    assert gradients.keys() == exact.keys()
    # Both round in bf16, at different places: neither may be off by much more than the other. One bf16 step at the loss's size is 2^-8 of it.
    assert abs(loss - exact_loss) <= max(2 * abs(eager_loss - exact_loss), 2**-8 * exact_loss)
    assert error(gradients, exact) <= 1.5 * error(eager, exact)


def test_llama_trains(mesh: DeviceMesh) -> None:
    """Twenty steps of AdamW in float32 follow eager's curve."""

    def losses(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        out = []
        for step in range(20):
            ids = torch.randint(64, (4, 128), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    eager = losses(llama(torch.float32))
    ours = losses(autopar.compile(llama(torch.float32), mesh, layout="fsdp", backend="inductor"))
    assert eager[-1] < eager[0] - 0.5, "the reference does not learn: the comparison would show little"
    assert max(abs(a - b) for a, b in zip(eager, ours, strict=True)) <= 1e-3, list(zip(eager, ours, strict=True))
