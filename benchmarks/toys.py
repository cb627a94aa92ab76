"""How long small models of many families take to plan: two or so layers, on 2x2 devices, where a whole step takes milliseconds.

    python -m benchmarks.toys --models causal:llama,causal:gpt_oss,speech:whisper --out benchmarks/results/toys.json

A model is head:type, as `tests.sweep` names them. Seconds are of capture and of planning, by the clock and of the processor, all in one process.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write

FAMILIES = (
    "causal:llama,causal:gemma3_text,causal:gpt_oss,causal:deepseek_v3,causal:qwen3_next,causal:jamba,causal:mixtral,causal:gpt2,causal:phi,causal:falcon,"
    "causal:mamba,causal:bamba,causal:olmo2,causal:qwen3,causal:llama4_text,causal:granite,causal:bloom,causal:opt,masked:bert,masked:modernbert,"
    "masked:roberta,masked:deberta,masked:electra,masked:xlm-roberta,masked:albert,seq2seq:t5,seq2seq:bart,seq2seq:pegasus,seq2seq:mbart,seq2seq:led,image:vit,image:swin,"
    "image:resnet,image:convnext,image:deit,image:beit,ctc:wav2vec2,ctc:hubert,audio:audio-spectrogram-transformer,speech:whisper,speech:speech_to_text,segmentation:segformer,"
    "contrastive:clip,contrastive:siglip,masked_image:vit,depth:dpt,causal:qwen2,causal:stablelm,causal:gpt_neox,masked:distilbert,masked:camembert,"
    "masked:mpnet,causal:starcoder2,causal:cohere"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=FAMILIES)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--cluster", default="cpu:1x4")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in a.models.split(","):
        rows.append(planned(name, a.cluster, a.mesh))
        print(said(rows[-1]), flush=True)
    slowest = max((r["plan_cpu_s"] for r in rows if "error" not in r), default=0.0)
    print(f"{len(rows)} models, the slowest took {slowest:.1f} s of the processor to plan")
    write(a.out, "python -m benchmarks.toys", {"mesh": a.mesh, "cluster": a.cluster, "slowest_plan_cpu_s": slowest, "rows": rows})


def planned(name: str, cluster: str, mesh: str) -> dict[str, Any]:
    from autopar.planner.offline import plan
    from tests.sweep import small

    head, kind = name.split(":")
    row: dict[str, Any] = {"model": name}
    captured: dict[str, float] = {}
    began: dict[str, float] = {"cpu": time.process_time(), "clock": time.perf_counter()}

    def progress(stage: str, seconds: float) -> None:
        if stage == "capture" and seconds:
            captured["cpu"], captured["clock"] = time.process_time(), time.perf_counter()

    try:
        torch.manual_seed(0)
        model = small.model(head, kind, torch.float32)
        _, given = small.inputs(head, kind, torch.float32)
        given = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        made = plan(model, given, cluster, mesh, precision="fp32", progress=progress)
    except Exception as e:
        return {**row, "error": f"{type(e).__name__}: {str(e).splitlines()[0][:150] if str(e) else ''}"}
    return {
        **row,
        "capture_s": round(captured["clock"] - began["clock"], 2),
        "plan_s": round(time.perf_counter() - captured["clock"], 2),
        "plan_cpu_s": round(time.process_time() - captured["cpu"], 2),
        "step_time_s": made.predicted["step_time_s"],
        "gap": made.solver["gap"],
        "stopped_by": made.solver["stopped_by"],
    }


def said(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"{r['model']:28} {r['error']}"
    return (
        f"{r['model']:28} captured in {r['capture_s']:5.1f} s, planned in {r['plan_s']:5.1f} s ({r['plan_cpu_s']:.1f} of the processor); "
        f"step {r['step_time_s'] * 1e3:.2f} ms, gap {r['gap']:.2%}, stopped by {r['stopped_by']}"
    )


if __name__ == "__main__":
    main()
