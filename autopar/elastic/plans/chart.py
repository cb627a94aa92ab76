"""What failures cost, as a picture: where the seconds of each way go, and how far it is behind a run in which nothing fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from autopar.elastic.plans.goodput import Simulation
from autopar.elastic.plans.ledger import Seconds
from autopar.errors import AutoparError

FORMS = (".svg", ".png", ".pdf")
COLORS = ("#455a64", "#1565c0", "#2e7d32", "#ef6c00", "#c62828", "#6a1b9a", "#00838f")
CAUSES = {
    "slower": "units are missing", "copies": "copies", "writing": "writing checkpoints", "lost": "done in vain", "recovering": "recovering", "waiting": "waiting for units",
}  # fmt: skip
assert {"useful", *CAUSES} == Seconds().named().keys()


def refuse(path: Path) -> None:
    """Raises AutoparError where no picture can be drawn there: said before minutes are spent on what it shows."""
    if path.suffix not in FORMS:
        raise AutoparError(f"no picture is called {path.name!r}", where="--plot", fix=f"name a file that ends in {', '.join(FORMS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise AutoparError("a plot needs matplotlib, which is not installed", where="--plot", fix="pip install 'autopar[report]'")


def draw(found: Simulation, path: Path) -> None:
    """Writes an SVG, PNG or PDF, by the path's ending. The same simulation makes the same SVG."""
    refuse(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "autopar",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "savefig.facecolor": "white",
    }
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(10.5, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        _shares(left, found)
        _behind(right, found)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":  # no blanks at the ends of lines, where matplotlib leaves some
        text = path.read_text(encoding="utf-8")
        path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")


def _shares(axes: Any, found: Simulation) -> None:
    outcomes = found.outcomes[1:]
    at = list(range(len(outcomes)))
    before = [0.0] * len(outcomes)
    for (cause, said), color in zip(CAUSES.items(), COLORS, strict=False):
        shares = [100 * o.seconds.named()[cause] / o.seconds.total for o in outcomes]
        axes.barh(at, shares, left=before, color=color, label=said, height=0.7)
        before = [a + b for a, b in zip(before, shares, strict=True)]
    axes.set_yticks(at, [o.name for o in outcomes])
    axes.invert_yaxis()
    axes.set_xlabel("% of the time that is not goodput")
    axes.legend(fontsize=7.5)


def _behind(axes: Any, found: Simulation) -> None:
    for o, color in zip(found.outcomes[1:], COLORS, strict=False):
        days = [t / 86400 for t, _ in o.course]
        axes.plot(days, [(t - useful) / 3600 for t, useful in o.course], label=o.name, color=color, linewidth=1.2)
    axes.set(xlabel="days", ylabel="hours of steps behind a run without failures", xlim=(0, found.days))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7.5)
