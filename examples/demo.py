"""Trains one small Llama three ways and shows that it is one curve.

    one process    plain eager PyTorch: what the program means
    N processes    the same loop after `model = autopar.compile(model, mesh)`; a checkpoint is saved midway
    N/2 processes  begin with other weights, load that checkpoint, continue the same curve on another mesh

The text is the Python standard library's own source, as bytes. The curves may differ by rounding only. How far rounding alone drifts is measured
beside them: a second plain process sees every batch with its rows in reverse order, which changes nothing but the order of sums. The program
exits with 1 when a difference is larger than that explains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the processes share the machine's cores

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

LEARNING_RATE = 3e-4  # at 1e-3 this model is at the edge of stability, where rounding grows a thousandfold in 50 steps
MAX_NORM = 1.0


@dataclass
class Curve:
    """One run, a list entry a step. plan: the layout table, where there is one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plan: str = ""

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds[1:])

    @property
    def compile_s(self) -> float:
        """What the first step took longer than the others."""
        return max(0.0, self.seconds[0] - self.step_s)


def build(args: argparse.Namespace, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """The same batches on every machine with the same Python: random windows of the standard library's source."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - args.seq, (args.steps, args.batch), generator=generator)
    return [torch.stack([text[s : s + args.seq] for s in row]) for row in starts]


def train(model: Any, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], curve: Curve, label: str = "") -> None:
    """The training program. Nothing in it knows on how many processes it runs."""
    for ids in data:
        start_s = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(loss.item())
        curve.norms.append(whole(norm).item())
        curve.seconds.append(time.perf_counter() - start_s)
        if label and len(curve.losses) % 10 == 1:
            print(f"  {label}: step {len(curve.losses) - 1:>3}  loss {curve.losses[-1]:.4f}  {curve.seconds[-1]:.2f} s", flush=True)


def whole(x: torch.Tensor) -> torch.Tensor:
    """The norm of sharded parameters is a DTensor; its value is the same on all ranks."""
    return x.full_tensor() if isinstance(x, dist.tensor.DTensor) else x


def train_plain(rank: int, args: argparse.Namespace, work: Path) -> None:
    """Plain PyTorch. Rank 1 sees the rows of each batch in reverse order; the two do not communicate."""
    torch.set_num_threads(1)
    model = build(args, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = [ids.flip(0) if rank == 1 else ids for ids in batches(args)]
    curve = Curve()
    train(model, optimizer, data, curve, "one process" if rank == 0 else "")
    (work / f"plain{rank}.json").write_text(json.dumps(asdict(curve)))


def train_parallel(rank: int, args: argparse.Namespace, work: Path, axes: dict[str, int], resume: bool) -> None:
    world = math.prod(axes.values())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

    model = autopar.compile(build(args, seed=1 if resume else 0), mesh, layout=args.layout, backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data, half, checkpoint = batches(args), args.steps // 2, str(work / "checkpoint")
    curve, label = Curve(), f"{world} processes" if rank == 0 else ""
    if resume:
        autopar.checkpoint.load(checkpoint, model, optimizer)
        train(model, optimizer, data[half:], curve, label)
    else:
        train(model, optimizer, data[:half], curve, label)
        autopar.checkpoint.save(checkpoint, model, optimizer)
        train(model, optimizer, data[half:], curve, label)
    if rank == 0:
        curve.plan = str(model.plan)
        (work / f"parallel{world}.json").write_text(json.dumps(asdict(curve)))
    dist.destroy_process_group()


def read(path: Path) -> Curve:
    return Curve(**json.loads(path.read_text()))


def sparkline(values: list[float], low: float, high: float) -> str:
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[min(7, int(8 * (v - low) / (high - low + 1e-9)))] for v in values)


def allowed(plain: list[float], reversed_rows: list[float], floor: float) -> list[float]:
    """Per step, the difference that rounding explains: 20 times what it has drifted by then, and never less than `floor`."""
    drift = itertools.accumulate((abs(a - b) for a, b in zip(plain, reversed_rows, strict=True)), max)
    return [max(floor, 20 * d) for d in drift]


def within(a: list[float], b: list[float], bound: list[float]) -> bool:
    """Whether the curves agree at every step; NaN agrees with nothing."""
    return all(abs(x - y) <= t for x, y, t in zip(a, b, bound, strict=True))


def difference(curve: Curve, plain: Curve, begin: int) -> str:
    """The largest differences from the plain run, whose step `begin` is the curve's first."""
    loss = max(abs(x - y) for x, y in zip(curve.losses, plain.losses[begin:], strict=True))
    norm = max(abs(x - y) for x, y in zip(curve.norms, plain.norms[begin:], strict=True))
    return f"largest difference from one process: loss {loss:.1e}, gradient norm {norm:.1e}"


def report(args: argparse.Namespace, work: Path, axes: dict[str, int], fewer: dict[str, int]) -> bool:
    """Prints plan, curves and speeds; returns whether the three runs are one curve."""
    out, half = Console(width=max(100, Console().width)), args.steps // 2
    many, few = math.prod(axes.values()), math.prod(fewer.values())
    plain, rows = read(work / "plain0.json"), read(work / "plain1.json")
    parallel, resumed = read(work / f"parallel{many}.json"), read(work / f"parallel{few}.json")

    print(parallel.plan)
    table = Table(title="loss")
    for heading in ("step", "one process", f"{many} processes", "difference", f"{few} processes, resumed", "difference"):
        table.add_column(heading, justify="right")
    for i in sorted({*range(0, args.steps, max(1, args.steps // 10)), half, args.steps - 1}):
        later = [f"{resumed.losses[i - half]:.6f}", f"{resumed.losses[i - half] - plain.losses[i]:+.1e}"] if i >= half else ["", ""]
        table.add_row(str(i), f"{plain.losses[i]:.6f}", f"{parallel.losses[i]:.6f}", f"{parallel.losses[i] - plain.losses[i]:+.1e}", *later)
    out.print(table)
    low, high = min(plain.losses), max(plain.losses)
    for name, curve, indent in ((" 1 process ", plain, 0), (f"{many:>2} processes", parallel, 0), (f"{few:>2} processes", resumed, half)):
        out.print(f"{name:<13}{' ' * indent}{sparkline(curve.losses, low, high)}", highlight=False, soft_wrap=True)

    speeds = Table(title=f"{os.cpu_count()} cores, one thread a process")
    for heading in ("", "tokens/s", "median step, s", "compile, s"):
        speeds.add_column(heading, justify="right" if heading else "left")
    for name, curve in (
        ("one process, eager", plain),
        (f"{many} processes, {args.backend}", parallel),
        (f"{few} processes, resumed", resumed),
    ):
        compile_s = "-" if curve is plain else f"{curve.compile_s:.1f}"
        speeds.add_row(name, f"{args.batch * args.seq / curve.step_s:,.0f}", f"{curve.step_s:.2f}", compile_s)
    out.print(speeds)

    loss_bound = allowed(plain.losses, rows.losses, 1e-5)
    norm_bound = allowed(plain.norms, rows.norms, 1e-5 * max(plain.norms))
    same = True
    for name, curve, begin in ((f"{many} processes", parallel, 0), (f"{few} processes, resumed", resumed, half)):
        ok = within(curve.losses, plain.losses[begin:], loss_bound[begin:]) and within(curve.norms, plain.norms[begin:], norm_bound[begin:])
        same = same and ok
        print(f"{name}: {difference(curve, plain, begin)}: {'rounding' if ok else 'MORE THAN ROUNDING'}")
    print(f"(one process, rows of each batch reversed: {difference(rows, plain, 0)})")
    return same


def write(args: argparse.Namespace, work: Path, axes: dict[str, int], fewer: dict[str, int], same: bool) -> None:
    """The losses of all runs, by name, and where they were made."""
    many, few = math.prod(axes.values()), math.prod(fewer.values())
    runs = {
        "one process": "plain0",
        "one process, rows reversed": "plain1",
        f"{many} processes": f"parallel{many}",
        f"{few} processes, resumed": f"parallel{few}",
    }
    result = {
        "command": shlex.join(["python", "examples/demo.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "parameters": sum(p.numel() for p in build(args, seed=0).parameters()),
        "resumed_at": args.steps // 2,
        "one_curve": same,
        "losses": {name: read(work / f"{file}.json").losses for name, file in runs.items()},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def parse_mesh(text: str | None, processes: int) -> dict[str, int]:
    """ "dp=2,tp=2" -> axes; by default one axis over all processes."""
    if text is None:
        return {"dp": processes}
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def halved(axes: dict[str, int]) -> dict[str, int]:
    """The mesh of half as many processes: the first even axis is halved."""
    first = next(name for name, size in axes.items() if size % 2 == 0)
    return {name: size // 2 if name == first else size for name, size in axes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=320, help="a multiple of 16: there are 8 heads")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4, help="an even number")
    parser.add_argument("--mesh", help="axes, such as dp=2,tp=2; by default one axis over all processes")
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--out", type=Path, help="write the curves here, as JSON")
    args = parser.parse_args()
    axes = parse_mesh(args.mesh, args.processes)
    fewer = halved(axes)

    model = build(args, seed=0)
    print(
        f"Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {args.steps} steps of {args.batch} x {args.seq} bytes of source text"
    )
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autopar-demo-") as folder:
        work = Path(folder)
        torch.multiprocessing.spawn(train_plain, (args, work), nprocs=2)
        torch.multiprocessing.spawn(train_parallel, (args, work, axes, False), nprocs=math.prod(axes.values()))
        torch.multiprocessing.spawn(train_parallel, (args, work, fewer, True), nprocs=math.prod(fewer.values()))
        same = report(args, work, axes, fewer)
        if args.out:
            write(args, work, axes, fewer, same)
    print(f"{'one curve' if same else 'THE CURVES DIFFER'}, {time.perf_counter() - start_s:.0f} s in all")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
