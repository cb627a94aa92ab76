"""How lowering time grows with depth: each distinct layer should be lowered once.

    python -m benchmarks.compile_time --model llama --layers 2,8,32 --mesh dp=1 --size hidden_size=128 --size intermediate_size=256

Every depth runs in processes of its own that share one fresh Inductor folder. The first builds the C++ kernels and is not counted;
the following ones find those built but have Inductor's graph cache off, so that they lower everything again. The process is rank 0 of a world
of fake ranks of the mesh's size: nothing is communicated, the graphs are those of a real run. Reported apart: all before lowering
(capture, plan, passes), and lowering of forward and backward with its counts of layers and distinct bodies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
    parser.add_argument("--model", default="llama", help="a name in tests/models.py")
    parser.add_argument("--layers", default="2,32", help="depths, comma-separated")
    parser.add_argument("--mesh", default="dp=1", help="axes and sizes, such as dp=2,tp=4")
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--size", action="append", default=[], metavar="NAME=VALUE", help="an argument of the model's config")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--child", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """One process: compiles the model of `a.child` layers."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    import autopar
    from tests.models import ZOO

    torch.set_num_threads(a.threads)
    mesh = {k: int(v) for k, v in (axis.split("=") for axis in a.mesh.split(","))}
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=math.prod(mesh.values()))
    torch.manual_seed(0)
    zoo = ZOO[a.model]
    sizes = {k: int(v) for k, v in (s.split("=") for s in a.size)}
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    # inputs="local": fake ranks cannot agree on a hash of the batch.
    model = autopar.compile(zoo.build(a.child, **sizes).train(), device_mesh, layout=a.layout, inputs="local", **zoo.compile)
    start = time.perf_counter()
    step = model.prepare(**zoo.inputs(a.batch, a.seq))
    parts = [("forward", step.lowered.stats)]
    if step.has_backward:
        parts.append(("backward", step.backward_of(True, False)[1].stats))
    total_s = time.perf_counter() - start
    lower_s = sum(s["seconds"] for _, s in parts)
    dist.destroy_process_group()
    return {"layers": a.child, "before_lowering_s": total_s - lower_s, "lowering_s": lower_s, **dict(parts)}


def spawn(argv: list[str], layers: int, folder: str) -> dict[str, Any]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.compile_time", *argv, "--child", str(layers)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    a = parse()
    if a.child is not None:
        print(json.dumps(measure(a)))
        return
    depths = [int(x) for x in a.layers.split(",")]
    runs: list[dict[str, Any]] = []
    for layers in depths:
        with tempfile.TemporaryDirectory() as folder:
            spawn(sys.argv[1:], layers, folder)
            for _ in range(a.repetitions):
                runs.append(spawn(sys.argv[1:], layers, folder))
                r = runs[-1]
                counts = ", ".join(f"{k} {r[k]['layers']} layers as {r[k]['distinct_layers']}" for k in ("forward", "backward") if k in r)
                print(
                    f"{layers:4d} layers: before {r['before_lowering_s']:6.1f} s, lowering {r['lowering_s']:6.1f} s ({counts})", flush=True
                )
    best = {d: min(r["lowering_s"] for r in runs if r["layers"] == d) for d in depths}
    print(f"lowering {depths[-1]} layers takes {best[depths[-1]] / best[depths[0]]:.2f} x the time of {depths[0]}")
    write(a.out, "python -m benchmarks.compile_time", {"runs": runs})


if __name__ == "__main__":
    main()
