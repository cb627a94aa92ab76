"""Training steps of a Llama on one GPU: eager, torch.compile and autopar, as they take time and memory, beside what was predicted.

    python -m benchmarks.gpu --calibrate 60 --out benchmarks/results/gpu.json

Each way is a process of its own with the same weights and tokens, bf16 throughout, fused AdamW; some compile side by side, and one steps at a time. Seconds are medians of steps between
events; memory is what the allocator had given out at most, after the first steps. With --calibrate plans are made for what `autopar calibrate` measures first, else for the description that
the GPU's name stands for. Ways with "half" may use a little over half of what plain autopar needs beside parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import write

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "torch.compile": {"compiled": True},
    "torch.compile, checkpointed": {"compiled": True, "checkpointed": True},
    "torch.compile, budget": {"compiled": True, "budget": 0.5},
    "autopar": {"how": {"loss_head": "plain"}},
    "autopar, chunked head": {"how": {"loss_head": "chunked"}},
    "autopar, half": {"how": {}, "share": 0.5},
    "autopar, half, offload": {"how": {"offload": "host"}, "share": 0.5},
    "autopar, least": {"how": {"memory": "least"}},
}
WINDOW = 5  # steps that follow one another without a pause
STATE_BYTES = 8  # of a parameter in bf16: itself, its gradient, and two moments


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8, help="key and value heads")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ways", default=";".join(WAYS), help="semicolon-separated")
    parser.add_argument("--slots", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a process")
    parser.add_argument("--calibrate", type=float, default=0, help="seconds that measuring the GPU may take; 0: plan for its description")
    parser.add_argument("--cluster", default="", help="to plan for, without --calibrate")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def built(a: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=a.vocabulary, hidden_size=a.width, intermediate_size=a.inner, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.groups, max_position_embeddings=a.sequence, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(a.device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def locked(path: Path, alone: bool) -> Iterator[None]:
    """The GPU, shared while compiling, alone while steps are timed."""
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Clock:
    """Seconds of calls on the device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def of(self, call: Callable[[], Any]) -> float:
        import torch

        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        start_event, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start_event.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start_event.elapsed_time(end)) / 1e3


