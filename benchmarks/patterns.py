"""Which of our operators, and of the Triton kernels in them, are found in captured programs of transformers' models, unmodified, of small sizes.

    python -m benchmarks.patterns [--models causal:llama,masked:bert] --out benchmarks/results/patterns.json

Each model's training call is captured, and its patterns are replaced as for a plan. A row counts calls of forward.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import write

MODELS = (
    "causal:llama", "causal:mistral", "causal:qwen2", "causal:qwen3", "causal:gemma", "causal:gemma2", "causal:gemma3_text", "causal:phi", "causal:phi3", "causal:gpt2", "causal:gpt_neox",
    "causal:gptj", "causal:opt", "causal:bloom", "causal:falcon", "causal:olmo2", "causal:stablelm", "causal:starcoder2", "causal:cohere", "causal:granite", "causal:glm4", "causal:smollm3",
    "causal:mixtral", "causal:qwen2_moe", "causal:qwen3_moe", "causal:olmoe", "causal:deepseek_v3", "causal:gpt_oss", "causal:granitemoe", "causal:phimoe", "causal:mamba2",
    "masked:bert", "masked:roberta", "masked:modernbert", "masked:deberta-v2", "seq2seq:t5", "seq2seq:bart", "image:vit", "image:swin", "sequence:electra", "ctc:wav2vec2", "speech:whisper",
)  # fmt: skip
RANDOM = ("bernoulli", "native_dropout", "rand_like", "rand", "random")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="head:type of tests.sweep.small, comma-separated")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def counted(before: list[str], after: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Of calls as they were captured, and, with their arguments, as patterns leave them. Of losses and gates how many are found, and how many there are."""
    from autopar.kernels.triton_takes import has_form
    from autopar.rules.experts import FORWARD as EXPERTS
    from autopar.rules.loss_head import FORWARD as HEAD

    n, gates = Counter(t for t, _ in after), [has_form(str(args[9])) for t, args in after if t == EXPERTS]
    forward = Counter(t.split(".")[1] for t in n.elements() if "." in t and "_backward" not in t)
    return {
        "losses over classes": sum(t in ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default") for t in before),
        "loss head": n[HEAD],
        "attention": sum(forward[t] for t in forward if t.startswith("attention_v")),
        "softmax": forward["_softmax"] + forward["_safe_softmax"],
        "experts": len(gates),
        "gates of a known form": sum(gates),
        "random": sum(forward[t] for t in forward if t in RANDOM),
    }


def row(model: str, dtype: str) -> dict[str, Any]:
    import torch

    from autopar.capture.capture import Call, capture, off_cache
    from autopar.capture.fusions.table import fused
    from tests.sweep import small

    head, _, kind = model.partition(":")
    began = time.monotonic()
    try:
        made, (_, given) = small.model(head, kind, getattr(torch, dtype)).train(), small.inputs(head, kind, getattr(torch, dtype))
        call = Call.of((), off_cache(made, given))
        captured = capture(made, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors))
        before = [str(n.target) for n in captured.gm.graph.nodes if n.op == "call_function"]
        nodes = [n for n in fused(captured).gm.graph.nodes if n.op == "call_function"]
    except Exception as e:
        return {
            "model": model,
            "class": small.classes(head).get(kind, ""),
            "error": f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"[:200],
        }
    found = counted(before, [(str(n.target), n.args) for n in nodes])
    return {"model": model, "class": small.classes(head)[kind], "found": found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    a = parse()
    rows = []
    for model in a.models.split(","):
        rows.append(row(model, a.dtype))
        r = rows[-1]
        said = r["error"] if "error" in r else ", ".join(f"{k}: {x}" for k, x in r["found"].items() if x)
        print(f"{model:22} {r['class']:32} {said}", flush=True)
    write(a.out, "python -m benchmarks.patterns", {"dtype": a.dtype, "rows": rows})


if __name__ == "__main__":
    main()
