"""How compile time grows with depth, how many distinct layers are lowered, who compiles and who hits the cache.

    python benchmarks/compile_time.py [--model llama] [--layers 2,8,32] [--width 128] [--mesh 4] [--layout fsdp] [--out results.json]

Each depth is lowered in a process of its own, twice, with Inductor's graph cache off: the first fills the cache of compiled C++ kernels, the
second is reported (cold, g++ dominates and hides the growth). Then, with a fresh graph cache, the mesh's processes start together, and start
again. Times are of lowering, capture apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

CHILD = """
import json, sys, time
sys.path.insert(0, {root!r})
import torch, autopar
torch.set_num_threads(1)
from tests.models import ZOO
model, layers, sizes, layout, width = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.manual_seed(0)
kw = {{"hidden_size": width, "intermediate_size": 2 * width}} if model in ("llama", "qwen3") else {{"n_embd": width}} if model == "gpt2" else {{}}
m = ZOO[model].build(layers, **kw).train()
inputs = ZOO[model].inputs(8, 32)
p = autopar.compile(m, tuple(sizes), layout=layout, **ZOO[model].compile)
start = time.perf_counter()
step = p.prepare(**inputs)
prepared = time.perf_counter() - start
out = p(**inputs)
(out if ZOO[model].compile else out.loss).backward()
s = p.stats["0"]
print("RESULT " + json.dumps({{"prepare_s": prepared, "forward": s["forward"], "backward": list(s["backward"].values())[0]}}), flush=True)
"""


def start(arguments: list[str], processes: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    code = CHILD.format(root=str(ROOT))
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as f:
        f.write(code)
    launcher = (
        [sys.executable]
        if processes == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    done = subprocess.run(
        [*launcher, f.name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    os.unlink(f.name)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [json.loads(line.split("RESULT ", 1)[1]) for line in done.stdout.splitlines() if "RESULT " in line]


def seconds(r: dict[str, Any]) -> float:
    return float(r["forward"]["seconds"] + r["backward"]["seconds"])


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="llama")
    a.add_argument("--layers", default="2,8,32")
    a.add_argument("--width", type=int, default=128)
    a.add_argument("--mesh", default="4")
    a.add_argument("--layout", default="fsdp")
    a.add_argument("--out")
    o = a.parse_args()
    import torch

    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/compile_time.py", *sys.argv[1:]]), "torch": torch.__version__,
        "python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores", "depth": {}, "cache": {},
    }  # fmt: skip
    layers = [int(n) for n in o.layers.split(",")]
    for n in layers:
        arguments = [o.model, str(n), "[1]", o.layout, str(o.width)]
        for _ in range(2):
            (r,) = start(arguments, 1, {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"})
        result["depth"][n] = {
            "lowering_s": seconds(r),
            **{k: {x: r[k][x] for x in ("seconds", "nodes", "distinct_layers", "layers")} for k in ("forward", "backward")},
        }
        print(
            f"{n:>4} layers: lowering {seconds(r):6.2f} s, distinct bodies {r['forward']['distinct_layers']} forward, {r['backward']['distinct_layers']} backward"
        )
    result["ratio"] = result["depth"][layers[-1]]["lowering_s"] / result["depth"][layers[0]]["lowering_s"]
    print(f"{layers[-1]} layers against {layers[0]}: {result['ratio']:.2f} x")
    sizes = [int(s) for s in o.mesh.split(",")]
    processes = 1
    for s in sizes:
        processes *= s
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first start", "second start"):
            ranks = start(
                [o.model, str(layers[0]), json.dumps(sizes), o.layout, str(o.width)], processes, {"TORCHINDUCTOR_CACHE_DIR": cache}
            )
            counts = [{k: r["forward"][k] + r["backward"][k] for k in ("hit", "miss", "bypass")} for r in ranks]
            result["cache"][name] = counts
            print(
                f"{name} on {o.mesh}: {sum(c['miss'] > 0 for c in counts)} ranks compiled, {sum(c['miss'] == 0 and c['hit'] > 0 for c in counts)} hit the cache; {counts}"
            )
    if o.out:
        Path(o.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
