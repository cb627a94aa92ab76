"""Ops that are told the shape of their output: on a shard it is the shard's."""

from __future__ import annotations

SIZE_ARG: dict[str, int] = {
    "aten.expand.default": 1,
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.empty_permuted.default": 0,
    "aten.new_empty.default": 1,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_full.default": 1,
    "aten.unfold_backward.default": 1,
    "aten.diagonal_backward.default": 1,
}
