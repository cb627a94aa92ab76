"""A head under a loss with all its logits and without: what plans say of it, and resident memory and time of steps on this machine's CPU.

    python -m benchmarks.loss_head --tokens 4096 --vocabulary 32768 --width 256 --models '' --out benchmarks/results/loss_head.json
    python -m benchmarks.loss_head --repeats 0 --out benchmarks/results/loss_head_planned.json

Predicted: whole models, or a few layers of one, on H100s; of each form the fastest plan, and the plan of least memory. Measured: a Llama of one narrow layer, compiled by Inductor on
one process. Each run is a process of its own, the forms take turns; the mark of its memory (VmHWM) is reset after a first step, which warms everything up, as is done in `benchmarks.resident`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write
from benchmarks.resident import status

FORMS = ("plain", "chunked")
# Model, layers of it (None: all), devices, sequences, tokens of each, optimizer.
PREDICTED: tuple[tuple[str, int | None, str, int, int, str], ...] = (
    ("llama3-8b", 2, "h100:1x1", 1, 8192, "sgd"),
    ("llama3-8b", None, "h100:1x8", 8, 8192, "adamw"),
    ("gemma3-1b", None, "h100:1x1", 1, 8192, "adamw"),
    ("gpt2", None, "h100:1x1", 8, 1024, "adamw"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a measured step")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--steps", type=int, default=3, help="timed in each process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each form")
    parser.add_argument("--models", default=",".join(dict.fromkeys(m for m, *_ in PREDICTED)), help="that are planned for; empty for none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def predicted(model: str, layers: int | None, cluster: str, batch: int, sequence: int, optimizer: str) -> dict[str, Any]:
    import autopar
    from autopar.models import configs

    config = configs.config(model)
    row: dict[str, Any] = {
        "model": model,
        "layers": layers,
        "cluster": cluster,
        "sequences": batch,
        "tokens": sequence,
        "vocabulary": config.vocab_size,
    }
    row["optimizer"] = optimizer
    row["logits_bytes"] = 4 * batch * sequence * config.vocab_size
    for form in FORMS:
        for memory in ("fastest", "least"):
            module = configs.build(config, layers)
            how = {"precision": "bf16", "optimizer": optimizer, "loss_head": form, "memory": memory}
            plan = autopar.plan(module, configs.inputs(config, batch, sequence), cluster, **how)
            row[f"{form}, {memory}"] = {k: plan.predicted[k] for k in ("step_time_s", "peak_memory_bytes")}
    return row


def child(a: argparse.Namespace) -> dict[str, float]:
    """A form's steps: their time, what is resident at most and before, and the loss of the first."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar

    torch.manual_seed(0)
    sizes = {"vocab_size": a.vocabulary, "hidden_size": a.width, "intermediate_size": 2 * a.width, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(getattr(torch, a.dtype))
    ids = torch.randint(0, a.vocabulary, (a.tokens // 512, 512))
    module = autopar.compile(model, backend=a.backend, loss_head=a.form, cluster="h100:1x1")

    def step() -> float:
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        module.zero_grad()
        return float(loss.detach())

    loss = step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the mark is what is resident now
    before, seconds = status("VmRSS"), []
    for _ in range(a.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"step_s": statistics.median(seconds), "resident_before_bytes": before, "resident_peak_bytes": status("VmHWM"), "loss": loss}


def measured(a: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for _ in range(a.repeats):
        for form in FORMS:
            command = [sys.executable, "-m", "benchmarks.loss_head", *sys.argv[1:], "--form", form]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[form].append(json.loads(out.splitlines()[-1]))
            print(form, found[form][-1], flush=True)
    rows = []
    for form, runs in found.items():
        more = [r["resident_peak_bytes"] - r["resident_before_bytes"] for r in runs]
        rows.append(
            {
                "form": form,
                "step_s": statistics.median(r["step_s"] for r in runs),
                "resident_more_bytes": statistics.median(more),
                "loss": runs[0]["loss"],
                "runs": runs,
            }
        )
    return rows


def main() -> None:
    a = parse()
    if a.form:
        print(json.dumps(child(a)))
        return
    rows = measured(a) if a.repeats else []
    plans = []
    for case in PREDICTED:
        if case[0] in a.models.split(","):
            plans.append(predicted(*case))
            print(json.dumps(plans[-1]), flush=True)
    setting = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    versions = {n: importlib.metadata.version(n) for n in ("transformers", "ortools")}
    logits = 4 * a.tokens * a.vocabulary
    write(
        a.out,
        "python -m benchmarks.loss_head",
        {"arguments": setting, "versions": versions, "logits_bytes": logits, "measured": rows, "predicted": plans},
    )


if __name__ == "__main__":
    main()
