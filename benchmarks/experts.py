"""Where experts go as tokens, nodes and links change: the plan beside FSDP by the same prices.

    python -m benchmarks.experts --models mixtral-8x7b --clusters h100:8x8,h100:16x4 --sequences 1,4,16 --out benchmarks/results/experts.json

Every case is `autopar plan` on a flat mesh, so that the plan itself says which part of it lies in a node: once free, once with --layout fsdp. sequences: for each
device, of --tokens tokens. A model is a name or the path of a config.json. Experts are taken to be equally busy.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mixtral-8x7b")
    parser.add_argument("--clusters", default="h100:8x8")
    parser.add_argument("--sequences", default="1,4,16", help="for each device")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=60.0, help="the solver's time limit")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows = []
    for model, cluster, sequences in itertools.product(a.models.split(","), a.clusters.split(","), map(int, a.sequences.split(","))):
        row = case(model, cluster, sequences, a.tokens, a.seconds)
        rows.append(row)
        print(said(row), flush=True)
    write(a.out, "python -m benchmarks.experts", {"tokens": a.tokens, "rows": rows})


def case(model: str, cluster: str, sequences: int, tokens: int, seconds: float) -> dict[str, Any]:
    from autopar.hardware.cluster import Cluster

    devices = Cluster.of(cluster).size
    free = planned(model, cluster, devices, sequences * devices, tokens, seconds)
    fsdp = planned(model, cluster, devices, sequences * devices, tokens, seconds, "--layout", "fsdp")
    return {"model": model, "cluster": cluster, "sequences": sequences, "plan": free, "fsdp": fsdp}


def planned(model: str, cluster: str, devices: int, batch: int, tokens: int, seconds: float, *more: str) -> dict[str, Any]:
    from autopar import Plan

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-m",
            "autopar",
            "plan",
            model,
            "--cluster",
            cluster,
            "--mesh",
            str(devices),
            "--batch",
            str(batch),
            "--seq",
            str(tokens),
        ]
        begun = time.monotonic()
        done = subprocess.run([*command, "--time-limit", str(seconds), "-o", str(out), *more], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": (done.stderr.strip() or done.stdout.strip()).splitlines()[0]}
        plan = Plan.load(out)
    return {
        "step_time_s": plan.predicted["step_time_s"],
        "exposed_s": plan.predicted["exposed_s"],
        "mfu": plan.predicted["mfu"],
        "peak_memory_bytes": plan.predicted["peak_memory_bytes"],
        "gap": plan.solver["gap"],
        "experts": next((line.split("experts_v1")[1].strip() for line in done.stdout.splitlines() if " experts_v1 " in line), ""),
        "command_s": time.monotonic() - begun,
    }


def said(row: dict[str, Any]) -> str:
    def one(r: dict[str, Any]) -> str:
        return r.get("error") or f"{r['step_time_s'] * 1e3:8.1f} ms, MFU {100 * r['mfu']:.1f}%"

    plan, fsdp = row["plan"], row["fsdp"]
    by = f", {fsdp['step_time_s'] / plan['step_time_s']:.3f} times as fast" if "step_time_s" in plan and "step_time_s" in fsdp else ""
    return f"{row['model']} on {row['cluster']}, {row['sequences']} sequences a device: plan {one(plan)} ({plan.get('experts', '')}); fsdp {one(fsdp)}{by}"


if __name__ == "__main__":
    main()
