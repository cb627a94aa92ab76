"""What software ran a row: six sources that were looked at, and what is taken of any other, with every assumption told."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from autopar.predict.runtime import PIPELINED, RUNTIMES, Runtime
from autopar.text.strict_json import short

_MEGATRON = RUNTIMES["megatron"]
# FlashAttention-2 is about twice as fast as the first (Dao, 2023, abstract).
FLASH_1 = 0.5


@dataclass(frozen=True)
class Source:
    """What a source's rows have in common, or do not say.

    nodes_shard: ZeRO shards inside a node only (HSDP). sharded: nothing but data parallelism where a row names no other."""

    runtime: Runtime
    zero: int = 0
    sequence_parallel: bool = False
    nodes_shard: bool = False
    sharded: bool = False


# Framework by file. kwai: pipelined tensor parallelism; the cards of its nodes are not stated, so what its network reaches is fitted. hagemann: ZeRO-1 on Megatron's layers, gradients in half
# precision (13B parameters fit one device only so), the loss on gathered logits (that nothing of 4 x 8192 tokens fits, at any tensor-parallel size, says so); what its
# pipelines' allocators lose is fitted to who ran out of memory (0.15 to 0.2 are alike, and any four fifths of the rows say so too). megatron_core: its README's
# overlap flags. megatron_2021: float16, of which it sums gradients as they are (only bfloat16's are summed in single precision), and ranks wait for what
# they exchange. llm_foundry: FSDP of torch, the first flash attention. nanotron deals
# layers by the products of each block (get_block_compute_costs in its models) and sends what tensor-parallel products need beside them (its examples set
# tp_linear_async_communication); its network is not stated either. The kernels are those of the row.
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
        replace(_MEGATRON, name="megatron-core", tensor_hidden=PIPELINED, data_exposed=0.0),
        zero=1,
        sequence_parallel=True,
    ),
    "megatron_2021_a100": Source(
        replace(
            _MEGATRON,
            name="megatron-2021",
            unfused_passes=6.0,
            grad_bytes=2.0,
            reduce_bytes=2.0,
            accumulated_bytes=4.0,
            hops="never",
        )
    ),
    "llm_foundry_fsdp": Source(replace(RUNTIMES["fsdp"], name="llm-foundry", attention_rate=FLASH_1)),
    "nanotron_h100": Source(replace(_MEGATRON, name="nanotron", balanced=True, tensor_hidden=PIPELINED, network_share=0.8)),
}
KERNELS: dict[str, dict[str, Any]] = {
    "flash_attention2 + RMS kernel": {},
    "flash_attention2": {"fusion": "none"},
    "flash_attentionv1.0.8": {"fusion": "none", "attention_rate": FLASH_1},
    "fused": {"fusion": "none", "unfused_passes": 6.0},
    "torch": {"fusion": "none", "unfused_passes": 11.0},
}
# Megatron's flags, as `other` may have them; what they do is what megatron_core's rows were priced with.
FLAGS: dict[str, dict[str, Any]] = {"tp-comm-overlap": {"tensor_hidden": PIPELINED}, "overlap-grad-reduce": {"data_exposed": 0.0}}

_NOT = r"\s*[=:]\s*(?:false|no|none|off|0)(?![a-z0-9_])"
_FSDP = re.compile(rf"(?<![a-z])(?:fsdp2?|hsdp)(?![a-z0-9])(?!{_NOT})")
_SHARDS = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard_zero2": 2, "hybrid_shard": 3}  # the longer name first
_ZERO = re.compile(r"(?<![a-z])zero[ _-]*(?:stage|optimizer|dp)?[ _=:-]*([0-3])(?![0-9])")
_DISTRIBUTED = re.compile(rf"distributed[ _-]optimizer(?!{_NOT})")
_HOST = re.compile(rf"(?:zero[ _-]*(?:offload|infinity)|(?:cpu|optimizer)[ _-]?offload|offload[ _-](?:optimizer|param)\w*)(?!{_NOT})")


def of(source: str, other: str, notes: list[str]) -> Source:
    """The source with what a row says of itself in `other`; what is assumed of one that is not known is added to `notes`."""
    text = other.lower()
    if _HOST.search(text):
        raise ValueError("an optimizer or parameters in host memory are not priced")
    if source in SOURCES:
        said = _shards(text)
        return SOURCES[source] if said is None else replace(SOURCES[source], zero=said)
    if _shards(text) is None and "megatron" not in text and _shards(source.lower()) is not None:
        text = f"{text};{source.lower()}"
        notes.append("how it shards is in the file's name only")
    fsdp, zero = bool(_FSDP.search(text)), _shards(text)
    if fsdp and not any(word in text for word in (*_SHARDS, "zero")):
        notes.append("FSDP does not say what it shards: parameters too (ZeRO-3)")
    hybrid = "hybrid_shard" in text or "hsdp" in text
    if hybrid:
        notes.append("hybrid FSDP shards inside of a node")
    sharded = fsdp or (zero or 0) >= 2  # gradients are then reduced beside backward, whoever does it
    if zero is None:
        notes.append("ZeRO is not stated: 0")
    base = RUNTIMES["fsdp"] if sharded else _MEGATRON
    notes.append(f"not a known source: runtime {base.name!r}, flash attention 2, slowdown {short(source)!r} of the constants or else 1")
    flags = {k: v for flag, change in FLAGS.items() if flag in text.replace("_", "-") and not sharded for k, v in change.items()}
    return Source(replace(base, name=source, **flags), zero or 0, nodes_shard=hybrid, sharded=sharded)


def kernel(said: str, notes: list[str]) -> dict[str, Any]:
    if said and said not in KERNELS:
        notes.append(f"kernel {short(said)!r} is not known: flash attention 2, norms and activations fused")
    return KERNELS.get(said, {})


def _shards(text: str) -> int | None:
    """ZeRO's stage as it is said."""
    if _FSDP.search(text):
        named = next((n for word, n in _SHARDS.items() if word in text), None)
        if named is not None:
            return named
    if found := _ZERO.search(text):
        return int(found[1])
    if _FSDP.search(text):
        return 3
    return 1 if _DISTRIBUTED.search(text) else None
