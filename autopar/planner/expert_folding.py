"""Which ranks of a hand layout do what: for all of the model, and for routed experts, whose part may be arranged otherwise (MoE parallel folding: Liu et al.,
2025, arXiv 2504.14960, section 3.2; Megatron's `--expert-tensor-parallel-size`).

The ranks of a pipeline stage are numbered with tp the fastest, and cut twice:

    everything else    tp (tensor), cp (context), dp (data)
    routed experts     expert_tp (features of an expert), ep (experts), the rest (tokens: expert data parallel)

A `Part` is a stretch of ranks that lies in one piece of both. Sizes must divide so that there is one. Without `expert_tp` experts are cut as all else is:
features over tp, tokens over cp, and over neighbours of the ranks with data, ep of them, experts. Where cp is 1 that is `expert_tp` = tp, which is what
Megatron takes when it is not told.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import LayoutError

TENSOR, CONTEXT, DATA = "tensor", "context", "data"
FEATURES, EXPERTS, TOKENS = "features", "experts", "tokens"
ROLES = 2  # that a micro-batch's devices have at most: of more the integer program would be large

# What the parts are called as axes of a mesh. Those that everyone knows are called so.
_NAMES = {
    (TENSOR, FEATURES): "tp", (TENSOR, EXPERTS): "tp_ep", (TENSOR, TOKENS): "tp_edp",
    (CONTEXT, FEATURES): "cp_etp", (CONTEXT, EXPERTS): "cp_ep", (CONTEXT, TOKENS): "cp",
    (DATA, FEATURES): "etp", (DATA, EXPERTS): "ep", (DATA, TOKENS): "dp",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """size: ranks; dense, routed: what they split of all else, and of routed experts."""

    dense: str
    routed: str
    size: int

    @property
    def name(self) -> str:
        return _NAMES[self.dense, self.routed]


def named(found: tuple[Part, ...], **of: str) -> tuple[str, ...]:
    """Names of those whose dense or routed is as asked."""
    return tuple(p.name for p in found if all(getattr(p, k) == v for k, v in of.items()))


@lru_cache(maxsize=4096)
def together(tp: int, cp: int, ep: int, expert_tp: int | None) -> tuple[Part, ...]:
    """Parts of the ranks whose micro-batches are computed together, the outermost first; those of one rank left out.

    Raises LayoutError where sizes do not divide."""
    if expert_tp is None:
        found = Part(DATA, EXPERTS, ep), Part(CONTEXT, TOKENS, cp), Part(TENSOR, FEATURES, tp)
        return tuple(p for p in found if p.size > 1)
    cuts = sorted({1, tp, tp * cp, expert_tp, expert_tp * ep})
    if any(b % a for a, b in itertools.pairwise(cuts)):
        raise LayoutError(
            f"experts over {ep} ranks, each of {expert_tp} that split its features, do not lie whole in tp x cp",
            where=f"Layout, tp={tp}, cp={cp}, ep={ep}, expert_tp={expert_tp}",
            fix="let each of tp, tp x cp, expert_tp and expert_tp x ep divide the next larger one; or leave expert_tp out",
        )

    def part(low: int, high: int) -> Part:
        dense = TENSOR if high <= tp else CONTEXT if high <= tp * cp else DATA
        routed = FEATURES if high <= expert_tp else EXPERTS if high <= expert_tp * ep else TOKENS
        return Part(dense, routed, high // low)

    return tuple(part(low, high) for low, high in reversed(list(itertools.pairwise(cuts))))
