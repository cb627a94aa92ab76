"""The figures of docs/benchmarks.md, as SVG. The same results make the same files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.page import SOURCES

Result = dict[str, Any]
COLORS = ("#1565c0", "#c62828", "#2e7d32", "#ef6c00", "#6a1b9a", "#455a64")
MARKS = ("o", "s", "^", "D", "v", "P")


def draw(results: dict[str, Result], folder: Path) -> None:
    """Writes predicted.svg, memory.svg and planning.svg."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, ids and dates do not change from run to run; a white ground reads on light and dark pages alike.
    matplotlib.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": "autopar", "font.size": 9, "font.family": "sans-serif", "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 7.5, "savefig.facecolor": "white",
    }  # fmt: skip
    for name, plot in (("predicted", predicted), ("memory", memory), ("planning", planning)):
        figure = plot(results)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        tidy(folder / f"{name}.svg")


def predicted(results: dict[str, Result]) -> Any:
    """Step times, published on the left and run on this machine on the right; on the line they agree."""
    from matplotlib.ticker import FixedLocator, NullFormatter

    figure, (left, right) = _axes(2, (8.4, 3.9))
    by: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in results["published"]["rows"]:
        by[r["row"].split(":")[0]].append((r["measured_s"], r["measured_s"] * (1 + r["random parts of each source left out"])))
    _agreement(left, {SOURCES[k]: v for k, v in by.items()}, "published step, s", "predicted step, s (row left out of the fit)")
    by.clear()
    for name in ("steps", "steps_4"):
        for c in results[name]["cases"]:
            by[f"{c['processes']} processes" if c["processes"] > 1 else "1 process"].append((c["measured_s"], c["predicted_s"]))
    _agreement(right, by, "measured step on two cores, s", "predicted step, s")
    left.set_title("GPUs, published by others")
    right.set_title("CPU, measured here")
    for axis in (right.xaxis, right.yaxis):  # less than a decade: powers of ten would say little
        axis.set_major_locator(FixedLocator([0.2, 0.3, 0.4, 0.6]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    return figure


def _agreement(axes: Any, by: dict[str, list[tuple[float, float]]], x: str, y: str) -> None:
    every = [v for points in by.values() for p in points for v in p]
    ends = [min(every) * 0.9, max(every) * 1.1]
    axes.plot(ends, ends, color="#9e9e9e", linewidth=1, zorder=1)
    for i, (name, points) in enumerate(by.items()):
        axes.scatter(*zip(*points, strict=True), s=14, alpha=0.7, color=COLORS[i], marker=MARKS[i], linewidths=0, label=name, zorder=2)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y, xlim=ends, ylim=ends)
    axes.legend(loc="upper left")


def memory(results: dict[str, Result]) -> Any:
    """Our time over theirs at their peak, by how much of the memory of saving everything that peak is."""
    figure, panels = _axes(2, (8.4, 3.5), sharey=True)
    for axes, fusion in zip(panels, ("planned", "compiled"), strict=True):
        runs = [r for n in ("memory", "memory_t5") for r in results[n]["runs"] if r["fusion"] == fusion]
        for i, r in enumerate(runs):
            whole = next(x["theirs"]["peak_bytes"] for x in r["rows"] if x["family"] == "none")
            points = [(x["theirs"]["peak_bytes"] / whole, x["ours"]["ratio"]) for x in r["rows"]]
            axes.scatter(*zip(*points, strict=True), s=16, alpha=0.75, color=COLORS[i], marker=MARKS[i], linewidths=0, label=r["model"])
        axes.axhline(1.0, color="#9e9e9e", linewidth=1, zorder=1)
        axes.set(title=f"priced as {fusion}", xlabel="peak, as a share of that of saving everything")
    panels[0].set_ylabel("plan's time / theirs, at their peak")
    panels[0].legend(loc="lower right")
    return figure


def planning(results: dict[str, Result]) -> Any:
    """Seconds of planning, imports not counted, over what grows."""
    figure, panels = _axes(3, (8.4, 2.9), sharey=True)
    grown: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in results["planning_growth"]["rows"]:
        _, cluster, mesh, _, *more = r["case"].split(",")
        took, axes = r["command_s"] - r["imports_s"], len(mesh.split("x"))
        nodes, each = (int(n) for n in cluster.split(":")[1].split("x"))
        layers = next((int(m.split("=")[1]) for m in more if m.startswith("layers=")), None)
        if layers:
            grown["layers, 64 devices on one axis"].append((layers, took))
        elif axes == 2:
            grown["devices, on two axes"].append((nodes * each, took))
        if not layers and nodes * each == 64:
            grown["mesh axes, 64 devices"].append((axes, took))
    for axes, (name, points) in zip(panels, sorted(grown.items(), key=lambda g: g[0].startswith("mesh")), strict=True):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, color=COLORS[0])
        if not name.startswith("mesh"):
            axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:,}" for x in xs])
        axes.minorticks_off()
        axes.set(xlabel=name)
    panels[0].set_ylabel("seconds, without imports")
    panels[0].set_ylim(0, 1.1 * max(took for points in grown.values() for _, took in points))
    return figure


def _axes(n: int, inches: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots(1, n, **options)


def tidy(path: Path) -> None:
    """No blanks at the ends of lines, where matplotlib leaves some."""
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text(encoding="utf-8").splitlines()), encoding="utf-8")
