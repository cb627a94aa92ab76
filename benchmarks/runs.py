"""Published training runs as autopar sees them: a model, a layout, a cluster, what software ran it, and what was measured.

A row says little of the software; what each source says of itself is in `frameworks.SOURCES`, and nothing here depends on a row or on a model's name but for
what kind of model it is. What a row does not say is worked out where it follows, else assumed where there is a usual case: `Row.assumed` tells.
"""

from __future__ import annotations

import csv
import hashlib
import math
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.models import configs as models
from autopar.planner.found import Found
from autopar.planner.layout import Layout
from autopar.predict.api import solved
from autopar.predict.fit import Run
from autopar.predict.pieces import Piece
from autopar.predict.pieces import pieces as split
from autopar.predict.runtime import Runtime
from autopar.text.strict_json import short
from benchmarks import frameworks, metrics, names

DATA = Path(__file__).parent / "data" / "published"
FORM = 1  # of the programs kept on disk: raise it when they change

SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
# Columns that may be missing, or empty.
OPTIONAL = (
    "ffn", "kv_heads", "global_batch", "micro_batch", "gpus", "gpu_peak_tflops", "tp", "pp", "vpp", "cp", "dp", "sp", "recompute", "offload",
    "other", "memory_gb", "source",
)  # fmt: skip
COUNTS = (*SIZES, "seq", "global_batch", "micro_batch", "gpus", "tp", "pp", "vpp", "cp", "dp")
EMPTY = ("-", "n/a", "na", "nan", "null", "?", "unknown", "not stated")
WHOLE = re.compile(r"(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")  # as spreadsheets and data frames write them
YES, NO = ("true", "yes", "on", "1", "1.0"), ("false", "no", "off", "none", "0", "0.0")
MICRO_BATCHES = ("n_microbatches", "num_microbatches", "grad_accum", "gradient_accumulation_steps")


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
    assumed: tuple[str, ...] = ()  # and what was made of that

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


def assumed(found: Sequence[Row]) -> list[str]:
    """What was taken for what rows do not say, once a file."""
    count = Counter((r.place.partition(":")[0], note) for r in found for note in dict.fromkeys(r.assumed))
    return [f"{file}: {note} ({n} row{'s' * (n > 1)})" for (file, note), n in count.items()]


def reason(e: ValueError) -> str:
    """In one line."""
    return e.what if isinstance(e, AutoparError) else str(e)


def _read(place: str, source: str, values: dict[str, Any], found: list[Row], left: list[str]) -> None:
    try:
        # Short lines have no text in their last columns, long ones a list that belongs to no column.
        found.append(_row(place, source, {k.strip().lower(): _clean(k.strip().lower(), v or "") for k, v in values.items() if k}))
    except KeyError as e:
        left.append(f"{place}: there is no column {e}")
    except ValueError as e:
        left.append(f"{place}: {reason(e)}")


def _clean(column: str, text: str) -> str:
    text = text.strip()
    whole = WHOLE.fullmatch(text) if column in COUNTS else None
    return whole[1].replace(",", "") if whole else "" if text.lower() in EMPTY else text


def _row(place: str, source: str, v: dict[str, str]) -> Row:
    """Raises KeyError where a column is missing, ValueError (AutoparError is one) for anything else that makes no run."""
    v = {**dict.fromkeys(OPTIONAL, ""), **v}
    said = {k.strip().lower(): x.strip() for k, _, x in (part.partition("=") for part in v["other"].split(";")) if x}
    notes: list[str] = []
    _priced(v, said)
    framework = frameworks.of(source, v["other"], notes)
    _sizes_of_layout(v, said, framework.sharded, notes)
    size = _model_sizes(v, notes)
    gpus, seq, batch = (_count(v, k) for k in ("gpus", "seq", "global_batch"))
    cluster = _cluster(names.device(v["gpu_type"], notes), gpus, said)
    runtime = replace(framework.runtime, **frameworks.kernel(said.get("kernel", ""), notes))
    if said.get("mp_mode") == "PURE":  # everything in half precision
        runtime = replace(runtime, grad_bytes=2.0, reduce_bytes=2.0, master_bytes=2.0, moment_bytes=4.0)
    layout, *others = _layouts(framework, source, v, batch, size["layers"], cluster, notes)
    layout.replicas(gpus)
    oom, memory = metrics.out_of_memory(v["metric"]), metrics.peak_bytes(v)
    timed = not oom and memory is None
    told = {**v, "recompute": layout.recompute}
    seconds = metrics.step_s(told, said, cluster, batch, notes) if timed else None
    return Row(
        place, source, v["source"], v["model"], v, layout, runtime, cluster, batch, seq, seconds, memory, oom, tuple(others), tuple(notes)
    )  # fmt: skip