def child(a: argparse.Namespace) -> dict[str, Any]:
    """One way's steps."""
    import torch

    import autopar

    way, began = WAYS[a.way], time.monotonic()
    row: dict[str, Any] = {"way": a.way}
    with locked(a.lock, alone=False):
        model = built(a)
        parameters = sum(p.numel() for p in model.parameters())
        row["parameters"] = parameters
        ids = torch.randint(4, a.vocabulary, (a.batch, a.sequence), generator=torch.Generator().manual_seed(1)).to(a.device)
        batch = {"input_ids": ids, "labels": ids}
        if way.get("checkpointed"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        run = model
        if way.get("budget"):
            import torch._functorch.config as functorch_config

            functorch_config.activation_memory_budget = way["budget"]
        if way.get("compiled"):
            run = torch.compile(model, backend=a.backend)
        if "how" in way:
            how = dict(way["how"])
            if "share" in way:
                state = STATE_BYTES * parameters
                how["memory"] = state + 1.05 * way["share"] * (a.plain - state)
            run = autopar.compile(
                model, {"dp": 1}, layout=None, backend=a.backend, optimizer="adamw-fused", cluster=a.cluster or None,
                options={"seconds": 60}, **how,
            )  # fmt: skip
            run.prepare(**batch)
            plan = run.plan
            row |= {
                "predicted_s": plan.predicted["step_time_s"], "predicted_bytes": plan.predicted["peak_memory_bytes"],
                "budget_bytes": plan.predicted.get("budget_bytes"), "recomputed": len(plan.recompute), "offloaded": len(plan.offload),
                "planned_after_s": time.monotonic() - began,
            }  # fmt: skip
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-4, fused=True)

        def step() -> float:
            loss = run(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [float(step()) for _ in range(3)]
        row["ready_after_s"] = time.monotonic() - began
    clock = Clock(a.device)
    with locked(a.lock, alone=True):
        step()
        if a.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = [clock.of(lambda: [step() for _ in range(WINDOW)]) / WINDOW for _ in range(-(-a.steps // WINDOW))]
        halves = [clock.of(lambda: run(**batch).loss.detach()) for _ in range(3)]
        if a.device == "cuda":
            row["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    losses.append(float(step()))
    row |= {"losses": losses, "seconds": seconds, "step_s": statistics.median(seconds), "forward_s": statistics.median(halves)}
    return row


def started(a: argparse.Namespace, way: str, lock: Path, plain: float, cluster: str) -> dict[str, Any]:
    own = {"way": way, "lock": str(lock), "plain": str(plain), "cluster": cluster}
    rest = [f"--{k}={v}" for k, v in vars(a).items() if k not in (*own, "out", "ways") and v is not None]
    command = [sys.executable, "-m", "benchmarks.gpu", *(f"--{k}={v}" for k, v in own.items()), *rest]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=a.limit)
    except subprocess.TimeoutExpired:
        return {"way": way, "failed": f"not done after {a.limit:.0f} s"}
    if done.returncode:
        return {"way": way, "failed": "\n".join(done.stderr.strip().splitlines()[-25:])}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def limits(a: argparse.Namespace) -> dict[str, float]:
    """What the card gives: a large copy, counting bytes read and written, a large bf16 product, and copies from and to pinned memory."""
    import torch

    if a.device == "cpu":
        return {}
    clock = Clock(a.device)
    x, y = torch.randn(1 << 29, device="cuda"), torch.empty(1 << 29, device="cuda")
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    pinned, part = torch.empty(1 << 28, pin_memory=True), x[: 1 << 28]

    def median(call: Callable[[], Any]) -> float:
        return statistics.median([clock.of(call) for _ in range(13)][3:])

    found = {
        "copy_Bps": 2 * 4 * x.numel() / median(lambda: y.copy_(x)),
        "product_flops": 2 * 8192**3 / median(lambda: m @ m),
        "to_host_Bps": 4 * part.numel() / median(lambda: pinned.copy_(part, non_blocking=True)),
        "from_host_Bps": 4 * part.numel() / median(lambda: part.copy_(pinned, non_blocking=True)),
    }
    return found


def table(rows: list[dict[str, Any]], tokens: int) -> str:
    lines = [f"{'':30} {'ms':>8} {'tokens/s':>9} {'GB':>7} {'predicted ms':>13} {'GB':>7}  recomputed, offloaded"]
    for r in rows:
        if "failed" in r:
            lines.append(f"{r['way']:30} failed: {r['failed'].splitlines()[-1][:150]}")
            continue
        said = f"{r['predicted_s'] * 1e3:13.2f} {r['predicted_bytes'] / 1e9:7.2f}" if "predicted_s" in r else " " * 21
        lines.append(
            f"{r['way']:30} {r['step_s'] * 1e3:8.2f} {tokens / r['step_s']:9.0f} {r.get('peak_bytes', 0) / 1e9:7.2f} {said}"
            + (f"  {r['recomputed']}, {r['offloaded']}" if "recomputed" in r else "")
        )
    return "\n".join(lines)


def main() -> None:
    a = parse()
    if a.way:
        print(json.dumps(child(a)))
        return
    with tempfile.TemporaryDirectory() as folder:
        lock, cluster = Path(folder) / "lock", a.cluster
        result: dict[str, Any] = {
            k: v for k, v in vars(a).items() if isinstance(v, (int, float, str)) and k not in ("way", "plain", "device")
        }
        result["limits"] = limits(a)
        print(json.dumps(result["limits"]), flush=True)
        if a.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        if a.calibrate:
            cluster = str(Path(folder) / "cluster.json")
            command = ["-m", "autopar", "calibrate", "--out", cluster, "--seconds", str(a.calibrate), "--processes", "1"]
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            print(done.stdout[-6000:] + done.stderr[-3000:], flush=True)
            if done.returncode:
                cluster = a.cluster
            else:
                result["cluster"] = json.loads(Path(cluster).read_text())
        rows: dict[str, dict[str, Any]] = {}
        plain = 0.0

        def keep(row: dict[str, Any]) -> None:
            rows[row["way"]] = row
            print(table([row], a.batch * a.sequence).splitlines()[-1], flush=True)
            if "failed" in row:
                print(row["failed"], flush=True)
            write(a.out, "python -m benchmarks.gpu", {**result, "gpu": gpu_name(a), "ways": list(rows.values())})

        ways = a.ways.split(";")
        with ThreadPoolExecutor(a.slots) as pool:  # those that need to know what plain autopar takes come after it
            first = [w for w in ways if "share" not in WAYS[w]]
            for row in pool.map(lambda w: started(a, w, lock, 0.0, cluster), sorted(first, key=lambda w: w != "autopar")):
                keep(row)
                if row["way"] == "autopar":
                    plain = row.get("predicted_bytes", 0.0)
            if plain:
                for row in pool.map(lambda w: started(a, w, lock, plain, cluster), [w for w in ways if w not in first]):
                    keep(row)
        print(table([rows[w] for w in ways if w in rows], a.batch * a.sequence))


def gpu_name(a: argparse.Namespace) -> str:
    import torch

    return torch.cuda.get_device_name() if a.device == "cuda" else "no GPU: a rehearsal"


if __name__ == "__main__":
    main()
