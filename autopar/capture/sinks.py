"""Attention with sinks of transformers' models (gpt-oss and its kind) becomes attention as an operator (`autopar.kernels.sinks`).

transformers has no SDPA for these models: a config says "eager", which makes scores of queries x keys, or "flex_attention". Attention functions come from a registry, by a name in the config. On the
skeleton (never on the user's model) that name is ours, with the masks of "sdpa", where all that would be called means the same: a module hands its sinks over as `s_aux`, drops
nothing of its probabilities, and nobody asks for them. What else a user has chosen there stays.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.kernels.sinks import with_sinks

_MODULE, _MASKS = "transformers.modeling_utils", "transformers.masking_utils"
_NAME = "autopar"
_SAME = ("eager", "flex_attention")
_HANDED = re.compile(r"\s*(attention_mask=)?attention_mask,\s*")


@contextlib.contextmanager
def sinks_as_attention(skeleton: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    functions: Any = getattr(sys.modules.get(_MODULE), "ALL_ATTENTION_FUNCTIONS", None)
    masks: Any = getattr(sys.modules.get(_MASKS), "ALL_MASK_ATTENTION_FUNCTIONS", None)
    configs: list[Any] = []
    if functions is not None and hasattr(sys.modules.get(_MASKS), "sdpa_mask") and not kwargs.get("output_attentions"):
        by_config: dict[int, list[nn.Module]] = {}
        for m in skeleton.modules():
            if hasattr(m, "config") and "get_interface" in _source(type(m)):
                by_config.setdefault(id(m.config), []).append(m)
        configs = [found[0].config for found in by_config.values() if all(map(_has_sinks, found))]
    before = [(c, getattr(c, "_attn_implementation", None)) for c in configs if not getattr(c, "output_attentions", False)]
    changed = [(c, name) for c, name in before if name in _SAME]
    if changed:
        functions.register(_NAME, _forward)
        masks.register(_NAME, _mask)
    for c, _ in changed:
        c._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for c, name in changed:
            c._attn_implementation_internal = name


def _mask(*args: Any, **kwargs: Any) -> Any:
    """None where causality alone hides keys; else True for those that are seen, of the same rows as eager's."""
    masks: Any = sys.modules[_MASKS]
    return masks.sdpa_mask(*args, **{**kwargs, "allow_torch_fix": False})


def _source(kind: Any) -> str:
    return _source_of(kind.forward)


@functools.cache
def _source_of(forward: Any) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):
        return ""


def _has_sinks(m: Any) -> bool:
    """Whether its attention is a softmax over keys and, if it has them, sinks; of a mask that is handed on as it came: one that is added to (DeepSeek-V4's, of keys that it
    compresses) means what eager's masks do."""
    source = _source(type(m))
    body = re.split(r"\)(?: ->.*)?:\n", source, maxsplit=1)[-1]
    hands_on = all(_HANDED.fullmatch(line) for line in body.splitlines() if "attention_mask" in line)
    return hands_on and "s_aux=self.sinks" in source and "softcap" not in source and not getattr(m, "attention_dropout", 0.0)


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers' `sdpa_attention_forward`: query [B, Hq, Q, E], key and value of fewer heads -> [B, Q, Hq, D]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:  # as eager's masks: of a row that sees nothing, all keys are alike
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, torch.finfo(query.dtype).min)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, bias, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        out = with_sinks(query, key, value, bias, s_aux, causal, scale)
    return out.transpose(1, 2).contiguous(), None
