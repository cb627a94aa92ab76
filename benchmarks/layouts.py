"""The plan against every hand layout, by one price: it should never be worse.

    python -m benchmarks.layouts --models gpt2,llama3-8b --meshes 8,64,32x8 --batches 64,256

A layout is planned too: the same program with the strategies that are not the layout taken away (`autopar.planner.formulation.layouts`), so it is the best plan
that is that layout, with its own choice of what to save and recompute. No hand layout is given to the solver as a hint, so a plan that beats all of them
was found without them. A mesh of one number is one axis, 32x8 is 32 nodes of 8 devices on two. Times are predictions of the cost model for H100s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import write

LAYOUTS = ("ddp", "fsdp", "tp", "fsdp+tp")
SAME = 1e-3  # relative: a plan that is faster than every layout by less wins nothing


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama3-8b", help="names in autopar.models.configs, comma-separated")
    parser.add_argument("--meshes", default="8,64,32x8", help="comma-separated")
    parser.add_argument("--batches", default="64,256", help="global batches, comma-separated")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence, fewer where the model has no more positions")
    parser.add_argument("--device", default="h100", help="a cluster of autopar.hardware.cluster; eight devices a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="the solver's time limit for one plan")
    parser.add_argument("--gap", type=float, default=0.001, help="how near the bound each answer shall be")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def program(model: str, batch: int, sequence: int) -> Any:
    """The folded step of a public model, from shallow captures."""
    import torch

    from autopar.capture.capture import Call, capture
    from autopar.capture.describe import describe
    from autopar.capture.tile import tiled
    from autopar.graph.graph import Graph
    from autopar.models import configs as models

    config = models.config(model)
    shapes = models.inputs(config, batch, sequence)

    def captured(layers: int) -> Graph:
        call = Call.of((), {k: torch.empty(s, dtype=torch.int64, device="meta") for k, s in shapes.items()})
        made = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
        return describe(capture(models.build(config, layers), call, made, cast=torch.bfloat16))

    return tiled(captured, models.depth(config))


def positions(model: str, sequence: int) -> int:
    """`sequence`, or as many tokens as a learned table of positions has."""
    from autopar.models import configs as models

    config = models.config(model)
    longest = getattr(config, "max_position_embeddings", None)
    return sequence if longest is None or getattr(config, "rope_parameters", None) is not None else min(sequence, longest)


def solved(plan: Callable[[], Any]) -> dict[str, Any]:
    """Step time, gap and seconds of a plan, or why there is none."""
    from autopar.errors import AutoparError, LayoutError
    from autopar.planner.infeasible import InfeasibleError

    start = time.perf_counter()
    try:
        found = plan().plan
    except LayoutError as e:
        return {"not": "possible", "why": e.what}
    except InfeasibleError as e:
        return {"not": "within memory", "why": e.what}
    except AutoparError as e:
        return {"not": "found in time", "why": e.what}
    except AssertionError as e:  # a defect of ours: kept in the result, counted, and no reason to lose the other cases
        return {"not": "right", "why": str(e)}
    return {
        "step_time_s": found.predicted["step_time_s"],
        "gap": found.solver["gap"],
        "peak_memory_bytes": found.predicted["peak_memory_bytes"],
        "seconds": time.perf_counter() - start,
    }


def case(folded: Any, mesh: str, a: argparse.Namespace) -> dict[str, Any]:
    from autopar.hardware.cluster import Cluster
    from autopar.planner.formulation.training import TrainingConfig
    from autopar.planner.planning import plan_graph
    from autopar.solver.solve import Limits

    cluster = Cluster.of(f"{a.device}:{mesh}")
    axes = dict(zip(("dp", "tp"), map(int, mesh.split("x")), strict=False))
    training = TrainingConfig(frozenset(folded.graph.params), "float32", budget_bytes=cluster.device.usable_bytes)
    limits = Limits(gap=a.gap, seconds=a.seconds)
    out = {"plan": solved(lambda: plan_graph(folded, axes, cluster, training, limits))}
    for layout in LAYOUTS:
        out[layout] = solved(lambda layout=layout: plan_graph(folded, axes, cluster, training, limits, layout=layout))  # type: ignore[misc]
    return out


def verdict(run: dict[str, Any], gap: float) -> dict[str, Any]:
    """best: the fastest hand layout; ratio: its time by the plan's; worse: whether it beats the plan by more than the solver's gap allows."""
    times = {n: run[n]["step_time_s"] for n in LAYOUTS if "step_time_s" in run[n]}
    mine = run["plan"].get("step_time_s")
    if not times or mine is None:  # a plan where no layout fits is a win; no plan where one does is a loss
        return {"best": None, "ratio": None, "wins": mine is not None, "worse": mine is None and bool(times)}
    best = min(times, key=lambda n: times[n])
    ratio = times[best] / mine
    return {"best": best, "ratio": ratio, "wins": ratio > 1 + SAME, "worse": ratio < 1 - gap}


def said(entry: dict[str, Any]) -> str:
    return (
        f"{1e3 * entry['step_time_s']:.1f}"
        if "step_time_s" in entry
        else {"possible": "-", "within memory": "memory", "right": "DEFECT"}.get(entry["not"], "time")
    )


def main() -> None:
    a = parse()
    runs: list[dict[str, Any]] = []
    print(f"{'model':<12}{'mesh':>7}{'batch':>7}{'plan':>10}" + "".join(f"{n:>10}" for n in LAYOUTS) + "   best layout / plan   (ms)")
    for model in a.models.split(","):
        sequence = positions(model, a.sequence)
        for batch in map(int, a.batches.split(",")):
            folded = program(model, batch, sequence)
            for mesh in a.meshes.split(","):
                run = {"model": model, "mesh": mesh, "batch": batch, "sequence": sequence, **case(folded, mesh, a)}
                run |= verdict(run, a.gap)
                runs.append(run)
                ratio = "" if run["ratio"] is None else f"{run['best']} {run['ratio']:.3f}"
                row = "".join(f"{said(run[n]):>10}" for n in ("plan", *LAYOUTS))
                print(f"{model:<12}{mesh:>7}{batch:>7}{row}   {ratio}{'  WORSE' if run['worse'] else ''}", flush=True)
    defects = sum(run[n].get("not") == "right" for run in runs for n in ("plan", *LAYOUTS))
    summary = {
        "cases": len(runs),
        "defects": defects,
        "plan_wins": sum(r["wins"] for r in runs),
        "plan_worse": sum(r["worse"] for r in runs),
        "hints": 0,
    }
    print(
        f"{summary['cases']} cases: faster than every hand layout in {summary['plan_wins']}, worse in {summary['plan_worse']}; no hints given"
    )
    write(a.out, "python -m benchmarks.layouts", {"summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
