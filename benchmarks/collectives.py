"""Collectives over gloo on this machine: what a calibration predicts of sizes it has not seen, against what is then measured.

    python -m benchmarks.collectives --processes 4 --turns 8

Calibration and measurement take turns, in groups of 2 and of all processes (all groups at once): calibrated are powers of four from 1 kB, measured the
sizes between and both ends of the range, at other moments. Every turn goes through all sizes of a kind, calibrated and measured by turns, so that other
work on the machine is in both alike; of each size the turns' median counts. Predictions are the prices that `autopar.cost.links` has of the cluster
that `autopar calibrate`'s own fit makes. `spread`: how far the turns of a measured case lie from their median. `falls`: how often predictions fall with
the bytes, or with the ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.record import write

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
LEAST, MOST = 1 << 10, 1 << 28
WINDOW_S = 0.03
MEASURED = "measured "  # of samples that are predicted, not fitted


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8, help="times that every size is gone through")
    parser.add_argument("--most", type=int, default=MOST, help="bytes of the largest tensor")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def taken(device: Any, local: int, seconds: float, on_progress: Callable[[str], None], turns: int, most: int) -> Any:
    """In every process. Samples of calibration bear their kind, those to be predicted `MEASURED` before it."""
    from autopar.hardware.calibrate import wires
    from autopar.hardware.calibrate.measured import Measured
    from autopar.hardware.calibrate.timing import Clock, Sample

    clock = Clock(device, WINDOW_S)
    fitted = [s for s in wires.SIZES if s <= most]
    cases = [("", s) for s in fitted] + [(MEASURED, s) for s in (LEAST, *(2 * s for s in fitted if 2 * s < most), most)]
    cases.sort(key=lambda case: case[1])
    out = []
    for n in sorted({2, local}):
        group = wires.groups(n)
        for kind in KINDS:
            on_progress(f"{kind} among {n}")
            calls = {nbytes: wires.collective(clock, kind, group, nbytes) for _, nbytes in cases}
            often = {nbytes: clock.often(call) for nbytes, call in calls.items()}
            for _ in range(turns):
                for what, nbytes in cases:
                    s = wires.averaged(clock, [clock.window(calls[nbytes], often[nbytes])])[0]
                    out.append(Sample(what + kind, wires.sent(kind, n, nbytes), s, ranks=n))
    return Measured(tuple(out), "cpu", "", 1.0, 1.0, 1, local, 1, (), 0.0)


def predicted(samples: list[Any], processes: int) -> Any:
    """The calibrated cluster: `autopar calibrate`'s own fit of collectives, on the shipped CPU's other figures."""
    from autopar.hardware.calibrate.result import collective_curves
    from autopar.hardware.cluster import Cluster

    return Cluster.of(f"cpu:{processes}").model_copy(update={"curves": collective_curves(samples)})


def price(cluster: Any, kind: str, ranks: int, sent: float) -> float:
    from autopar.cost import Cost
    from autopar.graph.mesh import Mesh

    mesh = Mesh.of({"rest": cluster.size // ranks, "group": ranks})
    return Cost(cluster, mesh).collective(kind, mesh.children("group"), sent).seconds


def falls(cluster: Any, processes: int) -> int:
    """How often a larger tensor, or the same among more ranks, is cheaper: on a fine grid."""
    from autopar.hardware.calibrate.wires import sent

    sizes = [LEAST * 2 ** (i / 4) for i in range(73)]
    ranks = [n for n in range(2, processes + 1) if processes % n == 0]
    found = 0
    for kind in KINDS:
        times = {n: [price(cluster, kind, n, sent(kind, n, s)) for s in sizes] for n in ranks}
        found += sum(a > b * (1 + 1e-12) for row in times.values() for a, b in pairwise(row))
        found += sum(a > b * (1 + 1e-12) for n, m in pairwise(ranks) for a, b in zip(times[n], times[m], strict=True))
    return found


def main() -> None:
    a = parse()
    import functools
    import sys

    from autopar.hardware.calibrate.world import spawned

    os.environ["OMP_NUM_THREADS"] = "1"
    load = [os.getloadavg()[0]]
    start = time.monotonic()
    fn = functools.partial(taken, turns=a.turns, most=a.most)
    got = spawned(fn, a.processes, 3600.0, lambda line: print(f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True))[0]
    load.append(os.getloadavg()[0])
    cluster = predicted([s for s in got.samples if not s.of.startswith(MEASURED)], a.processes)
    cases: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for s in got.samples:
        if s.of.startswith(MEASURED):
            cases[s.of.removeprefix(MEASURED), s.ranks, s.amount].append(s.seconds)
    rows = []
    for (kind, ranks, sent), times in sorted(cases.items()):
        measured = statistics.median(times)
        spread = statistics.median(abs(t / measured - 1) for t in times)
        says = price(cluster, kind, ranks, sent)
        row = {
            "kind": kind,
            "ranks": ranks,
            "sent_bytes": sent,
            "measured_s": measured,
            "spread": spread,
            "predicted_s": says,
            "error": says / measured - 1,
        }
        rows.append(row)
        print(
            f"{kind:<15}{ranks:>3}{sent:>14.0f} bytes{1e3 * measured:>11.3f} ms measured{1e3 * says:>11.3f} predicted {100 * row['error']:>+7.1f} %"
        )
    errors = {n: [abs(r["error"]) for r in rows if n in (None, r["ranks"], r["kind"])] for n in (None, 2, a.processes, *KINDS)}
    summary = {
        "cases": len(rows),
        "median_error": statistics.median(errors[None]),
        "median_error_by_ranks": {n: statistics.median(errors[n]) for n in sorted({2, a.processes})},
        "median_error_by_kind": {k: statistics.median(errors[k]) for k in KINDS},
        "within_10_percent": sum(e <= 0.1 for e in errors[None]),
        "median_spread": statistics.median(r["spread"] for r in rows),
        "falls": falls(cluster, a.processes),
        "load_average": load,
        "seconds": time.monotonic() - start,
    }
    print(summary)
    write(a.out, "python -m benchmarks.collectives", {"summary": summary, "cases": rows})


if __name__ == "__main__":
    main()
