"""Published training runs as autopar sees them: a model, a layout, a cluster, what software ran it, and what was measured.

A row says little of the software; what each source says of itself is in `SOURCES`, and nothing here depends on a row or on a model's name but for what
kind of model it is.
"""

from __future__ import annotations

import csv
import hashlib
import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar import models
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.predict.api import solved
from autopar.predict.fit import Run
from autopar.predict.pieces import Piece
from autopar.predict.pieces import pieces as split
from autopar.predict.runtime import PIPELINED, RUNTIMES, Runtime
from autopar.staged import Found
from autopar.strict_json import short

DATA = Path(__file__).parent / "data" / "published"
FORM = 1  # of the programs kept on disk: raise it when they change

_MEGATRON = RUNTIMES["megatron"]
# FlashAttention-2 is about twice as fast as the first (Dao, 2023, abstract).
FLASH_1 = 0.5


@dataclass(frozen=True)
class Source:
    """What a source's rows have in common, or do not say."""

    runtime: Runtime
    zero: int = 0
    sequence_parallel: bool = False


# Framework by file. kwai: pipelined tensor parallelism; the cards of its nodes are not stated, so what its network reaches is fitted. hagemann: ZeRO-1 on Megatron's layers, gradients in half
# precision (13B parameters fit one device only so), the loss on gathered logits (that nothing of 4 x 8192 tokens fits, at any tensor-parallel size, says so); what its
# pipelines' allocators lose is fitted to who ran out of memory (0.15 to 0.2 are alike, and any four fifths of the rows say so too). megatron_core: its README's
# overlap flags. llm_foundry: FSDP of torch, the first flash attention. The kernels are those of the row.
SOURCES = {
    "kwai_h800": Source(replace(_MEGATRON, name="kwai", tensor_hidden=PIPELINED, network_share=0.5), zero=1),
    "hagemann_a100": Source(
        replace(
            _MEGATRON,
            name="hagemann",
            gathers_logits=True,
            logits_bytes=15.0,
            grad_bytes=2.0,
            reduce_bytes=2.0,
            accumulated_bytes=4.0,
            fragmented=0.15,
        ),
        zero=1,
    ),
    "megatron_core_h100": Source(
        replace(_MEGATRON, name="megatron-core", tensor_hidden=PIPELINED, data_exposed=0.0), zero=1, sequence_parallel=True
    ),
    "megatron_2021_a100": Source(replace(_MEGATRON, name="megatron-2021", unfused_passes=6.0)),
    "llm_foundry_fsdp": Source(replace(RUNTIMES["fsdp"], name="llm-foundry", attention_rate=FLASH_1)),
    "nanotron_h100": Source(replace(_MEGATRON, name="nanotron")),
}
ZEROS = {"FSDP=FULL_SHARD": 3, "FSDP=SHARD_GRAD_OP": 2, "ZeRO-1": 1, "ZeRO-0": 0}  # what a row says of itself
DEVICES = {"h800": "h800", "h100": "h100", "a100_40": "a100-40", "a100": "a100"}
MODELS = {"llama": "llama", "gpt": "gpt", "mpt": "gpt"}
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
KERNELS = {
    "flash_attention2 + RMS kernel": {},
    "flash_attention2": {"fusion": "none"},
    "flash_attentionv1.0.8": {"fusion": "none", "attention_rate": FLASH_1},
    "fused": {"fusion": "none", "unfused_passes": 6.0},
    "torch": {"fusion": "none", "unfused_passes": 11.0},
}


@dataclass(frozen=True)
class Row:
    """place: file and line; step_s or peak_bytes: measured; oom: it ran out of memory."""

    place: str
    source: str
    group: str
    name: str
    values: dict[str, str]
    layout: Layout
    runtime: Runtime
    cluster: Cluster
    global_batch: int
    seq: int
    step_s: float | None
    peak_bytes: float | None
    oom: bool
    others: tuple[Layout, ...] = ()  # what else it may have been, where the row does not say

    @property
    def label(self) -> str:
        return f"{self.source}: {self.name}, {self.values['gpus']} GPUs, s {self.seq}, {self.layout}"


def rows(folder: Path = DATA) -> tuple[list[Row], list[str]]:
    """And what could not be read, with the reason."""
    found: list[Row] = []
    left: list[str] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as f:
                for i, values in enumerate(csv.DictReader(f), 2):
                    _read(f"{path.name}:{i}", path.stem, values, found, left)
        except (OSError, csv.Error) as e:
            left.append(f"{path.name}: the rest cannot be read: {e}")
    return found, left


