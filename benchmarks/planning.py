"""How long a plan takes, from the start of the process to the plan on disk, how good it is said to be, and how much memory planning needs.

    python -m benchmarks.planning --out benchmarks/results/planning.json
    python -m benchmarks.planning --case llama3-8b,h100:8x8,64,64 --case llama3-8b,h100:32x8,32x8,256,layers=8 --plot growth.html

A case is model,cluster,mesh,batch[,layers=N][,seq=N][,memory=BYTES][,offload=host][,points=N]; with points it is `autopar frontier`. Sequences are of --seq tokens, the computation in bfloat16. Every case is the command
`autopar plan` in a process of its own, so the times are those a user waits. Imports are reported apart: they are torch's and
transformers', and the same for every plan. Seconds of the processor are reported beside seconds of the clock: on a busy machine only
they compare. --growth adds cases that grow in depth, axes and devices; --plot draws them. --every adds every model of autopar/models on one, two and three axes of as many nodes
as its state needs, or those of --models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write

CASES = [
    "llama3-8b,h100:8x8,64,64",
    "llama3-8b,h100:32x8,32x8,256",
    "llama3-8b,h100:32x8,32x8,32",
    "llama3-8b,h100:8x8,8x4x2,64",
    "llama3-405b,h100:512x8,64x8x8,2048",
    "llama3-70b,h100:32x8,32x8,256,offload=host",
    "llama3-70b,h100:32x8,32x8,256,memory=40GB,offload=host",
    "llama3-70b,h100:32x8,32x8,256,points=20",
    "gemma3-1b,h100:2x8,16,32",
    "gemma3-1b,h100:2x8,2x8,32",
    "gemma3-1b,h100:2x8,2x4x2,32",
    "t5-base,a100:2x8,2x8,64,seq=512",
]
GROWTH = [
    *(f"llama3-8b,h100:8x8,64,64,layers={n}" for n in (4, 8, 16, 32)),
    *(f"llama3-8b,h100:{n}x8,{n}x8,{8 * n}" for n in (2, 8, 128, 512)),
    *(f"llama3-8b,h100:8x8,{mesh},64" for mesh in ("64", "8x8", "8x4x2", "4x4x2x2")),
]
STAGE = re.compile(r"^(.+): ([0-9.]+) s$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=60.0, help="the solver's time limit")
    parser.add_argument("--repetitions", type=int, default=1, help="the fastest by the clock is reported")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--models", default="", help="of --every, comma-separated")
    parser.add_argument("--plot", type=Path, help="where to draw growth (HTML)")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    cases = [
        *(a.case or ([] if a.every or a.growth else CASES)),
        *(GROWTH if a.growth else []),
        *(every(a.models, a.seq) if a.every else []),
    ]
    rows = []
    for case in dict.fromkeys(cases):
        row = min((measured(case, a.seq, a.seconds) for _ in range(a.repetitions)), key=lambda r: r["command_s"])
        rows.append(row)
        print(said(row), flush=True)
    write(a.out, "python -m benchmarks.planning", {"seq": a.seq, "rows": rows})
    if a.plot:
        draw(rows, a.plot)


def every(names: str, seq: int) -> list[str]:
    """Cases of models on 8 devices a node, of which parameters, gradients and AdamW's state in mixed precision fill two fifths at most, two sequences a device."""
    from autopar.models.configs import build, config
    from autopar.models.table import TABLE
    from benchmarks.layouts import positions

    found = []
    for name in filter(None, names.split(",")) if names else TABLE:
        state = 18 * sum(p.numel() for p in build(config(name)).parameters())
        nodes = 2
        while state > 0.4 * nodes * 8 * 80e9:
            nodes *= 2
        meshes = (f"{8 * nodes}", f"{nodes}x8", f"{nodes}x4x2")
        found += [f"{name},h100:{nodes}x8,{mesh},{16 * nodes},seq={positions(name, seq)}" for mesh in meshes]
    return found


