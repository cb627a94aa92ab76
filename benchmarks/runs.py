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
from autopar.layout import Layout
from autopar.predict.api import solved
from autopar.predict.fit import Run
from autopar.predict.pieces import Piece
from autopar.predict.pieces import pieces as split
from autopar.predict.runtime import PIPELINED, RUNTIMES, Runtime
from autopar.staged import Found

DATA = Path(__file__).parent / "data" / "published"
FORM = 1  # of the programs kept on disk: raise it when they change

_MEGATRON = RUNTIMES["megatron"]
# FlashAttention-2 is about twice as fast as the first (Dao, 2023, abstract).
FLASH_1 = 0.5
# Framework by file. kwai: pipelined tensor parallelism; the cards of its nodes are not stated, so what its network reaches is fitted. hagemann: ZeRO-1 on Megatron's layers, gradients in half
# precision (13B parameters fit one device only so), the loss on gathered logits (that nothing of 4 x 8192 tokens fits, at any tensor-parallel size, says so). megatron_core: its README's
# overlap flags. llm_foundry: FSDP of torch, the first flash attention. The kernels are those of the row.
SOURCES = {
    "kwai_h800": replace(_MEGATRON, name="kwai", tensor_hidden=PIPELINED, network_share=0.5),
    "hagemann_a100": replace(
        _MEGATRON, name="hagemann", gathers_logits=True, logits_bytes=15.0, grad_bytes=2.0, reduce_bytes=2.0, accumulated_bytes=4.0
    ),
    "megatron_core_h100": replace(_MEGATRON, name="megatron-core", tensor_hidden=PIPELINED, data_exposed=0.0),
    "megatron_2021_a100": replace(_MEGATRON, name="megatron-2021", unfused_passes=6.0),
    "llm_foundry_fsdp": replace(RUNTIMES["fsdp"], name="llm-foundry", attention_rate=FLASH_1),
    "nanotron_h100": replace(_MEGATRON, name="nanotron"),
}
DEVICES = {"h800": "h800", "h100": "h100", "a100_40gb": "a100-40", "a100": "a100"}
KERNELS = {
    "flash_attention2 + RMS kernel": {},
    "flash_attention2": {"fusion": "none"},
    "flash_attentionv1.0.8": {"fusion": "none", "attention_rate": FLASH_1},
    "fused": {"fusion": "none", "unfused_passes": 6.0},
    "torch": {"fusion": "none", "unfused_passes": 11.0},
}


@dataclass(frozen=True)
class Row:
    """step_s or peak_bytes: measured; oom: it ran out of memory; usable_bytes: what it could use, if it says more than the device."""

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
    found, left = [], []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as f:
            for i, values in enumerate(csv.DictReader(f), 2):
                read = _row(path.stem, values)
                if isinstance(read, Row):
                    found.append(read)
                else:
                    left.append(f"{path.name}:{i}: {read}")
    return found, left


