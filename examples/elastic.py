"""Training that loses a process and goes on: `python -m autopar.run --nproc-per-node 4 examples/elastic.py --lose 2`.

With `--rejoin 1` before the program, and after it `--steps 40 --pause 1`, another process takes its place meanwhile. Prints one loss a step. `python examples/elastic.py --plain` prints the same, on one process that nothing happens to.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import autopar


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every process: a batch is whole, and each process takes its part of it."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(48, 32, generator=g)
        yield x, torch.tanh(x[:, :8])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="without autopar, on one process")
    parser.add_argument("--lose", type=int, default=-1, help="the process that kills itself in the midst of step 3")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    args = parser.parse_args()
    loss_fn = nn.functional.mse_loss
    if args.plain:
        plain = model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step, (x, y) in enumerate(batches(args.steps)):
            loss = loss_fn(plain(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.5f}", flush=True)
        return

    dist.init_process_group("gloo")
    me = dist.get_rank()
    elastic = autopar.Elastic(survive=1, silence_s=10)
    compiled = autopar.compile(model(), {"dp": dist.get_world_size()}, loss_fn=loss_fn, layout="fsdp", backend="aot_eager", elastic=elastic)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    session = autopar.elastic.Session(compiled, optimizer)
    losses: dict[int, float] = {}
    for x, y in session.batches(batches(args.steps)):
        with session.step() as number:
            loss = compiled(x, target=y)
            if (me, number) == (args.lose, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[number] = loss.item()
            time.sleep(args.pause)
    if dist.get_rank() == 0:  # ranks are renumbered after a loss
        for number, value in sorted(losses.items()):
            print(f"step {number} loss {value:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
