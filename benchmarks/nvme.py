"""How far files on local disks bring the peak of activations down, and what that costs, by our prices.

    python -m benchmarks.nvme --out benchmarks/results/nvme.json
    python -m benchmarks.nvme --case gpt2,hidden=8192,layers=4,batch=16,seq=1024 --gpu a100:1 --write-GBps 6.1 --read-GBps 7.2

SSDTrain (Wu et al., 2024, "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language Model Training") reports 47% less activation peak
at next to no time for GPT, BERT and T5 of hidden sizes 8192 to 16384 on an A100 with an array of four Optane P5800X. The default disks here are such an
array by its maker's figures: 6.1 GB/s to write and 7.2 GB/s to read each. Nothing is offloaded to host memory, and nothing is run.

Activation peak: the plan's peak less what lives anyway (parameters, their optimizer's state, inputs). The baseline saves everything.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from autopar import Cluster, Offload, plan
from autopar.models import configs as models
from autopar.plan.plan import Plan
from autopar.planner.infeasible import InfeasibleError
from benchmarks.record import write

CASES = [
    "gpt2,hidden=8192,layers=4,batch=16,seq=1024",
    "bert,hidden=8192,layers=4,batch=16,seq=1024",
    "t5,hidden=8192,layers=4,batch=16,seq=1024",
]
ENOUGH = 0.53  # of the activation peak: SSDTrain's 47% less
STATE_BYTES = 8.0


def config(kind: str, hidden: int, layers: int, seq: int) -> dict[str, Any]:
    heads = hidden // 128
    return {
        "gpt2": {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": seq},
        "bert": {
            "model_type": "bert", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 4 * hidden, "max_position_embeddings": seq, "architectures": ["BertForMaskedLM"],
        },
        "t5": {
            "model_type": "t5", "d_model": hidden, "num_layers": layers // 2, "num_decoder_layers": layers // 2, "num_heads": heads,
            "d_kv": 128, "d_ff": 4 * hidden, "decoder_start_token_id": 0, "pad_token_id": 0, "architectures": ["T5ForConditionalGeneration"],
        },
    }[kind]  # fmt: skip


def case(text: str, cluster: Cluster, seconds: float) -> dict[str, Any]:
    kind, *rest = text.split(",")
    sizes = {k: int(v) for k, v in (x.split("=") for x in rest)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config(kind, sizes["hidden"], sizes["layers"], sizes["seq"])))
        c = models.config(str(path))
    shapes = models.inputs(c, sizes["batch"], sizes["seq"])

    def planned(memory: float, offload: Offload | bool) -> Plan:
        return plan(
            models.build(c), shapes, cluster, precision="bf16", memory=memory, offload=offload, options={"seconds": seconds, "gap": 0.002}
        )

    everything = planned(1e15, False)
    lives = sum(p.numel() for p in models.build(c).parameters()) * (4.0 + STATE_BYTES)
    peak, time_s = everything.predicted["peak_memory_bytes"], everything.predicted["step_time_s"]
    rows = []
    for share in (0.8, ENOUGH, 0.4, 0.3):
        try:
            found = planned(lives + share * (peak - lives), Offload(host=False, nvme=True))
        except InfeasibleError as e:
            rows.append({"share": share, "short_bytes": e.shortfall_bytes})
            continue
        again = sum(policy == "recompute" for policy in found.activations.values())
        rows.append({
            "share": share, "activation_peak_bytes": found.predicted["peak_memory_bytes"] - lives,
            "lower_by": 1 - (found.predicted["peak_memory_bytes"] - lives) / (peak - lives),
            "longer_by": found.predicted["step_time_s"] / time_s - 1, "away": len(found.offload), "recomputed": again,
        })  # fmt: skip
    return {"case": text, "activation_peak_bytes": peak - lives, "step_time_s": time_s, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", default=[], help="kind,hidden=...,layers=...,batch=...,seq=...; kind is gpt2, bert or t5"
    )
    parser.add_argument("--gpu", default="a100:1")
    parser.add_argument("--write-GBps", type=float, default=4 * 6.1, dest="write")
    parser.add_argument("--read-GBps", type=float, default=4 * 7.2, dest="read")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    ways = {k: {"bandwidth_Bps": x * 1e9, "efficiency": 0.9, "latency_s": 1e-4} for k, x in (("write", a.write), ("read", a.read))}
    cluster = Cluster.model_validate({**Cluster.of(a.gpu).model_dump(), "nvme": ways})
    found = []
    for text in a.case or CASES:
        one = case(text, cluster, a.seconds)
        found.append(one)
        print(f"{text}: activations {one['activation_peak_bytes'] / 1e9:.2f} GB, step {one['step_time_s'] * 1e3:.1f} ms; everything saved")
        for r in one["rows"]:
            if "lower_by" in r:
                print(
                    f"  lower by {r['lower_by']:.1%}, longer by {r['longer_by']:.2%}: {r['away']} away, {r['recomputed']} made again",
                    flush=True,
                )
            else:
                print(f"  {r['share']:.0%} of it: {r['short_bytes'] / 1e9:.2f} GB short", flush=True)
    write(a.out, "python -m benchmarks.nvme", {"gpu": a.gpu, "write_GBps": a.write, "read_GBps": a.read, "cases": found})


if __name__ == "__main__":
    main()