def _read(place: str, source: str, values: dict[str, Any], found: list[Row], left: list[str]) -> None:
    try:
        # Short lines have no text in their last columns, long ones a list that belongs to no column.
        found.append(_row(place, source, {k: (v or "").strip() for k, v in values.items() if k}))
    except KeyError as e:
        left.append(f"{place}: there is no column {e}")
    except ValueError as e:
        left.append(f"{place}: {reason(e)}")


def reason(e: ValueError) -> str:
    """In one line."""
    return e.what if isinstance(e, AutoparError) else str(e)


def _row(place: str, source: str, v: dict[str, str]) -> Row:
    """Raises KeyError where a column is missing, ValueError (AutoparError is one) for anything else that makes no run."""
    said = dict(x.split("=", 1) for x in v["other"].split(";") if "=" in x)
    if said.get("precision", "").lower().startswith(("fp8", "amp_fp8")):
        raise ValueError("8-bit products are not priced")
    if not (v["tp"] and v["pp"] and v["dp"]):
        raise ValueError("the layout is not stated")
    if source not in SOURCES:
        raise ValueError(f"no framework is known for {source}: name the file as one of {', '.join(SOURCES)}")
    size = _model_sizes(v)
    gpus, seq, batch = (_count(v, k) for k in ("gpus", "seq", "global_batch"))
    cluster = Cluster.of(f"{_device(v['gpu_type'])}:{gpus}")
    runtime = replace(SOURCES[source].runtime, **KERNELS.get(said.get("kernel", ""), {}))  # type: ignore[arg-type]
    if said.get("mp_mode") == "PURE":  # everything in half precision
        runtime = replace(runtime, grad_bytes=2.0, reduce_bytes=2.0, master_bytes=2.0, moment_bytes=4.0)
    layout, *others = _layouts(source, v, batch, size["layers"])
    layout.replicas(gpus)
    oom, memory = v["metric"] == "OOM", v["metric"].startswith("max_memory")
    return Row(
        place, source, v["source"], v["model"], v, layout, runtime, cluster, batch, seq,
        None if oom or memory else _step_s(v, said, gpus, batch * seq), _positive(v["value"], "value") if memory else None, oom, tuple(others),
    )  # fmt: skip


