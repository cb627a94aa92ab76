"""What failures cost: drawn at several rates, replayed on plans ahead by every way to live with them.

    python -m benchmarks.elastic_simulate                                                        Llama-3-8B on 1,024 devices
    python -m benchmarks.elastic_simulate --mtbf-cluster 1h 12h --regroup 0.3 30 --spares 4

Nothing is trained or measured here: predicted steps, recoveries as benchmarks/results/elastic.json has them. Plans are made once, for the most losses at once of any rate. Other seconds of
regrouping are tried at the first rate.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from autopar.elastic.plans import Setting, simulate, templates
from autopar.elastic.plans.failures import most_away, poisson
from autopar.hardware.cluster import Cluster
from autopar.models import configs
from autopar.text.times import parse_time
from benchmarks.record import write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help="a name in autopar.models.configs, or the path of a config.json")
    parser.add_argument("--cluster", default="h100:128x8")
    parser.add_argument("--batch", type=int, default=2048, help="sequences of a step, whatever is left")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, help="only so many of the model's")
    parser.add_argument("--mtbf-cluster", nargs="+", default=["3h", "12h", "49.5h"], help="between failures of the whole cluster")
    parser.add_argument("--regroup", nargs="+", type=float, default=[30.0, 120.0], help="seconds, beside what was measured")
    parser.add_argument("--repair", default="4h")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--spares", type=int, default=2, help="nodes that stand by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the first rate, as SVG, PNG or PDF")
    return parser.parse_args()


def main() -> None:
    a = parse()
    began = time.perf_counter()
    cluster, end_s = Cluster.of(a.cluster), a.days * 86400
    drawn = [poisson(cluster.nodes, parse_time(x) * cluster.nodes, parse_time(a.repair), end_s, a.seed) for x in a.mtbf_cluster]
    survive = min(cluster.nodes - 1, max(most_away(d, end_s) for d in drawn))
    config = configs.config(a.model)
    ahead = templates(
        configs.build(config, a.layers), configs.inputs(config, a.batch, a.seq), cluster, global_batch=a.batch, survive=survive
    )
    print(ahead)
    planned_s = time.perf_counter() - began
    began = time.perf_counter()
    usual = Setting(spares=a.spares)
    cases = [(x, d, usual) for x, d in zip(a.mtbf_cluster, drawn, strict=True)]
    cases += [(a.mtbf_cluster[0], drawn[0], Setting(spares=a.spares, regroup_s=x, join_s=x)) for x in a.regroup]
    found: list[dict[str, Any]] = []
    for i, (mtbf, failures, setting) in enumerate(cases):
        done = simulate(ahead, failures, a.days, setting, parse_time(mtbf))
        print(f"\none failure in {mtbf}\n{done}")
        found.append({"mtbf": mtbf, **done.document()})
        if a.plot is not None and i == 0:
            from autopar.elastic.plans.chart import draw

            draw(done, a.plot)
    replayed_s = time.perf_counter() - began
    print(f"planned in {planned_s:.1f} s, replayed in {replayed_s:.2f} s")
    sizes = [{"units": s.units, "step_s": s.step_s, "groups": s.groups} for s in ahead.sizes]
    write(
        a.out, "python -m benchmarks.elastic_simulate",
        {"planned_s": round(planned_s, 1), "replayed_s": round(replayed_s, 2), "devices": cluster.size, "batch": a.batch, "tokens": a.seq, "repair": a.repair, "seed": a.seed, "sizes": sizes, "cases": found},
    )  # fmt: skip


if __name__ == "__main__":
    main()