def _priced(v: dict[str, str], said: dict[str, str]) -> None:
    """Raises ValueError for what no layout here says."""
    text = f"{v['model']};{v['other']}".lower()
    if re.search(r"(?<![a-z0-9])(?:mx|nv)?(?:fp8|fp4|int8|float8)(?!\w*\s*=\s*(?:false|no|none|off|0))", text):
        raise ValueError("8-bit products are not priced")
    if re.match(r"fp32|tf32|float32|32", said.get("precision", said.get("dtype", "")).lower()):
        raise ValueError("products in single precision are not priced")
    if re.search(r"(?<![a-z])q?lora(?![a-z])", text):
        raise ValueError("adapters (LoRA) are not priced")
    if any(said.get(k, "1") not in ("0", "1") for k in ("ep", "expert_parallel")):
        raise ValueError("a mixture of experts is not priced")


def _sizes_of_layout(v: dict[str, str], said: dict[str, str], sharded: bool, notes: list[str]) -> None:
    """What follows from the others is filled in: one of tp, pp, dp, gpus; one of the global batch, the micro-batch and how many."""
    for k in ("tp", "pp") if sharded else ():
        if not v[k]:
            v[k] = "1"
            notes.append(f"{k} is not stated: 1")
    sizes = ("tp", "pp", "dp")
    empty = [k for k in (*sizes, "gpus") if not v[k]]
    if len(empty) > 1:
        raise ValueError("the layout is not stated")
    if empty:
        product = math.prod(_count(v, k, "1") for k in (*sizes, "cp") if k not in empty)
        whole, rest = (product, 0) if empty == ["gpus"] else divmod(_count(v, "gpus"), product)
        if rest:
            raise ValueError(f"the layout's other sizes make {product}, which does not divide {v['gpus']} GPUs")
        v[empty[0]] = str(whole)
    number = next((said[k] for k in MICRO_BATCHES if said.get(k, "").isdecimal() and int(said[k])), "")
    if number and v["micro_batch"] and not v["global_batch"]:
        v["global_batch"] = str(int(number) * _count(v, "micro_batch") * _count(v, "dp"))
    elif number and v["global_batch"] and not v["micro_batch"]:
        one, rest = divmod(_count(v, "global_batch"), int(number) * _count(v, "dp"))
        v["micro_batch"] = "" if rest else str(one)


