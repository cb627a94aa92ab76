"""Published runs of mixtures of experts, predicted: tokens go evenly to experts, as these runs force them to.

    python -m benchmarks.published_experts --out benchmarks/results/published_experts.json

Nothing is fitted to a row: constants are the cluster's, overlap is that of the runtime that a row names (those of dense models: Megatron waits for what
experts exchange and for gradients, FSDP for a share of its traffic). What a row does not state is tried, and the fastest that fits counts, as in `benchmarks.published`:
micro-batches, virtual stages, what is made again; where none fits, that of least memory, and `fits` says so. Each is predicted with every row sent on its own, and with one copy of a token for each node (`autopar.cost.two_level`); `dispatch` is what
the source says it does, and says which of both is held against what was measured. Rows that no layout here says are listed, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import write

MICRO_BATCHES, VIRTUAL, RECOMPUTE = (1, 2, 4), (1, 2, 4), ("none", "balanced", "full")
BRIDGE, AUTOMODEL = "Megatron-Bridge", "NeMo AutoModel"


@dataclass(frozen=True)
class Row:
    """sizes: of `Layout`, those that are stated; tokens_per_s: of a device; tflops: of a device, where the source counts no tokens. batch: sequences of a step.
    notes: what was assumed."""

    source: str
    model: str
    cluster: str
    sizes: dict[str, Any]
    batch: int
    runtime: str
    tokens_per_s: float | None = None
    tflops: float | None = None
    dispatch: str = "all at once"
    notes: str = ""
    tokens: int = 4096

    @property
    def label(self) -> str:
        said = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in self.sizes.items() if k != "zero")
        return f"{self.source}: {self.model}, {self.cluster}, {said}"


ROWS = (
    Row("Megatron-Core 0.9", "mixtral-8x7b", "h100:8x8", {"pp": 4, "virtual": 8, "ep": 8, "micro_batch": 1, "zero": 1, "recompute": "none"}, 256, "megatron", tflops=468),
    Row(AUTOMODEL, "qwen3-30b-a3b", "h100:1x8", {"ep": 8, "zero": 3}, 512, "fsdp", 12040, dispatch="once a node", notes="batch not stated: 512"),
    Row(AUTOMODEL, "gpt-oss-120b", "h100:8x8", {"ep": 1, "zero": 3}, 512, "fsdp", 7626, notes="batch not stated: 512"),
    Row(BRIDGE, "gpt-oss-120b", "h100:8x8", {"pp": 4, "ep": 8, "zero": 1}, 512, "megatron", 5993, notes="batch not stated: 512"),
    Row(AUTOMODEL, "deepseek-v3", "h100:32x8", {"pp": 4, "ep": 64, "zero": 3}, 512, "fsdp", 1002, dispatch="once a node"),
    Row(AUTOMODEL, "deepseek-v3", "h100:128x8", {"pp": 4, "ep": 64, "zero": 3}, 8192, "fsdp", 865, dispatch="once a node", notes="pipelines not stated: 4"),
    Row(BRIDGE, "deepseek-v3", "h100:128x8", {"tp": 2, "pp": 8, "ep": 64, "expert_tp": 1, "zero": 1}, 8192, "megatron", 1297, notes="batch not stated: 8192"),
)  # fmt: skip
LEFT = {
    "Megatron-Bridge 26.02: Qwen3-235B-A22B, 256 H100, tp 2, pp 8, ep 32": "products in 8 bits are not priced",
    "DeepSeek-V3 itself, 2,048 H800": "products in 8 bits are not priced",
    "arXiv 2504.14960: Mixtral-8x22B 49.3%, Qwen2-57B-A14B 39.0% MFU": "layouts are not among the facts here",
    "Megatron-LM issue 756: Mixtral-8x7B, 16 H100": "neither its layout nor its imbalance is stated",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="only these, comma-separated")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    wanted = {m for m in a.models.split(",") if m}
    found = []
    for row in ROWS:
        if not wanted or row.model in wanted:
            found.append(predicted(row))
            print(said(found[-1]), flush=True)
            write(a.out, "python -m benchmarks.published_experts", {"rows": found, "not priced": LEFT})


def layouts(row: Row) -> Iterator[Any]:
    from autopar.planner.layout import Layout

    given = row.sizes
    open_ = {"micro_batch": MICRO_BATCHES, "virtual": VIRTUAL if given.get("pp", 1) > 1 else (1,), "recompute": RECOMPUTE}
    names = [k for k in open_ if k not in given]
    for values in itertools.product(*(open_[k] for k in names)):
        yield Layout(**given, **dict(zip(names, values, strict=True)))


def predicted(row: Row) -> dict[str, Any]:
    """The fastest that fits of a row's layouts, by both ways of sending tokens."""
    from autopar.errors import LayoutError
    from autopar.hardware.cluster import Cluster
    from autopar.models import configs as models
    from autopar.predict.api import priced
    from autopar.predict.runtime import Runtime
    from autopar.search.cache import Cache
    from autopar.search.solutions import MicroBatches

    config, cluster, runtime = models.config(row.model), Cluster.of(row.cluster), Runtime.of(row.runtime)
    inputs = models.inputs(config, 1, row.tokens)
    micros = MicroBatches(models.build(config), inputs, cluster, runtime, None, "bfloat16", Cache())
    begun = time.perf_counter()
    best: dict[str, Any] = {}
    refused = "no layout is possible"
    for layout, (how, levels) in itertools.product(layouts(row), (("all at once", False), ("once a node", True))):
        try:
            layout.replicas(cluster.size)
            found = micros.of(layout)
            if found is None:
                refused = "the model cannot be split so"
                continue
            told = priced(found, row.model, cluster, layout, replace(runtime, two_level=levels), row.batch, row.tokens, "bfloat16", "adamw")
        except LayoutError as e:
            refused = e.what
            continue
        if how not in best or place(told) < place(best[how]):
            best[how] = told
    out: dict[str, Any] = {
        "row": row.label, "runtime": row.runtime, "dispatch": row.dispatch, "batch": row.batch, "assumed": row.notes, "seconds": time.perf_counter() - begun,
    }  # fmt: skip
    if not best:
        return out | {"refused": refused}
    measured = row.tokens_per_s if row.tflops is None else row.tflops
    out |= {"unit": "tokens/s of a device" if row.tflops is None else "TFLOP/s of a device", "measured": measured}
    for how, told in best.items():
        rate = told.tokens / told.step_time_s / cluster.size
        if row.tflops is not None:
            rate = told.mfu("square") * told.peak_flops / 1e12
        out[how] = {
            "layout": str(told.layout), "step_time_s": told.step_time_s, "rate": rate, "error": rate / measured - 1, "parts_s": dict(told.parts_s),
            "peak_bytes": told.peak_bytes, "fits": told.fits,
        }  # fmt: skip
    return out | {"error": out[row.dispatch]["error"]}


def place(told: Any) -> tuple[bool, float]:
    """The fastest that fits first; where none does, that of least memory."""
    return (not told.fits, told.step_time_s if told.fits else told.peak_bytes)


def said(r: dict[str, Any]) -> str:
    if "refused" in r:
        return f"{r['row']}: {r['refused']} ({r['seconds']:.0f} s)"
    both = "; ".join(f"{how} {r[how]['rate']:,.0f} ({r[how]['error']:+.1%}), {r[how]['layout']}" for how in ("all at once", "once a node"))
    return f"{r['row']}: measured {r['measured']:,.0f} {r['unit']}; {both}. As the source has it ({r['dispatch']}): {r['error']:+.1%} ({r['seconds']:.0f} s)"


if __name__ == "__main__":
    main()
