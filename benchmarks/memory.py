"""Time at equal memory: the plan against every way to save activation memory that people use. It should never be slower.

    python -m benchmarks.memory --models gpt2,llama3-8b,qwen3-0.6b,bert-base,t5-base --layers 4 --cluster h100:1
    python -m benchmarks.memory --models gpt2,llama3-8b,bert-base --measure --width 256 --batch 8 --sequence 256 --cluster cpu:1

`benchmarks.baselines` has the ways, all their settings. Each is a choice of what forward keeps; as a plan it goes through our passes and is priced by our
simulator, which gives its peak and its time. Then the planner is asked for the best plan within that peak, without and with host memory, and the simulator
prices that too. A setting is dominated if our simulated peak is no higher and our time is at most theirs, within the gap of the plan. The simulator
counts some memory that the program does not (`docs/architecture.md`): where our peak comes out higher, the planner is asked again for less, and the
budget that it took is in the result.

--fusion says what recomputation costs: "planned", as the integer program knows it, or "compiled", as a compiler fuses it with backward, which the
program does not know (`baselines/again.py`); both sides are priced alike. Nothing is run but under --measure, which compares at equal measured memory
(`baselines/measure.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.layouts import positions
from benchmarks.record import write

MEDIA: dict[str, tuple[str, ...]] = {"ours": (), "ours, host": ("host",)}
VERSIONS = ("ortools", "transformers", "networkx", "numpy")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", default="gpt2,llama3-8b,qwen3-0.6b,bert-base,t5-base", help="names in autopar.models.configs, comma-separated"
    )
    parser.add_argument("--layers", type=int, default=4, help="of each model")
    parser.add_argument("--batch", type=int, default=16, help="global")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence, fewer where the model has no more positions")
    parser.add_argument("--dropout", type=float, help="probability, for all that a model drops; default: as the model has it")
    parser.add_argument("--cluster", default="h100:1", help="of autopar.hardware.cluster")
    parser.add_argument("--mesh", default="1", help="axis sizes, as 8 or 4x2: dp, tp")
    parser.add_argument("--layout", default="ddp", help="of the baselines, on more than one device")
    parser.add_argument("--families", default="", help="of the baselines, comma-separated; default all")
    parser.add_argument("--budgets", default="0.1,0.3,0.5,0.7,0.9", help="of torch's memory budget and of the ranking by density")
    parser.add_argument("--solvers", default="dp,greedy", help='of the memory budget: "dp", "greedy", "ilp" (needs scipy)')
    parser.add_argument("--media", default="none,host", help="where our plans may keep activations besides the device")
    parser.add_argument("--fusion", default="planned,compiled", help="what recomputation costs")
    parser.add_argument("--seconds", type=float, default=30.0, help="the solver's time limit for one plan")
    parser.add_argument("--gap", type=float, default=0.001, help="how near the bound each plan shall be")
    parser.add_argument("--measure", action="store_true", help="also run the plans, on this machine's CPU")
    parser.add_argument("--width", type=int, help="hidden size, all else in proportion; default: the model's")
    parser.add_argument("--repeats", type=int, default=15, help="of what is measured")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--plot", type=Path, help="where to write the plot (HTML; needs plotly)")
    return parser.parse_args()


def settings(a: argparse.Namespace) -> tuple[Sequence[str], Sequence[float], Sequence[str]]:
    """Families, budgets and solvers of the baselines."""
    from benchmarks.baselines import FAMILIES

    return a.families.split(",") if a.families else FAMILIES, [float(x) for x in a.budgets.split(",")], a.solvers.split(",")


def captured(model: str, a: argparse.Namespace, precision: str = "bfloat16", fuses: bool = True) -> Any:
    from benchmarks.baselines.program import public

    axes = dict(zip(("dp", "tp"), map(int, a.mesh.split("x")), strict=False))
    return public(model, a.layers, a.batch, positions(model, a.sequence), axes, a.cluster, a.layout, a.dropout, precision, fuses, a.width)


def compare(program: Any, fusion: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every setting of every baseline."""
    from benchmarks.baselines import baselines
    from benchmarks.baselines.ours import Ours, verdict

    wanted = {n: MEDIA[n] for n in MEDIA if ("host" if MEDIA[n] else "none") in a.media.split(",")}
    ours = {n: Ours(program, fusion, media, a.seconds, a.gap) for n, media in wanted.items()}
    points: dict[frozenset[str], Any] = {}
    rows = []
    for b in baselines(program, *settings(a)):
        if b.saved not in points:
            points[b.saved] = program.point(program.keeping(b.saved), fusion)
        theirs = points[b.saved]
        row = {"family": b.family, "setting": b.setting, "fusion": fusion, "theirs": asdict(theirs)}
        for name, planner in ours.items():
            _, said = planner.within(theirs.peak_bytes, theirs.step_s)
            row[name] = said | verdict(theirs.step_s, said)
        rows.append(row)
        told = ", ".join(f"{n} {row[n]['ratio'] or 0:.4f} in {row[n]['seconds']:.0f} s, {row[n]['tries']} tries" for n in ours)
        print(f"{b.family}, {b.setting}: {told}", file=sys.stderr, flush=True)
    return rows


