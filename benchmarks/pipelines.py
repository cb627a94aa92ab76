"""Steps of a pipeline: ours against torch.distributed.pipelining's, of the same stages, by the same schedule, in one run.

    autopar calibrate --processes 2 -o build/two.json
    python -m benchmarks.pipelines --processes 2 --cluster build/two.json --out benchmarks/results/pipelines_2.json
    python -m benchmarks.pipelines --processes 4 --micro-batches 8 --layers 16 --out benchmarks/results/pipelines_4.json

A decoder written by hand. Ours takes it whole; torch's stages are cut out of it where ours are, and compiled one by one with the same backend (but for zbv's, which torch wants eager). A round is one step (all micro-batches, forward and
backward, SGD) of each program in turn, between barriers; the ratio of a round is told as its median with an order-statistics interval of 95%. "chosen": the schedule that `autopar.plan` chooses for
stages of these times, against the best of torch's. Losses and parameters of both are compared after the last round.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.formats import interval
from benchmarks.record import write
from tests.dist.launch import run

CHOSEN = "chosen"
THEIRS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}
TWO = ("interleaved", "zbv")  # stages a rank
EAGER = ("zbv",)  # torch refuses compiled stages where backward is in two


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        out: Tensor = x + self.down(F.gelu(self.up(self.behind(x))))
        return out


class Decoder(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(a.vocabulary, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.width // 32) for _ in range(a.layers))
        self.norm, self.head = nn.LayerNorm(a.width), nn.Linear(a.width, a.vocabulary, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), target)


class Stage(nn.Module):
    """A part of a decoder, for torch: the first takes ids, the last gives scores."""

    def __init__(self, whole: Decoder, layers: tuple[str, ...], first: bool, last: bool) -> None:
        super().__init__()
        self.embed = whole.embed if first else nn.Identity()
        self.blocks = nn.ModuleList(whole.get_submodule(path) for path in layers)
        self.end = nn.Sequential(whole.norm, whole.head) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.end(x)
        return out


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def batch_of(a: argparse.Namespace) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids, target = (torch.randint(0, a.vocabulary, (a.batch, a.sequence), generator=g) for _ in range(2))
    return ids, target


def ours(whole: Decoder, schedule: str, plan: str, a: argparse.Namespace) -> tuple[Any, Callable[[], float]]:
    ids, target = batch_of(a)
    how: dict[str, Any] = {"plan": plan} if schedule == CHOSEN else {"schedule": schedule, "micro_batches": a.micro_batches}
    mesh = {"pp": dist.get_world_size(), **({"dp": 1} if schedule == CHOSEN else {})}
    model = autopar.compile(copy.deepcopy(whole), mesh, backend=a.backend, optimizer="sgd", inputs="global", **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=a.rate)

    def step() -> float:
        loss = model(ids, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, step


def theirs(
    whole: Decoder, schedule: str, where: tuple[int, ...], layers: tuple[tuple[str, ...], ...], a: argparse.Namespace
) -> tuple[list[Stage], Callable[[], float]]:
    """where, layers: of each stage."""
    import torch.distributed.pipelining as pipelining

    rank, n = dist.get_rank(), len(where)
    copied = copy.deepcopy(whole)
    mine = {s: Stage(copied, layers[s], s == 0, s == n - 1) for s in range(n) if where[s] == rank}
    ids, target = batch_of(a)
    stages = []
    for s, stage in mine.items():
        program: nn.Module = stage if schedule in EAGER else torch.compile(stage, backend=a.backend, dynamic=False)  # type: ignore[assignment]
        stages.append(pipelining.PipelineStage(program, s, n, torch.device("cpu")))
    made = getattr(pipelining, THEIRS[schedule])(stages if schedule in TWO else stages[0], a.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for stage in mine.values() for p in stage.parameters()], lr=a.rate)
    first, last = where[0] == rank, where[-1] == rank

    def step() -> float:
        losses: list[Tensor] = []
        made.step(*([ids] if first else []), **({"target": target, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack([x.detach() for x in losses]).mean()) if last else float("nan")

    return list(mine.values()), step


def timed(step: Callable[[], float]) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    return time.perf_counter() - start, loss


def measured(schedules: list[str], plan: str, a: argparse.Namespace) -> dict[str, Any]:
    """In every process."""
    torch.manual_seed(0)
    whole = Decoder(a)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], float]] = {}
    models: dict[str, Any] = {}
    for schedule in schedules:
        models[schedule], steps[f"ours, {schedule}"] = ours(whole, schedule, plan, a)
        steps[f"ours, {schedule}"]()
        cut = models[schedule].plan.pipeline
        found[schedule] = {"stages": [len(x) for x in cut.layers], "schedule": cut.schedule}
        if schedule != CHOSEN:
            models[f"theirs, {schedule}"], steps[f"torch, {schedule}"] = theirs(whole, schedule, cut.where, cut.layers, a)
            steps[f"torch, {schedule}"]()
    for step in steps.values():
        for _ in range(2):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for i in range(a.rounds):
        for name in list(steps)[:: 1 if i % 2 else -1]:
            took, losses[name] = timed(steps[name])
            seconds[name].append(took)
    for schedule in schedules:
        if schedule != CHOSEN:
            mine = dict(models[schedule].named_parameters())
            for stage in models[f"theirs, {schedule}"]:
                for path, module in stage.named_modules():
                    for n, p in module.named_parameters(recurse=False):
                        same = [
                            q for m, q in mine.items() if m.endswith(n) and q.shape == p.shape and (q.to_local() - p).abs().max() < 1e-4
                        ]
                        assert same, f"{schedule}: {path}.{n} is as no parameter of ours"
    return {"cut": found, "seconds": seconds, "losses": losses}


def planned(a: argparse.Namespace, schedule: str) -> autopar.Plan:
    """For so many CPUs, or the cluster that is given."""
    torch.manual_seed(0)
    shapes = {"ids": (a.batch, a.sequence), "target": (a.batch, a.sequence)}
    cluster = str(a.cluster) if a.cluster else f"cpu:1x{a.processes}"
    return autopar.plan(
        Decoder(a),
        shapes,
        cluster,
        {"pp": a.processes, "dp": 1},
        micro_batches=a.micro_batches,
        optimizer="sgd",
        precision="fp32",
        schedule=None if schedule == CHOSEN else schedule,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--schedules", default="1f1b,interleaved,zbv,chosen", help=f"comma-separated, of {', '.join(THEIRS)} and {CHOSEN}")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3, help="of SGD")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument(
        "--cluster", type=Path, help="of this machine, by `autopar calibrate --processes`: what it predicts is told beside what is measured"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    a = parse()
    schedules = a.schedules.split(",")
    plans = {schedule: planned(a, schedule) for schedule in schedules if schedule == CHOSEN or a.cluster}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        if CHOSEN in plans:
            plans[CHOSEN].save(path)
        ranks = run(measured, a.processes, schedules, path, a, timeout=3600)
    seconds, losses = ranks[0]["seconds"], {k: v for r in ranks for k, v in r["losses"].items() if v == v}
    result: dict[str, Any] = {
        "setting": {k: v for k, v in vars(a).items() if k not in ("out", "cluster")},
        "cut": ranks[0]["cut"],
        "seconds": seconds,
    }
    torchs = {n: s for n, s in seconds.items() if n.startswith("torch, ")}
    for schedule in schedules:
        mine = seconds[f"ours, {schedule}"]
        best = min(torchs, key=lambda n: statistics.median(torchs[n]), default="")
        other = f"torch, {schedule}" if schedule != CHOSEN else best
        if a.cluster:
            predicted = plans[schedule].predicted["step_time_s"]
            result[f"predicted, {schedule}"] = predicted
            print(
                f"{schedule:<12} predicted {1e3 * predicted:.1f} ms, measured {1e3 * statistics.median(mine):.1f} ms: {predicted / statistics.median(mine) - 1:+.1%}"
            )
        if not other:
            continue
        assert abs(losses[f"ours, {schedule}"] - losses[other]) < 1e-4, (schedule, losses)
        ratios = [x / y for x, y in zip(mine, seconds[other], strict=True)]
        low, high = interval(ratios)
        result[f"ours, {schedule} / {other}"] = {"median": statistics.median(ratios), "interval": [low, high]}
        print(
            f"{schedule:<12} ours {1e3 * statistics.median(mine):.1f} ms, {other} {1e3 * statistics.median(seconds[other]):.1f} ms: "
            f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        )
    write(a.out, "python -m benchmarks.pipelines", result)


if __name__ == "__main__":
    main()
