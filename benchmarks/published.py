"""The cost model against published training runs: fitted on some, asked about others.

    python -m benchmarks.published --out benchmarks/results/published.json --plot predicted.html
    python -m benchmarks.published --folder DIR --constants benchmarks/results/published.json      predicts rows it was not fitted to

Rows are CSV files (`benchmarks/data/published/README.md` has the columns); one that cannot be read or priced is listed with the reason and left out, and
what was assumed where rows do not say is listed by file. The constants are those of `autopar.predict.fit`. Reported: errors of step times, of rows fitted to, of random fifths left out (of all rows together, where a part may have most of a
source's few rows, and of each source's rows by themselves; both parted several times), of whole sources left
out (a framework that was never seen has no slowdown), and of rows left out by name (--without); errors of peak memory, to which nothing is fitted; who runs out of memory; and within each
sweep how layouts are ranked.

--kept: a folder that keeps the solved micro-batches; without it every program is captured and solved anew (about 5 s each on one core).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import AutoparError
from autopar.predict.fit import Fit, Run, fit
from autopar.predict.step import step
from benchmarks.record import write
from benchmarks.runs import DATA, Programs, Row, assumed, reason, rows

# Where the constants start: what they were believed to be before these rows were fitted to. The cluster files ship what this fit found, so they are no such belief.
BELIEVED = {
    "matmul A": 0.78, "matmul H": 0.63, "attention A": 0.6, "attention H": 0.41, "memory": 0.75, "matmul memory": 0.56, "intra": 0.75, "inter": 0.8,
    "tensor hidden": 0.64, "data exposed": 0.47,
}  # fmt: skip
SWEEP = 8  # rows that ran, at least, of which ranks are said
TOP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DATA, help="CSV files of rows")
    parser.add_argument("--sources", default="", help="only these files, by name and comma")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--constants", type=Path, help="a result of this benchmark: nothing is fitted")
    parser.add_argument("--folds", type=int, default=5, help="random parts of the rows")
    parser.add_argument("--repeats", type=int, default=4, help="times that rows are parted")
    parser.add_argument(
        "--without", action="append", default=[], help="rows left out together: a regular expression that their labels match"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="predicted against measured (HTML)")
    a = parser.parse_args()
    found, left = rows(a.folder)
    wanted = set(a.sources.split(",")) if a.sources else {r.source for r in found}
    found = [r for r in found if r.source in wanted]
    programs = Programs(a.kept)
    found, refused = priced(found, programs)
    left += refused
    timed = [r for r in found if r.step_s]
    runs = [programs.run(r) for r in timed]
    if a.constants:
        kept = json.loads(a.constants.read_text())["constants"]
        made = Fit({k: v["value"] for k, v in kept.items()}, {k: v["relative_sd"] for k, v in kept.items()})
        errors = {"predicted": [x.predicted_s(made.values) / x.step_s - 1 for x in runs]}
    else:
        made = fit(runs, None, lambda i, e: print(f"round {i}: mean error {e:.2%}", flush=True), BELIEVED)
        errors = {
            "fitted": [x.predicted_s(made.values) / x.step_s - 1 for x in runs],
            "random parts left out": [e for seed in range(a.repeats) for e in left_out(runs, parts(len(runs), a.folds, seed))],
            "random parts of each source left out": [
                e for seed in range(a.repeats) for e in left_out(runs, parts_of_each(by_source(timed), a.folds, seed))
            ],
            "sources left out": left_out(runs, by_source(timed)) if len(wanted) > 1 else [float("nan")] * len(runs),
        } | {f"left out: {pattern}": left_out(runs, [named(timed, pattern)]) for pattern in a.without}
    print(made)
    by = {how: summary(timed, e) for how, e in errors.items()}
    errors = {how: [sum(e[i :: len(timed)]) * len(timed) / len(e) for i in range(len(timed))] for how, e in errors.items()}
    best = list(errors.values())[min(1, len(errors) - 1)]
    memory = [
        (r, step(programs.of(r), r.layout, r.runtime, r.cluster, r.global_batch).fullest_bytes / r.peak_bytes - 1)
        for r in found
        if r.peak_bytes
    ]
    told = assumed(found)
    result = {
        "constants": {n: {"value": v, "relative_sd": made.relative_sd.get(n, 0.0)} for n, v in sorted(made.values.items())},
        "step time": by,
        "peak memory": summary([r for r, _ in memory], [e for _, e in memory]) if memory else {},
        "out of memory": out_of_memory(found, programs),
        "ranks": ranks(timed, runs, best),
        "assumed": told,
        "not priced": left,
        "rows": [
            {"row": r.label, "measured_s": r.step_s, **{how: e[i] for how, e in errors.items()}} for i, r in enumerate(timed)
        ],
    }  # fmt: skip
    for how, groups in by.items():
        print(f"step time, {how}:")
        for source, s in groups.items():
            print(
                f"  {source:<22} {s['rows']:4d} rows: mean {s['mean']:.1%}, median {s['median']:.1%}, max {s['max']:.1%}, bias {s['bias']:+.1%}"
            )
    for key in ("peak memory", "out of memory", "ranks"):
        print(f"{key}: {json.dumps(result[key], default=float)}")
    print("\n  ".join(["assumed:", *told]))
    print("\n  ".join([f"not priced: {len(left)} rows", *left]))
    write(a.out, "python -m benchmarks.published", result)
    if a.plot and timed:
        draw(timed, [x.step_s for x in runs], best, a.plot)


def priced(found: Sequence[Row], programs: Programs) -> tuple[list[Row], list[str]]:
    """Rows that can be priced, and the others with the reason: what a layout cannot do is known only once its micro-batch is solved."""
    done: list[Row] = []
    left: list[str] = []
    start = time.perf_counter()
    for i, row in enumerate(found):
        try:
            programs.run(row).predicted({})
            done.append(row)
        except AutoparError as e:
            left.append(f"{row.place}: {reason(e)}")
        if i % 25 == 24 or i + 1 == len(found):
            print(f"{i + 1} of {len(found)} rows, {len(programs.known)} micro-batches, {time.perf_counter() - start:.0f} s", flush=True)
    return done, left


def parts(n: int, folds: int, seed: int) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(n)
    return [sorted(map(int, order[k::folds])) for k in range(folds)]


def parts_of_each(sources: Sequence[Sequence[int]], folds: int, seed: int) -> list[list[int]]:
    """Of five rows of a source, every one of five parts has one."""
    draw = np.random.default_rng(seed)
    order = [i for rows_ in sources for i in draw.permutation(rows_)]
    return [sorted(map(int, order[k::folds])) for k in range(folds)]


def by_source(found: Sequence[Row]) -> list[list[int]]:
    out: dict[str, list[int]] = defaultdict(list)
    for i, r in enumerate(found):
        out[r.source].append(i)
    return list(out.values())


def named(found: Sequence[Row], pattern: str) -> list[int]:
    """Raises AutoparError where there is no such row, or no other."""
    members = [i for i, r in enumerate(found) if re.search(pattern, r.label)]
    if not 0 < len(members) < len(found):
        raise AutoparError(
            f"{pattern!r} matches {len(members)} of {len(found)} rows", where="--without", fix="name some of them, as in the result's rows"
        )
    return members


def left_out(runs: Sequence[Run], groups: Sequence[Sequence[int]]) -> list[float]:
    """Errors of every run, by constants fitted without its group."""
    errors = [float("nan")] * len(runs)
    for group in groups:
        without = fit([x for i, x in enumerate(runs) if i not in set(group)], believed=BELIEVED)
        for i in group:
            errors[i] = runs[i].predicted_s(without.values) / runs[i].step_s - 1
    return errors


def summary(found: Sequence[Row], errors: Sequence[float]) -> dict[str, dict[str, Any]]:
    """errors: of all rows in turn, once or several times."""
    out: dict[str, list[float]] = defaultdict(list)
    repeats = len(errors) // max(1, len(found))
    for r, e in zip([*found] * repeats, errors, strict=True):
        if e == e:
            out[r.source].append(e)
    said = {}
    for source, e in sorted(out.items()):
        size = np.abs(e)
        said[source] = {
            "rows": len(e) // repeats,
            "mean": float(size.mean()),
            "median": float(np.median(size)),
            "max": float(size.max()),
            "bias": float(np.mean(e)),
        }
    return said


def out_of_memory(found: Sequence[Row], programs: Programs) -> dict[str, Any]:
    """Of sources with rows that did not fit: how often the prediction says so."""
    sources = {r.source for r in found if r.oom}
    mine = [r for r in found if r.source in sources and (r.oom or r.step_s)]
    if not mine:
        return {}
    fits = [
        step(programs.of(r), r.layout, r.runtime, r.cluster, r.global_batch).fullest_bytes <= r.cluster.device.usable_bytes for r in mine
    ]
    return {
        "rows": len(mine),
        "right": float(np.mean([f != r.oom for f, r in zip(fits, mine, strict=True)])),
        "said to fit, did not": sum(f and r.oom for f, r in zip(fits, mine, strict=True)),
        "said not to fit, did": sum(not f and not r.oom for f, r in zip(fits, mine, strict=True)),
    }


def ranks(found: Sequence[Row], runs: Sequence[Run], errors: Sequence[float]) -> dict[str, Any]:
    """Within each sweep of layouts on the same devices: Spearman's correlation, the place of the best layout, what the first choice loses."""
    sweeps: dict[str, list[int]] = defaultdict(list)
    for i, r in enumerate(found):
        sweeps[r.group].append(i)
    out: dict[str, Any] = {}
    for name, members in sweeps.items():
        if len(members) < SWEEP or len({runs[i].cluster.size for i in members}) > 1 or len({runs[i].global_batch for i in members}) > 1:
            continue
        measured = np.array([runs[i].step_s for i in members])
        predicted = np.array([runs[i].step_s * (1 + errors[i]) for i in members])
        a, b = measured.argsort().argsort(), predicted.argsort().argsort()
        out[name] = {
            "rows": len(members),
            "correlation": float(np.corrcoef(a, b)[0, 1]),
            "place of the best": int(b[measured.argmin()]) + 1,
            "regret of the first": float(measured[predicted.argmin()] / measured.min() - 1),
        }
    if out:
        every = list(out.values())
        out["all"] = {
            "mean correlation": float(np.mean([x["correlation"] for x in every])),
            f"best in the first {TOP}": float(np.mean([x["place of the best"] <= TOP for x in every])),
            "mean regret": float(np.mean([x["regret of the first"] for x in every])),
        }
    return out


def draw(found: Sequence[Row], measured: Sequence[float], errors: Sequence[float], path: Path) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    for source in sorted({r.source for r in found}):
        at = [i for i, r in enumerate(found) if r.source == source]
        figure.add_scatter(
            x=[measured[i] for i in at],
            y=[measured[i] * (1 + errors[i]) for i in at],
            mode="markers",
            name=source,
            text=[found[i].label for i in at],
        )
    ends = [min(measured), max(measured)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dot"})
    figure.update_xaxes(type="log", title="measured step, s")
    figure.update_yaxes(type="log", title="predicted step, s")
    figure.write_html(path, include_plotlyjs="cdn")


if __name__ == "__main__":
    main()
