"""What autopar finds against what an engineer would write by hand, by the same prices: it should never be worse.

    python -m benchmarks.hand --models llama3-8b,llama3-70b --clusters h100:1x8,h800:32x8         autopar.search
    python -m benchmarks.hand --plan --models gpt2-xl,bert-base --sequences 1,8 --tokens 512,4096      autopar.plan, which runs no pipelines

Hand layouts are those of the usual guides, with every micro-batch and every kind of recomputation that fits: DDP; ZeRO-1 and -2; FSDP over all devices and
within nodes (HSDP); Megatron's tensor parallelism in a node with ZeRO-1; that with pipelines of 2, 4 and 8 stages, with and without virtual ones; context parallelism in a node. Routed experts
are shared besides by the devices of a node, and by those of eight: with FSDP or ZeRO-1 (DeepSpeed's), with tensor parallelism,
folded and not, and pipelines (Megatron's). None is given to the search. Both are priced for the same runtime; a plan's is ours. `ratio`: the step time of the best by hand, by the one found. A plan is worse if it
takes longer by more than its own gap, or by more than a hundredth, however little time it had. `predict` prices hand layouts, and differs from the program by up to half a percent on
the same one (tests/spmd/test_one_price.py); where by its word a plan is worse, the program is given that layout, and what it says is `by_program`, and counts. `saved_s`: seconds less than by hand, of exposed communication and of the rest;
`freedoms`: what a plan does that no single layout says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import write

SAME = 1e-3  # relative: what is faster by less wins nothing
MOST = 0.01  # relative: by which a plan may be slower, if its gap says as much
MICRO_BATCHES = (1, 2, 4)
RECOMPUTE = ("none", "balanced", "full")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2-xl,llama3-8b,llama3-70b", help="names in autopar.models.configs, comma-separated")
    parser.add_argument("--clusters", default="h100:1x8,a100:4x8,h800:32x8", help="comma-separated")
    parser.add_argument("--sequences", default="4", help="of a step, for each device, comma-separated")
    parser.add_argument("--tokens", default="4096", help="of a sequence, fewer where the model has no more positions, comma-separated")
    parser.add_argument("--plan", action="store_true", help="compare the plan, with micro-batches, and hand layouts without pipelines")
    parser.add_argument("--seconds", type=float, default=60.0, help="for a plan")
    parser.add_argument("--runtime", default="", help="of autopar.predict; megatron-overlap, or autopar with --plan")
    parser.add_argument("--cache", type=Path, help="what was solved, kept for the next time")
    parser.add_argument(
        "--parts", nargs="*", type=Path, default=[], help="results of other models, made beside this one, that go before it"
    )
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    a = parser.parse_args()
    if a.plan and a.runtime not in ("", "autopar"):
        parser.error(f"a plan is priced for our own runtime, not for {a.runtime}")
    a.runtime = a.runtime or ("autopar" if a.plan else "megatron-overlap")
    return a


def by_hand(node: int, devices: int, pipelines: bool, sequences: int, experts: int = 1) -> Iterator[tuple[str, Any]]:
    """Names and layouts; sizes need not divide. experts: of the model, whose divisors can share them."""
    from autopar.planner.layout import Layout

    plain: list[tuple[str, Layout]] = [("ddp", Layout()), ("zero-1", Layout(zero=1)), ("zero-2", Layout(zero=2)), ("fsdp", Layout(zero=3))]
    if devices > node:
        plain.append(("hsdp", Layout(zero=3, shard_ways=node)))
    for tp in (2, 4, node):
        plain.append((f"tp {tp}", Layout(tp=tp, zero=1)))
        for pp, virtual in itertools.product((2, 4, 8), (1, 2, 5)) if pipelines else ():
            plain.append((f"tp {tp} pp {pp} virtual {virtual}", Layout(tp=tp, pp=pp, virtual=virtual, zero=1)))
    if pipelines:
        plain += [(f"pp {pp}", Layout(pp=pp, zero=1)) for pp in (2, 4, 8)]
    else:
        plain += [(f"fsdp tp {tp}", Layout(tp=tp, zero=3)) for tp in (2, 4, node)]
    plain.append((f"cp {node}", Layout(cp=node, zero=3)))
    for ep in sorted({math.gcd(experts, n) for n in (node, 8 * node)} - {1}):
        plain += [
            (f"ep {ep}", Layout(ep=ep, zero=1)),
            (f"fsdp ep {ep}", Layout(ep=ep, zero=3)),
            (f"tp 2 ep {ep}", Layout(tp=2, ep=ep, zero=1)),
        ]
        for tp in (t for t in sorted({2, node} - {1}) if not ep % t or not t % ep):
            layout = Layout(tp=tp, ep=ep, expert_tp=1, zero=1)
            plain.append((f"tp {tp} ep {ep} expert-tp 1", layout))
            plain += [(f"tp {tp} ep {ep} expert-tp 1 pp {pp}", replace(layout, pp=pp)) for pp in ((4, 8) if pipelines else ())]
        for pp, virtual in itertools.product((2, 4, 8), (1, 2)) if pipelines else ():
            plain.append((f"ep {ep} pp {pp} virtual {virtual}", Layout(ep=ep, pp=pp, virtual=virtual, zero=1)))
    sizes = MICRO_BATCHES if pipelines else sorted({*MICRO_BATCHES, *(sequences // m for m in (1, 2, 4) if sequences >= m)})
    for (name, layout), size, recompute in itertools.product(plain, sizes, RECOMPUTE):
        yield f"{name}, micro-batch {size}, recompute {recompute}", replace(layout, micro_batch=size, recompute=recompute)


def case(model: str, where: str, sequences: int, tokens: int, a: argparse.Namespace) -> dict[str, Any]:
    from autopar.errors import LayoutError
    from autopar.hardware.cluster import Cluster
    from autopar.models import configs as models
    from autopar.predict.api import priced
    from autopar.predict.runtime import Runtime
    from autopar.search.cache import Cache
    from autopar.search.solutions import MicroBatches

    config, cluster, how = models.config(model), Cluster.of(where), Runtime.of(a.runtime)
    batch = sequences * cluster.size
    made, inputs = models.build(config), models.inputs(config, 1, tokens)
    run: dict[str, Any] = {"model": model, "cluster": where, "batch": batch, "tokens": tokens, "by hand": None}
    start = time.perf_counter()
    if a.plan:
        which, mine = "plan", planned(made, models.inputs(config, batch, tokens), cluster, a.seconds)
    else:
        which, mine = "search", searched(made, inputs, cluster, batch, how, a.cache)
    run |= {which: mine, f"{which}_s": time.perf_counter() - start}
    micros = MicroBatches(made, inputs, cluster, how, None, "bfloat16", Cache(a.cache))
    fits = tried = 0
    for name, layout in by_hand(cluster.devices_per_node, cluster.size, not a.plan, sequences, micros.experts(1)):
        try:
            layout.replicas(cluster.size)
            found = micros.of(layout)
            if found is None:
                continue
            told = priced(found, model, cluster, layout, how, batch, tokens, "bfloat16", "adamw")
        except LayoutError:  # sizes do not divide
            continue
        tried += 1
        if not told.fits:
            continue
        fits += 1
        if run["by hand"] is None or told.step_time_s < run["by hand"]["step_time_s"]:
            best = layout
            run["by hand"] = {"layout": name, "step_time_s": told.step_time_s, "peak_bytes": told.peak_bytes, "parts_s": dict(told.parts_s),
                              "exposed_s": told.exposed_s, "micro_batches": told.micro_batches}  # fmt: skip
    told = verdict(run["by hand"], mine)
    if a.plan and told["worse"] and told["ratio"] is not None:
        again = by_program(made, models.inputs(config, batch, tokens), cluster, best, run["by hand"]["micro_batches"], a.seconds)
        run["by hand"]["by_program"] = again
        if again is not None:
            told = verdict({**run["by hand"], "step_time_s": again, "exposed_s": run["by hand"]["exposed_s"]}, mine)
    return {**run, "tried": tried, "fit": fits, **told}


def by_program(model: Any, inputs: Any, cluster: Any, layout: Any, micro_batches: int, seconds: float) -> float | None:
    """What the program says of a hand layout; None where it has no plan in that layout."""
    import autopar
    from autopar.errors import AutoparError
    from autopar.planner.expert_folding import CONTEXT, DATA, EXPERTS, FEATURES, TENSOR, named
    from autopar.planner.layout import Layout

    dp = layout.replicas(cluster.size)
    inner = layout.shard_ways or dp
    mine = layout.together
    mesh = {"out": dp // inner, "dp": inner // layout.sharing, **{p.name: p.size for p in mine}}
    axes = {n: k for n, k in mesh.items() if k > 1}
    data = tuple(n for n in ("dp", *named(mine, dense=DATA)) if n in axes)
    roles = Layout(
        ("out", *data) if "out" in axes else data, data if layout.zero else (), named(mine, dense=TENSOR), layout.zero == 3,
        context=named(mine, dense=CONTEXT), experts=named(mine, routed=EXPERTS), sequence_parallel=layout.sequence_parallel,
        expert_features=None if layout.expert_tp is None else named(mine, routed=FEATURES),
    )  # fmt: skip
    try:
        plan = autopar.plan(
            model, inputs, cluster, axes, layout=roles, precision="bf16", micro_batches=micro_batches, options={"seconds": seconds}
        )
    except AutoparError:
        return None
    return float(plan.predicted["step_time_s"])


def searched(model: Any, inputs: Any, cluster: Any, batch: int, how: Any, cache: Path | None) -> dict[str, Any] | None:
    import autopar
    from autopar.planner.infeasible import InfeasibleError

    try:
        best = autopar.search(model, inputs, cluster, global_batch=batch, top_k=1, runtime=how, cache=cache)[0]
    except InfeasibleError:
        return None
    return {"layout": str(best.layout), "step_time_s": best.prediction.step_time_s, "peak_bytes": best.prediction.peak_bytes}


def planned(model: Any, inputs: Any, cluster: Any, seconds: float) -> dict[str, Any] | None:
    import autopar
    from autopar.errors import AutoparError
    from autopar.planner.infeasible import InfeasibleError

    try:
        plan = autopar.plan(model, inputs, cluster, precision="bf16", micro_batches="auto", options={"seconds": seconds})
    except InfeasibleError:
        return None
    except AutoparError as e:  # the other cases are asked all the same, and this one counts as lost
        return {"raised": str(e)}
    told = plan.predicted
    storage = ", ".join(sorted({str(c.storage) for c in plan.params.values()})[:3])
    return {
        "layout": f"{plan.micro_batches} micro-batches, {len(plan.recompute)} operators run again, stored {storage}", "step_time_s": told["step_time_s"],
        "peak_bytes": told["peak_memory_bytes"], "gap": (plan.solver or {}).get("gap", 0.0), "micro_batches": plan.micro_batches,
        "parts_s": {k: told[k] for k in ("forward_s", "backward_s", "optimizer_s", "exposed_s") if k in told}, "freedoms": freedoms(plan),
    }  # fmt: skip


def freedoms(plan: Any) -> list[str]:
    """What is not the same for all parameters, all products or all activations."""
    heavy = ("matmul", "attention", "conv", "moe")
    large = [c for c in plan.params.values() if c.trainable and len(c.shape) > 1]
    split = {tuple(sorted((a, x) for a, (x, _) in o.strategy.items())) for o in plan.ops.values() if o.kind in heavy}
    alike = {tuple(sorted((a, x in "bm") for a, x in axes)) for axes in split}  # of an axis: samples or tokens, or something else
    found = {
        "stored in several ways": len({c.storage.share(plan.mesh) for c in large}) > 1,
        "gathered once or twice": len({c.keeps_gathered for c in large if c.storage != c.compute}) > 1,
        "products split in several ways": len(alike) > 1,
        "some operators run again": bool(plan.recompute),
    }
    return [name for name, is_used in found.items() if is_used]


def verdict(hand: dict[str, Any] | None, mine: dict[str, Any] | None) -> dict[str, Any]:
    """Whether what was found, `mine`, wins, or is worse."""
    if mine is not None and "raised" in mine:
        return {"ratio": None, "wins": False, "worse": True}
    if hand is None or mine is None:
        return {"ratio": None, "wins": mine is not None, "worse": hand is not None}
    ratio = hand["step_time_s"] / mine["step_time_s"]
    told = {"ratio": ratio, "wins": ratio > 1 + SAME, "worse": ratio < 1 - max(1e-9, min(MOST, mine.get("gap", 0.0)))}
    if "freedoms" in mine:
        exposed = hand["exposed_s"] - mine["parts_s"].get("exposed_s", 0.0)
        told["saved_s"] = {"exposed communication": exposed, "the rest": hand["step_time_s"] - mine["step_time_s"] - exposed}
        mine["freedoms"] += ["another number of micro-batches"] if mine["micro_batches"] != hand["micro_batches"] else []
    return told


def by_freedom(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the plans that win: how many use a freedom, and the mean of their ratios."""
    won = [r for r in runs if r["wins"] and r["ratio"] and "plan" in r]
    names = sorted({f for r in won for f in r["plan"]["freedoms"]})
    ratios = {n: [r["ratio"] for r in won if n in r["plan"]["freedoms"]] for n in names}
    return {n: {"cases": len(x), "mean ratio": sum(x) / len(x)} for n, x in ratios.items()}