def command_of(case: str, seq: int, seconds: float, out: Path) -> list[str]:
    """The command that plans a case into the file `out`."""
    model, cluster, mesh, batch, *more = case.split(",")
    seq = next((int(o.split("=")[1]) for o in more if o.startswith("seq=")), seq)
    more = [o for o in more if not o.startswith("seq=")]
    options = {"layers": "--layers", "memory": "--memory", "offload": "--offload", "points": "--points"}
    frontier = any(o.startswith("points=") for o in more)
    command = [sys.executable, "-m", "autopar", "frontier" if frontier else "plan", model, "--cluster", cluster, "--mesh", mesh]
    command += ["--batch", batch, "--seq", str(seq), "--time-limit", str(seconds), "--out" if frontier else "-o", str(out)]
    for o in more:
        key, value = o.split("=")
        command += [options[key], value]
    return command


def measured(case: str, seq: int, seconds: float) -> dict[str, Any]:
    frontier = "points=" in case
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [*command_of(case, seq, seconds, out), "-v"]  # stages are told
        start = time.perf_counter()
        with (Path(folder) / "said").open("w+") as said_to:
            process = subprocess.Popen(command, stdout=said_to, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            command_s = time.perf_counter() - start
            said_to.seek(0)
            text = said_to.read()
        if process.returncode:
            return {"case": case, "command_s": command_s, "error": text.strip()[-500:]}
        made = json.loads(out.read_text())
    stages: dict[str, float] = {}
    for line in text.splitlines():
        if found := STAGE.match(line.strip()):
            stages[found[1]] = stages.get(found[1], 0.0) + float(found[2])
    imports = sum(s for name, s in stages.items() if "imports" in name)
    row = {
        "case": case,
        "command_s": round(command_s, 2),
        "imports_s": round(imports, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_GB": round(used.ru_maxrss / 1e6, 2),
        "stages": stages,
    }
    if frontier:
        points = made["points"]
        ends = [(p["peak_memory_bytes"], p["step_time_s"]) for p in (points[0], points[-1])]
        return {**row, "points": len(points), "fastest": ends[0], "least": ends[1], "largest_gap": max(p["gap"] for p in points)}
    plan = made["plan"]
    return {
        **row,
        "step_time_s": plan["predicted"]["step_time_s"],
        "gap": plan["solver"]["gap"],
        "stopped_by": plan["solver"]["stopped_by"],
        "variables": plan["solver"]["variables"],
    }


def said(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"{r['case']}: failed after {r['command_s']:.1f} s: {r['error']}"
    rest = r["command_s"] - r["imports_s"]
    took = f"{r['case']}: {rest:.1f} s beside {r['imports_s']:.1f} s of imports ({r['cpu_s']:.1f} s of the processor in all), {r['peak_GB']:.2f} GB"
    if "points" in r:
        (most, fast_s), (least, slow_s) = r["fastest"], r["least"]
        return (
            f"{took}, {r['points']} points from {most / 1e9:.1f} GB, {fast_s * 1e3:,.1f} ms to {least / 1e9:.1f} GB, {slow_s * 1e3:,.1f} ms, "
            f"gaps at most {r['largest_gap']:.2%}"
        )
    return f"{took}, step {r['step_time_s'] * 1e3:,.1f} ms, gap {r['gap']:.2%}, {r['variables']} variables, stopped by {r['stopped_by']}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=3, subplot_titles=("layers", "axes", "devices"), shared_yaxes=True)
    points: dict[int, list[tuple[float, float, str]]] = {1: [], 2: [], 3: []}
    for r in rows:
        if "error" in r or "points" in r or "offload" in r["case"]:
            continue
        parts = r["case"].split(",")
        sizes = [int(n) for n in parts[2].split("x")]
        devices, layers = 1, next((int(p.split("=")[1]) for p in parts if p.startswith("layers=")), 32)
        for n in sizes:
            devices *= n
        point = r["command_s"] - r["imports_s"], r["case"]
        if parts[0] == "llama3-8b":
            if devices == 64 and len(sizes) == 1:
                points[1].append((layers, *point))
            if devices == 64 and layers == 32:
                points[2].append((len(sizes), *point))
            if len(sizes) == 2 and layers == 32:
                points[3].append((devices, *point))
    for column, found in points.items():
        found.sort()
        x, y, text = [p[0] for p in found], [p[1] for p in found], [p[2] for p in found]
        figure.add_trace(go.Scatter(x=x, y=y, text=text, mode="lines+markers", showlegend=False), row=1, col=column)
    figure.update_yaxes(title_text="seconds, without imports", rangemode="tozero", row=1, col=1)
    figure.write_html(path, include_plotlyjs="cdn")


if __name__ == "__main__":
    main()