def _row(source: str, v: dict[str, str]) -> Row | str:
    said = dict(x.split("=", 1) for x in v["other"].split(";") if "=" in x)
    if said.get("precision", "").lower().startswith(("fp8", "amp_fp8")):
        return "8-bit products are not priced"
    if not (v["tp"] and v["pp"] and v["dp"]):
        return "the layout is not stated"
    if source not in SOURCES:
        return f"no framework is known for {source}"
    gpus, seq, batch = int(v["gpus"]), int(v["seq"]), int(v["global_batch"])
    tp, pp, cp, dp = int(v["tp"]), int(v["pp"]), int(v["cp"] or 1), int(v["dp"])
    recompute = v["recompute"].split(",")[0].split(":")[0].strip() or "none"
    runtime = replace(SOURCES[source], **KERNELS.get(said.get("kernel", ""), {}))  # type: ignore[arg-type]
    zero = {"kwai_h800": 1, "hagemann_a100": 1, "megatron_core_h100": 1, "megatron_2021_a100": 0}.get(source, 0)
    for key, n in (("FSDP=FULL_SHARD", 3), ("FSDP=SHARD_GRAD_OP", 2), ("ZeRO-1", 1), ("ZeRO-0", 0)):
        zero = n if key in v["other"] else zero
    if said.get("mp_mode") == "PURE":  # everything in half precision
        runtime = replace(runtime, grad_bytes=2.0, reduce_bytes=2.0, master_bytes=2.0, moment_bytes=4.0)
    layout = Layout(
        tp=tp, pp=pp, cp=cp, dp=dp, virtual=int(v["vpp"] or 1), micro_batch=int(v["micro_batch"] or 1), zero=zero,
        sequence_parallel=v["sp"] == "True" or (source == "megatron_core_h100" and not v["sp"]), recompute=recompute,
        offload=float(v["offload"].removeprefix("alpha=") or 0), name=source,
    )  # fmt: skip
    sizes = [int(v["micro_batch"])] if v["micro_batch"] else [n for n in (1, 2, 4, 8) if batch % (dp * n) == 0]
    chunks = [int(v["vpp"] or 1)] if v["vpp"] or pp == 1 else [n for n in (1, 2, 3, 4, 6) if int(v["layers"]) % (pp * n) == 0]
    # Interleaved, a pipeline takes micro-batches in groups of as many as it has ranks.
    fitting = [(b, c) for b in sizes for c in chunks if c == 1 or batch // (dp * b) % pp == 0]
    layout, *others = (replace(layout, micro_batch=b, virtual=c) for b, c in fitting)
    kind = next(name for key, name in DEVICES.items() if v["gpu_type"].lower().replace("-", "_").startswith(key.replace("-", "_")))
    if v["gpu_type"].lower().startswith("a100_40"):
        kind = "a100-40"
    per_node = min(8, gpus)
    group = f"{v['source']}"
    return Row(
        source, group, v["model"], v, layout, runtime, Cluster.of(f"{kind}:{max(1, gpus // 8)}x{per_node}"), batch, seq,
        _step_s(v, said, gpus * 1.0, batch * seq), float(v["value"]) if v["metric"].startswith("max_memory") else None, v["metric"] == "OOM", tuple(others),
    )  # fmt: skip


def _step_s(v: dict[str, str], said: dict[str, str], gpus: float, tokens: float) -> float | None:
    if v["metric"] == "OOM" or v["metric"].startswith("max_memory"):
        return None
    for key in ("step_time_s", "derived_iter_s"):
        if key in said:
            return float(said[key])
    if "tokens_per_s_gpu" in said:
        return tokens / (float(said["tokens_per_s_gpu"]) * gpus)
    value = float(v["value"])
    if v["metric"] == "tokens_per_s_per_gpu":
        return tokens / (value * gpus)
    if v["metric"] == "tokens_per_s_total":
        return tokens / value
    rate = value * 1e12 if v["metric"].startswith("TFLOPs") else value / 100 * float(v["gpu_peak_tflops"]) * 1e12
    return _flops_of_megatron(v, tokens) / (gpus * rate)


def _flops_of_megatron(v: dict[str, str], tokens: float) -> float:
    """Of a step as Megatron-LM and nanotron count: products forward and backward, and attention's whole square."""
    h, f, s, n, vocab = (float(v[k]) for k in ("hidden", "ffn", "seq", "layers", "vocab"))
    kv = float(v["kv_heads"]) / float(v["heads"])
    gated = 3 if "llama" in v["model"].lower() else 2
    return 6 * tokens * (n * (h * h * (2 + 2 * kv) + gated * h * f + h * s) + h * vocab)


# ---- models -------------------------------------------------------------------------------------------------------------


def config(row: Row) -> Any:
    v = {k: int(row.values[k] or 0) for k in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq")}
    if "llama" in row.name.lower():
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
    sizes = tuple(row.values[k] for k in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"))
    kind = "llama" if "llama" in row.name.lower() else "gpt"
    return FORM, kind, sizes, row.seq, layout.micro_batch, layout.tp, layout.cp, bool(layout.sequence_parallel and layout.tp > 1)


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
