"""A model of your own and a loop of your own, with a loss function.

    python examples/train_plain.py --plain                           one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_plain.py              four processes, the same losses
    torchrun --nproc-per-node 4 examples/train_plain.py --layout ddp

Every rank passes the same global batch (the default, `inputs="global"`).
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

VOCAB, WIDTH, HEADS, SEQ, BATCH = 256, 64, 4, 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Bytes(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of a text that every machine has, and the same shifted by one."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - SEQ - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[s : s + SEQ + 1] for s in starts])
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Bytes(args.layers)
    if not args.plain:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, loss_fn=loss_fn, layout=args.layout, backend=args.backend)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        ids, target = batch(step)
        loss = loss_fn(model(ids), target) if args.plain else model(ids, target=target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.plain or dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)

    if not args.plain:
        if dist.get_rank() == 0:
            print(model.plan)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
