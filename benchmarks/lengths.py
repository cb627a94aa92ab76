"""Batches of all lengths: how often a model is captured and compiled, what that takes, and whether the losses are eager's.

    python -m benchmarks.lengths --model demo --number 200 --low 64 --high 512 --mesh dp=2 --out benchmarks/results/lengths.json

The same loop three times, in processes of their own with empty caches: plain eager PyTorch on one process, torch.compile on one process (its own default: sizes become
dynamic when a second one is seen), autopar on the mesh. A second eager run sees every batch with its rows in reverse order, which changes nothing but the order of sums:
how far rounding drifts. What a call took in which something was compiled, less the median call, is counted as compilation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write

ROOT = Path(__file__).resolve().parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo (that of examples/demo.py), or a name in tests/models.py")
    parser.add_argument("--number", type=int, default=200, help="of batches")
    parser.add_argument("--low", type=int, default=64, help="shortest batch")
    parser.add_argument("--high", type=int, default=512, help="longest batch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256, help="of the demo's model")
    parser.add_argument("--layers", type=int, default=4, help="of the demo's model")
    parser.add_argument("--mesh", default="dp=2", help="axes and sizes, such as dp=2,tp=2")
    parser.add_argument("--layout", default="", help="a hand layout; default: planned")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--most", action="store_true", help="state the longest batch on the first one (torch._dynamo.mark_dynamic)")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def mesh_of(a: argparse.Namespace) -> dict[str, int]:
    return {k: int(v) for k, v in (axis.split("=") for axis in a.mesh.split(","))}


def data(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls of lengths drawn from low to high."""
    import torch

    from examples import demo
    from tests.models import ZOO

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(a.low, a.high + 1, (a.number,), generator=generator).tolist()
    if a.model != "demo":
        return [ZOO[a.model].inputs(a.batch, n) for n in lengths]
    whole = demo.batches(argparse.Namespace(seq=a.high, steps=a.number, batch=a.batch))
    return [{"input_ids": ids[:, :n].contiguous(), "labels": ids[:, :n].contiguous()} for ids, n in zip(whole, lengths, strict=True)]


def build(a: argparse.Namespace) -> Any:
    import torch

    from examples import demo
    from tests.models import ZOO

    torch.manual_seed(0)
    if a.model == "demo":
        return demo.build(argparse.Namespace(hidden=a.hidden, layers=a.layers, seq=a.high), 0)
    return (
        ZOO[a.model].build(a.layers, max_position_embeddings=a.high)
        if a.model != "gpt2"
        else ZOO[a.model].build(a.layers, n_positions=a.high)
    )


def train(a: argparse.Namespace) -> dict[str, Any]:
    """One of the runs: losses, seconds of each step, and in which of them something was compiled."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    import autopar

    torch.set_num_threads(1)
    model = build(a)
    compiled = lambda: 0  # noqa: E731
    if a.child == "torch.compile":
        model.compile()
        compiled = lambda: counters["stats"]["unique_graphs"] + sum(counters["aot_autograd"].values())  # noqa: E731
    elif a.child == "autopar":
        from torch.distributed.device_mesh import init_device_mesh

        sizes = mesh_of(a)
        dist.init_process_group("gloo", init_method=f"file://{a.work}/rendezvous", rank=a.rank, world_size=math.prod(sizes.values()))
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        parallel = model = autopar.compile(model, mesh, layout=a.layout or None, backend=a.backend)
        compiled = lambda: parallel.programs.captured  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    found: dict[str, Any] = {"losses": [], "seconds": [], "compiling": []}
    for i, inputs in enumerate(data(a)):
        if a.child == "reversed":
            inputs = {k: v.flip(0) for k, v in inputs.items()}
        if a.most and i == 0:
            for t in inputs.values():
                torch._dynamo.mark_dynamic(t, 1, max=a.high)
        before, start = compiled(), time.perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["seconds"].append(time.perf_counter() - start)
        if compiled() != before:
            found["compiling"].append(i)
    if a.child == "autopar":
        programs = model.programs
        found |= {
            "programs": {"captured": programs.captured, "general": programs.general, "fixed": programs.fixed},
            "plan": model.plan.layout,
        }
        dist.destroy_process_group()
    return found


def spawn(a: argparse.Namespace, child: str) -> dict[str, Any]:
    """The run named `child`, in one process or as many as the mesh has."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "AUTOPAR_CACHE": "off", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.lengths", *sys.argv[1:], "--child", child, "--work", folder]
        ranks = range(math.prod(mesh_of(a).values()) if child == "autopar" else 1)
        processes = []
        for r in ranks:
            with Path(folder, f"{r}.txt").open("w") as out:
                processes.append(subprocess.Popen([*command, "--rank", str(r)], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT))
        codes = [p.wait() for p in processes]
        texts = [Path(folder, f"{r}.txt").read_text() for r in ranks]
        for code, text in zip(codes, texts, strict=True):
            if code:
                raise SystemExit(f"{child} exited with {code}\n{text[-4000:]}")
        result: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return result


def summary(r: dict[str, Any], eager: list[float]) -> dict[str, Any]:
    median = statistics.median(s for i, s in enumerate(r["seconds"]) if i not in r["compiling"])
    off = max(abs(x - y) / abs(y) for x, y in zip(r["losses"], eager, strict=True))
    return {
        "calls_that_compiled": r["compiling"],
        "compilation_s": sum(r["seconds"][i] - median for i in r["compiling"]),
        "median_step_s": median,
        "largest_relative_loss_difference": off,
        "last_loss": r["losses"][-1],
    }


def main() -> None:
    a = parse()
    if a.child:
        print(json.dumps(train(a)))
        return
    runs = {}
    for child in ("eager", "reversed", "torch.compile", "autopar"):
        runs[child] = spawn(a, child)
        said = summary(runs[child], runs["eager"]["losses"])
        print(
            f"{child:14} compiled in calls {said['calls_that_compiled']}, {said['compilation_s']:.1f} s; median step {said['median_step_s']:.3f} s; "
            f"losses off by {said['largest_relative_loss_difference']:.1e} of eager's",
            flush=True,
        )
    found = {child: summary(r, runs["eager"]["losses"]) for child, r in runs.items()}
    ratio = found["autopar"]["compilation_s"] / max(1e-9, found["torch.compile"]["compilation_s"])
    print(f"programs: {runs['autopar']['programs']}; compilation takes {ratio:.2f} x torch.compile's on one process")
    write(a.out, "python -m benchmarks.lengths", {"runs": found, "programs": runs["autopar"]["programs"], "compilation_ratio": ratio})


if __name__ == "__main__":
    main()