def said(run: dict[str, Any]) -> str:
    def one(x: dict[str, Any] | None) -> str:
        if x is not None and "raised" in x:
            return f"raised {x['raised']}"
        return "does not fit" if x is None else f"{x['step_time_s']:.3f} s, {x['layout']}"

    which = "plan" if "plan" in run else "search"
    ratio = "" if run["ratio"] is None else f"   {run['ratio']:.3f}"
    return (
        f"{run['model']} on {run['cluster']}, batch {run['batch']} of {run['tokens']}{ratio}{'  WORSE' if run['worse'] else ''}\n"
        f"  by hand  {one(run['by hand'])}   ({run['fit']} of {run['tried']} layouts fit)\n  {which:<8} {one(run[which])}   ({run[which + '_s']:.0f} s)"
    )


def main() -> None:
    from benchmarks.layouts import positions

    a = parse()
    runs = [run for part in a.parts for run in json.loads(part.read_text())["runs"]]
    sequences, tokens = ([int(x) for x in text.split(",")] for text in (a.sequences, a.tokens))
    for model, where, n in itertools.product(filter(None, a.models.split(",")), a.clusters.split(","), sequences):
        for length in dict.fromkeys(positions(model, t) for t in tokens):
            runs.append(case(model, where, n, length, a))
            print(said(runs[-1]), flush=True)
            write(
                a.out, "python -m benchmarks.hand", {"summary": {"cases": len(runs)}, "runs": runs}
            )  # so that what was cut short is not lost
    both = [r for r in runs if r["ratio"] is not None]
    ratios = [r["ratio"] for r in both]
    summary = {"cases": len(runs), "wins": sum(r["wins"] for r in runs), "worse": sum(r["worse"] for r in runs),
               "least ratio": min(ratios, default=None), "largest ratio": max(ratios, default=None)}  # fmt: skip
    if a.plan:
        summary["by freedom"] = by_freedom(runs)
    print(summary)
    write(a.out, "python -m benchmarks.hand", {"summary": summary, "runs": runs})
    sys.exit(1 if summary["worse"] else 0)


if __name__ == "__main__":
    main()
