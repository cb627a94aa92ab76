"""Steps of a channels_last ResNet on one process: ours against torch.compile's and eager's, interleaved.

    python -m benchmarks.formats --width 64 --depth 2 --batch 16 --size 32 --rounds 30 --out benchmarks/results/formats.json

--keep-memory: the C allocator keeps what is freed (as a GPU's allocator does). Left alone it gives memory back to the system in the middle of a step, and gets it again page by page:
a few per cent of the step, by chance more of one program's than of another's.

A round is one training step (forward, backward, SGD) of each, in turn; the ratio of a round is told as its median with an order-statistics interval of 95%.
copies: calls that change a layout, in our graphs and beyond what the captured program has.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.passes.lay_out import copies
from benchmarks.record import write
from tests.images import model_of


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="residual blocks a stage")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="pixels a side")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--format", default="channels_last", choices=("channels_last", "contiguous"))
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 27),
}  # of glibc, read when it starts


def keep_memory() -> None:
    if any(os.environ.get(k) != v for k, v in KEEP.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.formats", *sys.argv[1:]], {**os.environ, **KEEP})


def batch(a: argparse.Namespace) -> dict[str, torch.Tensor]:
    x = torch.randn(a.batch, 4, a.size, a.size, generator=torch.Generator().manual_seed(1))
    x = x.contiguous(memory_format=torch.channels_last) if a.format == "channels_last" else x
    return {"sample": x, "target": torch.arange(a.batch) % 12}


def stepper(model: Callable[..., Any], params: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)

    def step() -> float:
        start = time.perf_counter()
        loss = model(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, 95%, by order statistics (normal approximation of the binomial)."""
    n, found = len(ratios), sorted(ratios)
    reach = 0.98 * n**0.5
    return found[max(0, int(n / 2 - reach))], found[min(n - 1, int(n / 2 + reach))]


def main() -> None:
    a = parse()
    if a.keep_memory:
        keep_memory()
    one = model_of("resnet", False, width=a.width, depth=a.depth)
    one = one.to(memory_format=torch.channels_last) if a.format == "channels_last" else one
    inputs = batch(a)
    ours = autopar.compile(copy.deepcopy(one), backend=a.backend, optimizer="sgd-momentum")
    theirs: nn.Module = copy.deepcopy(one)
    compiled = torch.compile(theirs, backend=a.backend)
    steps = {
        "autopar": stepper(ours, ours.parameters(), inputs),
        "torch.compile": stepper(compiled, theirs.parameters(), inputs),
        "eager": stepper(one, one.parameters(), inputs),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(a.rounds):
        for name in list(steps)[:: 1 if i % 2 else -1]:
            seconds[name].append(steps[name]())
    (step,) = ours._programs.steps()
    clones = [sum("clone" in str(n.target) for n in gm.graph.nodes) for gm in (step.captured.gm, step.base.forward, step.base.backward)]
    result: dict[str, Any] = {
        "setting": {k: v for k, v in vars(a).items() if k != "out"},
        "copies": {
            "made for kernels": copies(step.base.forward) + copies(step.base.backward),
            "captured": clones[0],
            "run": clones[1] + clones[2],
        },
        "seconds": seconds,
    }
    print(result["copies"])
    for name, other in (("torch.compile", "torch.compile"), ("eager", "eager")):
        ratios = [x / y for x, y in zip(seconds["autopar"], seconds[other], strict=True)]
        low, high = interval(ratios)
        result[f"autopar / {name}"] = {"median": statistics.median(ratios), "interval": [low, high]}
        print(f"autopar / {name}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    write(a.out, "python -m benchmarks.formats", result)


if __name__ == "__main__":
    main()
