"""LoRA with peft: only the adapters are trained, so only they have gradients, optimizer state and backward products.

python examples/train_lora.py --plain                            one process, ordinary PyTorch
torchrun --nproc-per-node 4 examples/train_lora.py               four processes, the same losses
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

SEQ, BATCH = 64, 8


def batch(step: int) -> torch.Tensor:
    """Windows of a text that every machine has."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - SEQ, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[s : s + SEQ] for s in starts])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    if not args.plain:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, layout=args.layout, backend=args.backend)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    speaks = args.plain or dist.get_rank() == 0
    if speaks:
        total = sum(p.numel() for p in model.parameters())
        print(f"{sum(p.numel() for p in trained):,} of {total:,} parameters are trained")
    for step in range(args.steps):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if speaks:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    if not args.plain:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
