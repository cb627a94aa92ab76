"""Seconds of a step from what was measured, by the name of the metric: its words say what is counted, of how many devices, and in what unit."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from autopar.hardware.cluster import Cluster
from autopar.text.strict_json import short
from benchmarks.names import kind

_SAME = {
    "tokens": "token tok toks tgs", "samples": "sample sequence sequences seq seqs example examples", "step": "steps iter iters iteration iterations it",
    "tflops": "tflop teraflops teraflop", "pflops": "pflop petaflops petaflop", "s": "sec secs second seconds", "ms": "msec msecs millisecond milliseconds",
    "gpu": "gpus device devices chip accelerator card", "total": "global aggregate aggregated overall all cluster system",
    "pct": "percent percentage", "share": "fraction ratio", "hw": "hardware",
}  # fmt: skip
_WORDS = {word: name for name, words in _SAME.items() for word in (name, *words.split())}
_IDLE = set(
    re.findall(r"\w+", "per the a of in time times duration throughput training train model mean median average avg achieved measured")
)
_COUNTED = {"tokens", "samples", "step", "tflops", "pflops", "mfu", "hfu"}
_QUALIFIERS = {"s", "ms", "gpu", "total", "pct", "share", "hw", "causal"}
_KNOWN = "tokens_per_s_per_gpu, samples_per_s, step_time_s, iter_ms, TFLOPs_per_gpu, MFU_pct, max_memory_allocated_bytes, OOM, ..."
_BYTES = {"bytes": 1.0, "b": 1.0, "mb": 1e6, "mib": 2.0**20, "gb": 1e9, "gib": 2.0**30}


def positive(text: str, what: str) -> float:
    try:
        x = float(text)
    except ValueError:
        x = math.nan
    if not 1e-30 < x < 1e30:  # what is made of it is finite then
        raise ValueError(f"{what} is {short(text)!r}, not a positive number")
    return x


def out_of_memory(metric: str) -> bool:
    return re.sub(r"[\s_-]+", "", metric.lower()) in ("oom", "outofmemory")


def peak_bytes(v: dict[str, str]) -> float | None:
    """None where the metric is not memory."""
    words = [w for w in re.findall(r"[a-z]+", v["metric"].lower()) if w not in ("per", "gpu", "device", "rank")]
    if not words or words[0] not in ("max", "peak") or not set(words[1:3]) & {"mem", "memory"}:
        return None
    if "reserved" in words:
        raise ValueError("reserved memory is more than what is used: only what is allocated is predicted")
    if words[-1] not in _BYTES:
        raise ValueError(f"{short(v['metric'])!r} does not say its unit: {', '.join(_BYTES)}")
    return positive(v["value"], "value") * _BYTES[words[-1]]


def step_s(v: dict[str, str], said: dict[str, str], cluster: Cluster, batch: int, notes: list[str]) -> float:
    """said: what else the row has, which wins where it is a time."""
    seconds = _step_s(v, said, cluster, batch, notes)
    peak = cluster.device.peak_flops.bfloat16 * cluster.size
    if flops(v, batch * int(v["seq"]), 0.5) > seconds * peak:
        raise ValueError(f"a step of {seconds:.3g} s is more than {cluster.device.name} can do: is the metric of one device, or of all?")
    return seconds


def _step_s(v: dict[str, str], said: dict[str, str], cluster: Cluster, batch: int, notes: list[str]) -> float:
    gpus, tokens = cluster.size, batch * int(v["seq"])
    for key in ("step_time_s", "derived_iter_s"):
        if key in said:
            return positive(said[key], key)
    if "tokens_per_s_gpu" in said:
        return tokens / (positive(said["tokens_per_s_gpu"], "tokens_per_s_gpu") * gpus)
    what, how, per_s = _meaning(v["metric"])
    value = positive(v["value"].removesuffix("%").strip() if what in ("mfu", "hfu") else v["value"], "value")
    if what == "step":
        if how not in ({"s"}, {"ms"}):
            raise ValueError(f"{short(v['metric'])!r} does not say its unit: step_time_s, step_time_ms, steps_per_s")
        return 1 / value if per_s else value / 1000 if "ms" in how else value
    if what in ("tokens", "samples"):
        if "gpu" not in how and "total" not in how:
            notes.append(f"{short(v['metric'])!r} is taken to be of all devices")
        return (tokens if what == "tokens" else batch) / (value * (gpus if "gpu" in how else 1))
    work = flops(v, tokens, 0.5 if "causal" in how else 1.0, what == "hfu" or "hw" in how)
    if what in ("tflops", "pflops"):
        if what == "pflops" and not how & {"gpu", "total"}:
            raise ValueError(f"{short(v['metric'])!r} does not say whether it is of one device or of all")
        return work / ((1 if "total" in how else gpus) * value * (1e12 if what == "tflops" else 1e15))
    if value <= 1 and not how & {"share", "pct"} and not v["value"].endswith("%"):
        raise ValueError(f"{short(v['metric'])!r} of {value}: a share, or percent? Name it MFU_share or MFU_pct")
    whole = 1 if "share" in how else 100
    if value > whole:
        raise ValueError(f"{short(v['metric'])!r} of {value} is more than all that the device can do")
    if not v["gpu_peak_tflops"]:
        v = {**v, "gpu_peak_tflops": str(cluster.device.peak_flops.bfloat16 / 1e12)}
        notes.append(f"gpu_peak_tflops is not stated: {v['gpu_peak_tflops']}, bfloat16 of {cluster.device.name}")
    return work / (gpus * value / whole * positive(v["gpu_peak_tflops"], "gpu_peak_tflops") * 1e12)


def _meaning(metric: str) -> tuple[str, set[str], bool]:
    """What is counted, what of it is said, whether it is a rate of steps."""
    text = re.sub(r"(model|hardware)[ _-]*flops?[ _-]*utili[sz]ation", lambda m: " mfu " if m[1] == "model" else " hfu ", metric.lower())
    text = re.sub(r"(?<![a-z])tgs(?![a-z])", "tokens per gpu per s", text).replace("%", " pct ").replace("/", " per ")
    words = [_WORDS.get(w, w) for w in re.findall(r"[a-z]+|\d+", text)]
    used = set(words) - _IDLE
    counted = used & _COUNTED
    rest = used - counted
    if counted & {"tflops", "pflops"}:
        rest -= {"s"}
    allowed = _QUALIFIERS - ({"s", "ms"} if counted & {"mfu", "hfu"} else set())
    rate = counted & {"tokens", "samples"}
    if len(counted) != 1 or rest - allowed or {"gpu", "total"} <= rest or (rate and "s" not in rest) or (rate and "ms" in rest):
        raise ValueError(f"{short(metric)!r} is no metric that is known: {_KNOWN}")
    return counted.pop(), rest, ("per", "s") in pairwise(words)


def flops(v: dict[str, str], tokens: int, counted: float, hardware: bool = False) -> float:
    """Of a step as Megatron-LM counts: products forward and backward, and attention's square, or so much of it as is counted (causal: half). hardware: also
    what is made again."""
    h, f, s, n, vocab = (float(v[k]) for k in ("hidden", "ffn", "seq", "layers", "vocab"))
    kv = float(v["kv_heads"]) / float(v["heads"])
    gated = 3 if kind(v["model"]) == "llama" else 2
    layers, logits = n * (h * h * (2 + 2 * kv) + gated * h * f + 2 * counted * h * s), h * vocab
    if not hardware or v["recompute"] == "none":
        return 6 * tokens * (layers + logits)
    if v["recompute"] != "full":
        raise ValueError(f"FLOPs of the hardware do not say what recompute {short(v['recompute'])!r} adds")
    return tokens * (8 * layers + 6 * logits)
