"""Hugging Face's Accelerate, with a loop of one's own.

    python examples/train_accelerate.py --plain                      one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_accelerate.py         four processes, the same losses

`prepare` deals the data to processes (hence `inputs="local"`, and a batch size by process) and leaves a compiled model as it is. `acc.backward`,
`acc.clip_grad_norm_` and the prepared optimizer work as they are. Checkpoints are those of `autopar.checkpoint`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

ROWS, GLOBAL_BATCH, EPOCHS = 64, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    acc = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(ROWS, 16)
    rows = TensorDataset(x, x[:, :4].argmax(1))

    if not args.plain:
        model = autopar.compile(
            model, (acc.num_processes,), loss_fn=nn.functional.cross_entropy, inputs="local", layout=args.layout, backend=args.backend
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH // acc.num_processes)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)

    step = 0
    for _ in range(EPOCHS):
        for inputs, target in loader:
            loss = nn.functional.cross_entropy(model(inputs), target) if args.plain else model(inputs, target)
            acc.backward(loss)
            norm = acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if acc.is_main_process:
                print(f"step {step} loss {float(loss.detach()):.6f} norm {float(norm):.6f}", flush=True)
            step += 1
    acc.end_training()


if __name__ == "__main__":
    main()