def _cluster(device: str, gpus: int, said: dict[str, str]) -> Cluster:
    """Nodes may be smaller than they come."""
    whole = Cluster.of(device).devices_per_node
    nodes = said.get("nodes", "")
    per = said.get("gpus_per_node", str(gpus // int(nodes)) if nodes.isdecimal() and 0 < int(nodes) <= gpus else "")
    if per.isdecimal() and 0 < int(per) < min(whole, gpus) and gpus % int(per) == 0:
        return Cluster.of(f"{device}:{gpus // int(per)}x{per}")
    return Cluster.of(f"{device}:{gpus}")


def _layouts(
    framework: frameworks.Source, source: str, v: dict[str, str], batch: int, layers: int, cluster: Cluster, notes: list[str]
) -> list[Layout]:
    """One, or all that it may have been where the row does not say."""
    tp, pp, cp, dp = _count(v, "tp"), _count(v, "pp"), _count(v, "cp", "1"), _count(v, "dp")
    switch = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False), "": framework.sequence_parallel}
    if v["sp"].lower() not in switch:
        raise ValueError(f"sp is {short(v['sp'])!r}, not True or False")
    kept = v["offload"].lower().removeprefix("alpha=")
    try:
        offload = 0.0 if kept in ("", *NO) else float(kept)
    except ValueError:
        raise ValueError(f"offload is {short(v['offload'])!r}, not a number") from None
    common = Layout(
        tp=tp, pp=pp, cp=cp, dp=dp, zero=framework.zero, sequence_parallel=switch[v["sp"].lower()], recompute=_recompute(v["recompute"]),
        offload=offload, name=source, shard_ways=min(dp * cp, max(1, cluster.devices_per_node // tp)) if framework.nodes_shard else None,
    )  # fmt: skip
    sizes = [_count(v, "micro_batch")] if v["micro_batch"] else [1, 2, 4, 8]
    chunks = [_count(v, "vpp", "1")] if v["vpp"] or pp == 1 else [n for n in range(1, layers // pp + 1) if layers % (pp * n) == 0]
    # Interleaved, a pipeline takes micro-batches in groups of as many as it has ranks.
    found = [
        replace(common, micro_batch=b, virtual=c)
        for b in sizes
        for c in chunks
        if batch % (dp * b) == 0 and (c == 1 or batch // (dp * b) % pp == 0)
    ]
    if not found:
        raise ValueError(f"{batch} sequences and {layers} layers make no even schedule of its dp {dp}, pp {pp}")
    sp = str(framework.sequence_parallel) if tp > 1 else ""
    unsaid = {"cp": "1", "recompute": "none", "sp": sp, "micro_batch": "the fastest of 1, 2, 4, 8"}
    notes += [f"{k} is not stated: {value}" for k, value in unsaid.items() if value and not v[k]]
    if pp > 1 and not v["vpp"]:
        notes.append("vpp is not stated: the fastest that splits the layers evenly")
    return found


def _recompute(said: str) -> str:
    """One of the layout's kinds, from its first word; what is none of them is the layout's to refuse."""
    word = said.split(",")[0].split(":")[0].strip().lower()
    if word.startswith("full") and re.search(r"(?<![a-z])block(?![a-z])", said.lower()):
        raise ValueError("full recomputation of some layers only is not priced")
    first = re.split(r"[\s(_-]", word)[0]
    return "none" if first in ("", *NO) else "full" if first in YES else first


def _model_sizes(v: dict[str, str], notes: list[str]) -> dict[str, int]:
    kind = names.kind(v["model"])
    if kind == "gpt":  # what its layer is unless told otherwise; Llama's has no such rule
        for k, default in (("ffn", 4 * _count(v, "hidden")), ("kv_heads", _count(v, "heads"))):
            if not v[k]:
                v[k] = str(default)
                notes.append(f"{k} is not stated: {'4 hidden' if k == 'ffn' else 'as many as heads'}")
    size = {k: _count(v, k) for k in SIZES}
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if size[whole] % size[part]:
            raise ValueError(f"{part} {size[part]} does not divide {whole} {size[whole]}")
    if kind == "gpt" and size["heads"] != size["kv_heads"]:
        raise ValueError("a GPT whose heads share keys (kv_heads below heads) is not priced")
    names.check(v["model"], size["hidden"], size["heads"])
    return size


def _count(v: dict[str, str], column: str, default: str = "") -> int:
    text = v[column] or default
    if not text.isdecimal() or len(text) > 12 or int(text) < 1:
        raise ValueError(f"{column} is {short(text)!r}, not a whole number from 1")
    return int(text)


# ---- models -------------------------------------------------------------------------------------------------------------


def config(row: Row) -> Any:
    v = {k: int(row.values[k]) for k in (*SIZES, "seq")}
    if names.kind(row.name) == "llama":
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
    kind = names.kind(row.name)
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