def _layouts(source: str, v: dict[str, str], batch: int, layers: int) -> list[Layout]:
    """One, or all that it may have been where the row does not say."""
    tp, pp, cp, dp = _count(v, "tp"), _count(v, "pp"), _count(v, "cp", "1"), _count(v, "dp")
    switch = {"true": True, "false": False, "": SOURCES[source].sequence_parallel}
    if v["sp"].lower() not in switch:
        raise ValueError(f"sp is {short(v['sp'])!r}, not True or False")
    try:
        offload = float(v["offload"].removeprefix("alpha=") or 0)
    except ValueError:
        raise ValueError(f"offload is {short(v['offload'])!r}, not a number") from None
    common = Layout(
        tp=tp, pp=pp, cp=cp, dp=dp, zero=next((n for said, n in ZEROS.items() if said in v["other"]), SOURCES[source].zero),
        sequence_parallel=switch[v["sp"].lower()], recompute=v["recompute"].split(",")[0].split(":")[0].strip() or "none",
        offload=offload, name=source,
    )  # fmt: skip
    sizes = [_count(v, "micro_batch")] if v["micro_batch"] else [1, 2, 4, 8]
    chunks = [_count(v, "vpp", "1")] if v["vpp"] or pp == 1 else [n for n in (1, 2, 3, 4, 6) if layers % (pp * n) == 0]
    # Interleaved, a pipeline takes micro-batches in groups of as many as it has ranks.
    found = [
        replace(common, micro_batch=b, virtual=c)
        for b in sizes
        for c in chunks
        if batch % (dp * b) == 0 and (c == 1 or batch // (dp * b) % pp == 0)
    ]
    if not found:
        raise ValueError(f"{batch} sequences and {layers} layers make no even schedule of its dp {dp}, pp {pp}")
    return found


def _model_sizes(v: dict[str, str]) -> dict[str, int]:
    _kind(v["model"])
    size = {k: _count(v, k) for k in SIZES}
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if size[whole] % size[part]:
            raise ValueError(f"{part} {size[part]} does not divide {whole} {size[whole]}")
    return size


def _kind(model: str) -> str:
    found = next((kind for said, kind in MODELS.items() if said in model.lower()), None)
    if found is None:
        raise ValueError(f"{short(model)!r} is no model that is known: {', '.join(MODELS)}")
    return found


def _device(gpu_type: str) -> str:
    found = next((name for said, name in DEVICES.items() if gpu_type.lower().replace("-", "_").startswith(said)), None)
    if found is None:
        raise ValueError(f"{short(gpu_type)!r} is no device that is known: {', '.join(DEVICES)}")
    return found


def _count(v: dict[str, str], column: str, default: str = "") -> int:
    text = v[column] or default
    if not text.isdecimal() or len(text) > 12 or int(text) < 1:
        raise ValueError(f"{column} is {short(text)!r}, not a whole number from 1")
    return int(text)


def _positive(text: str, what: str) -> float:
    try:
        x = float(text)
    except ValueError:
        x = math.nan
    if not 0 < x < math.inf:
        raise ValueError(f"{what} is {short(text)!r}, not a positive number")
    return x


def _step_s(v: dict[str, str], said: dict[str, str], gpus: int, tokens: int) -> float:
    for key in ("step_time_s", "derived_iter_s"):
        if key in said:
            return _positive(said[key], key)
    if "tokens_per_s_gpu" in said:
        return tokens / (_positive(said["tokens_per_s_gpu"], "tokens_per_s_gpu") * gpus)
    metric, value = v["metric"], _positive(v["value"], "value")
    if metric == "tokens_per_s_per_gpu":
        return tokens / (value * gpus)
    if metric == "tokens_per_s_total":
        return tokens / value
    if metric.startswith("TFLOPs"):
        return _flops_of_megatron(v, tokens) / (gpus * value * 1e12)
    if metric.startswith("MFU"):
        return _flops_of_megatron(v, tokens) / (gpus * value / 100 * _positive(v["gpu_peak_tflops"], "gpu_peak_tflops") * 1e12)
    raise ValueError(f"{short(metric)!r} is no metric that is known")


def _flops_of_megatron(v: dict[str, str], tokens: int) -> float:
    """Of a step as Megatron-LM and nanotron count: products forward and backward, and attention's whole square."""
    h, f, s, n, vocab = (float(v[k]) for k in ("hidden", "ffn", "seq", "layers", "vocab"))
    kv = float(v["kv_heads"]) / float(v["heads"])
    gated = 3 if _kind(v["model"]) == "llama" else 2
    return 6 * tokens * (n * (h * h * (2 + 2 * kv) + gated * h * f + h * s) + h * vocab)


# ---- models -------------------------------------------------------------------------------------------------------------


def config(row: Row) -> Any:
    v = {k: int(row.values[k]) for k in (*SIZES, "seq")}
    if _kind(row.name) == "llama":
        values = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": v["hidden"], "intermediate_size": v["ffn"],
            "num_hidden_layers": v["layers"], "num_attention_heads": v["heads"], "num_key_value_heads": v["kv_heads"], "vocab_size": v["vocab"],
            "max_position_embeddings": v["seq"], "tie_word_embeddings": False,
        }  # fmt: skip
    else:
        values = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": v["hidden"], "n_inner": v["ffn"], "n_layer": v["layers"],
            "n_head": v["heads"], "n_positions": v["seq"], "vocab_size": v["vocab"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    return models.made(values, row.label)


def key(row: Row) -> tuple[Any, ...]:
    """What the program of its micro-batch depends on."""
    layout = row.layout
    sizes = tuple(row.values[k] for k in SIZES)
    return FORM, _kind(row.name), sizes, row.seq, layout.micro_batch, layout.tp, layout.cp, bool(layout.sequence_parallel and layout.tp > 1)


class Programs:
    """Pieces of rows' micro-batches; rows of one micro-batch share its program. kept: a folder where programs are looked up and left."""

    def __init__(self, kept: Path | None) -> None:
        self.kept = kept
        self.known: dict[tuple[Any, ...], tuple[Piece, ...]] = {}

    def of(self, row: Row, layout: Layout | None = None) -> tuple[Piece, ...]:
        row = row if layout is None else replace(row, layout=layout)
        mine = (key(row), row.runtime.fusion)
        if mine not in self.known:
            self.known[mine] = split(program(row, self.kept), row.runtime.fusion)
        return self.known[mine]

    def run(self, row: Row) -> Run:
        """A row as what is fitted."""
        others = tuple((self.of(row, layout), layout) for layout in row.others)
        return Run(self.of(row), row.layout, row.runtime, row.cluster, row.global_batch, row.step_s or math.nan, others)


def program(row: Row, kept: Path | None) -> Found:
    path = None if kept is None else kept / (hashlib.sha256(repr(key(row)).encode()).hexdigest()[:24] + ".pkl")
    if path is not None and path.exists():
        found: Found = pickle.loads(path.read_bytes())  # our own file
        return found
    made = config(row)
    found = solved(models.build(made), models.inputs(made, 1, row.seq), row.cluster, row.layout)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found
