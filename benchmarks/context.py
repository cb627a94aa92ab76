"""How plans split a sequence, as it grows: over heads, over queries, in stretches or in blocks, or not at all.

    python -m benchmarks.context --model llama3-8b --cluster h100:8x8 --mesh 8x8 --tokens 8192,65536,524288,1048576
    python -m benchmarks.context --model qwen3-0.6b --cluster h100:4x8 --stretches

One sequence for all devices unless --batch says otherwise. For each mesh axis: samples; "heads, tensor parallel" where the projections that make queries are split by their
features too; "heads, all-to-all" where those are split along the sequence (Ulysses); "queries, keys gathered" or "queries, keys going round" (ring attention), and in how many blocks where they are dealt out for balance; or repeated.
--stretches also plans without blocks, --gathered without rings. Seconds are of planning, capture included, by the clock.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help="a name in autopar.models.configs")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--mesh", default="8x8", help='"auto": whichever is best')
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", default="4096,32768,262144,1048576", help="of a sequence, comma-separated")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a plan")
    parser.add_argument("--stretches", action="store_true", help="plan without blocks too")
    parser.add_argument("--gathered", action="store_true", help="plan without rings too")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def ways(plan: Any, tokens: int) -> list[str]:
    """Of the attention of a layer in the middle, what the mesh splits, and over how many devices."""
    order = list(plan.ops)
    every = [n for n in order if plan.targets.get(n, "").startswith("autopar.attention_v")]
    attention = every[len(every) // 2]
    before = order[: order.index(attention)]
    product = next(n for n in reversed(before) if plan.targets.get(n, "").startswith("aten.mm"))
    mine, theirs = plan.ops[attention].strategy, plan.ops[product].strategy
    reach = max((stride * plan.mesh.axis_size(a) for a, (x, stride) in mine.items() if x in ("q", "s")), default=tokens)
    blocks = tokens // reach
    total: dict[str, int] = {}
    for axis in (a for a in plan.mesh.axes if a.size > 1):
        letter, other = mine.get(axis.name, ("", 0))[0], theirs.get(axis.name, ("", 0))[0]
        heads = "heads, tensor parallel" if other == "n" else "heads, all-to-all"
        queries = f"queries in {blocks} blocks" if blocks > 1 else "queries"
        what = {"b": "samples", "g": heads, "r": heads, "q": f"{queries}, keys gathered", "s": f"{queries}, keys going round"}.get(
            letter, "repeated"
        )
        total[what] = total.get(what, 1) * axis.size
    return [f"{n} x {what}" for what, n in total.items()]


def case(a: argparse.Namespace, tokens: int, blocks: bool, rings: bool) -> dict[str, Any]:
    import autopar
    from autopar.models import configs as models
    from autopar.planner.formulation import causal_balance, clusters
    from autopar.planner.infeasible import InfeasibleError

    config = models.config(a.model)
    share, in_rings = causal_balance.SHARE, clusters.in_rings
    start = time.perf_counter()
    try:
        causal_balance.SHARE = share if blocks else 2.0  # of all work: never
        if not rings:
            clusters.in_rings = lambda *_: {}
        model, inputs = models.build(config), models.inputs(config, a.batch, tokens)
        plan = autopar.plan(
            model, inputs, a.cluster, None if a.mesh == "auto" else a.mesh, precision="bf16", options={"seconds": a.seconds}
        )
    except InfeasibleError as e:
        return {"tokens": tokens, "blocks": blocks, "rings": rings, "error": str(e).splitlines()[0], "seconds": time.perf_counter() - start}
    finally:
        causal_balance.SHARE, clusters.in_rings = share, in_rings
    seconds = time.perf_counter() - start
    told = plan.predicted
    return {
        "tokens": tokens, "blocks": blocks, "rings": rings, "split": ways(plan, tokens), "step_time_s": told["step_time_s"], "exposed_s": told["exposed_s"],
        "peak_bytes": told["peak_memory_bytes"], "gap": (plan.solver or {}).get("gap", 0.0), "run again": len(plan.recompute),
        "offloaded": len(plan.offload), "seconds": seconds,
    }  # fmt: skip


def said(row: dict[str, Any]) -> str:
    which = f"{row['tokens']:>9,} tokens" + ("" if row["blocks"] else ", stretches") + ("" if row["rings"] else ", without rings")
    if "error" in row:
        return f"{which}: {row['error']}   ({row['seconds']:.0f} s)"
    return (
        f"{which}: {row['step_time_s']:.4g} s, {row['exposed_s'] / row['step_time_s']:.1%} exposed, {row['peak_bytes'] / 1e9:.1f} GB, gap {row['gap']:.2%}; "
        f"{'; '.join(row['split'])}   ({row['seconds']:.0f} s)"
    )


def main() -> None:
    a = parse()
    rows = []
    for tokens in (int(x) for x in a.tokens.split(",")):
        for blocks, rings in ((True, True), *([(False, True)] if a.stretches else []), *([(True, False)] if a.gathered else [])):
            rows.append(case(a, tokens, blocks, rings))
            print(said(rows[-1]), flush=True)
    write(
        a.out,
        "python -m benchmarks.context",
        {"model": a.model, "cluster": a.cluster, "mesh": a.mesh, "batch": a.batch, "rows": rows},
    )


if __name__ == "__main__":
    main()
