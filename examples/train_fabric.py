"""Lightning Fabric, with a loop of one's own.

    python examples/train_fabric.py --plain                      one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_fabric.py         four processes, the same losses

The strategy is made of Fabric's own: it compiles what `fabric.setup` is given, and `fabric.save` and `fabric.load` go through `autopar.checkpoint`. The optimizer is made
after the model is set up, as with Fabric's other strategies that shard.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

ROWS, GLOBAL_BATCH, EPOCHS, ACCUMULATED = 64, 16, 4, 2


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--folder", default="runs/fabric", help="of checkpoints; all processes see it")
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    world = 1 if args.plain else int(os.environ["WORLD_SIZE"])
    kind: Any = "auto" if args.plain else autopar.strategy(DDPStrategy, layout=args.layout, backend=args.backend)()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=kind)
    fabric.launch()

    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    rows = TensorDataset(x, x[:, :4].argmax(1))
    model = fabric.setup(Classifier())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=GLOBAL_BATCH // world, shuffle=False))
    # Fabric's sampler would shuffle where there are several processes.
    if hasattr(loader.sampler, "shuffle"):
        loader.sampler.shuffle = False

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    step = 0
    for epoch in range(EPOCHS):
        if epoch == EPOCHS // 2:  # as if started again
            fabric.save(f"{args.folder}/{world}", state)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            fabric.load(f"{args.folder}/{world}", state)
        for inputs, target in loader:
            held = step % ACCUMULATED != ACCUMULATED - 1
            with fabric.no_backward_sync(model, enabled=held and not args.plain):
                loss = nn.functional.cross_entropy(model(inputs), target)
                fabric.backward(loss / ACCUMULATED)
            told = float(fabric.all_reduce(loss.detach(), reduce_op="mean"))
            if not held:
                norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                if fabric.is_global_zero:
                    print(f"step {step} loss {told:.6f} norm {float(norm):.6f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