# ---- what people see ---------------------------------------------------------------------------------------------


def show(model: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = [n for n in MEDIA if n in rows[0]]
    table = Table(title=f"{model}, fusion as {rows[0]['fusion']}: step in ms at the baseline's peak", title_justify="left")
    for column in ("baseline", "setting", "peak GB", "theirs", *(c for n in names for c in (n, "by theirs"))):
        table.add_column(column, justify="left" if column in ("baseline", "setting") else "right")
    for r in rows:
        cells = []
        for n in names:
            mine = r[n]
            ok = mine["ratio"] is not None
            cells += [
                f"{1e3 * mine['step_s']:.2f}" if ok else "-",
                f"{mine['ratio']:.4f}{'' if mine['dominated'] else ' SLOWER'}" if ok else "no plan",
            ]
        table.add_row(r["family"], r["setting"], f"{r['theirs']['peak_bytes'] / 1e9:.3f}", f"{1e3 * r['theirs']['step_s']:.2f}", *cells)
    Console(width=150).print(table)
    for n in names:
        for r in rows:
            if not r[n]["dominated"]:
                what = f"{r[n]['ratio']:.4f} of its time" if r[n]["ratio"] is not None else r[n]["why"]
                print(f"  {n}: not {r['family']}, {r['setting']}: {what}")


def plot(out: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Step time over peak memory, a panel for every model and kind of price."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"{r['model']}, fusion as {r['fusion']}" for r in runs]
    figure = make_subplots(rows=len(runs), cols=1, subplot_titles=titles, vertical_spacing=0.3 / max(len(runs), 2))
    families = list(dict.fromkeys(row["family"] for r in runs for row in r["rows"]))
    for i, r in enumerate(runs, 1):
        series = {f: [(x["theirs"], x["setting"]) for x in r["rows"] if x["family"] == f] for f in families}
        series |= {n: [(x[n], "") for x in r["rows"] if n in x and x[n]["ratio"] is not None] for n in MEDIA}
        for name, found in series.items():
            found = sorted(found, key=lambda x: x[0]["peak_bytes"]) if name in MEDIA else found
            figure.add_trace(
                go.Scatter(
                    x=[p["peak_bytes"] / 1e9 for p, _ in found], y=[1e3 * p["step_s"] for p, _ in found], text=[s for _, s in found],
                    name=name, legendgroup=name, showlegend=i == 1, mode="lines+markers" if name in MEDIA else "markers",
                ), row=i, col=1,
            )  # fmt: skip
        figure.update_xaxes(title_text="peak, GB", row=i, col=1)
        figure.update_yaxes(title_text="step, ms", row=i, col=1)
    figure.update_layout(height=480 * len(runs), width=1100)
    figure.write_html(out, include_plotlyjs="cdn")


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model, kind of price, family and medium: settings, how many are dominated, the worst ratio."""
    out = []
    for r in runs:
        for family in dict.fromkeys(row["family"] for row in r["rows"]):
            for n in MEDIA:
                mine = [row[n] for row in r["rows"] if row["family"] == family and n in row]
                ratios = [m["ratio"] for m in mine if m["ratio"] is not None]
                if mine:
                    out.append({
                        "model": r["model"], "fusion": r["fusion"], "family": family, "plans": n, "settings": len(mine),
                        "dominated": sum(m["dominated"] for m in mine), "without_plan": len(mine) - len(ratios),
                        "best_ratio": min(ratios, default=None), "worst_ratio": max(ratios, default=None),
                    })  # fmt: skip
    return out


def main() -> None:
    a = parse()
    runs: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    for model in a.models.split(","):
        if a.measure:
            from benchmarks.baselines.measure import measure

            p = captured(model, a, "float32", fuses=False)
            measured.append({"model": model, **measure(p, settings(a), a.seconds, a.gap, a.repeats)})
            keep(a, runs, measured)
            continue
        p = captured(model, a)
        for fusion in a.fusion.split(","):
            rows = compare(p, fusion, a)
            show(model, rows)
            runs.append({"model": model, "fusion": fusion, "sequence": positions(model, a.sequence), "rows": rows})
            keep(a, runs, measured)
    keep(a, runs, measured)
    if a.plot is not None and runs:
        plot(a.plot, runs)


def keep(a: argparse.Namespace, runs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """What there is so far."""
    versions = {n: importlib.metadata.version(n) for n in VERSIONS}
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    result = {"versions": versions, "arguments": arguments, "summary": summary(runs), "runs": runs, "measured": measured}
    write(a.out, "python -m benchmarks.memory", result)


if __name__ == "__main__":
    main()
