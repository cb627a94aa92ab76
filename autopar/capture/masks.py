"""While capturing, transformers may say "causal" to attention, where it would hand a traced program a mask of sequence x sequence.

With a mask attention computes also the half that causality hides, and reads a square of the sequence. There are two reasons for it, and neither holds here:

    sizes        an exported program might be called with other ones: ours is captured for each
    packing      several sequences in one row are told by jumps in the position ids. A traced program can never find that there are none; but positions
                 that the model counts for itself, because its caller gave none, do not jump
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn

_MODULE = "transformers.masking_utils"
_EXPORTING, _TRACING, _PACKED = "is_torchdynamo_exporting", "is_tracing", "find_packed_sequence_indices"


@contextlib.contextmanager
def plain_masks(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    masks = sys.modules.get(_MODULE)
    with contextlib.ExitStack() as stack:
        if hasattr(masks, _EXPORTING):
            stack.enter_context(mock.patch.object(masks, _EXPORTING, lambda: False))
        elif hasattr(masks, _TRACING):
            # Older ones ask whether anything traces: a mask's values cannot be looked at then, but there may be no mask.
            traces = getattr(masks, _TRACING)
            stack.enter_context(mock.patch.object(masks, _TRACING, lambda mask=None: mask is not None and traces(mask)))
        if hasattr(masks, _PACKED) and _counts_positions(model, args, kwargs):
            stack.enter_context(mock.patch.object(masks, _PACKED, lambda position_ids: None))
        yield


def _counts_positions(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is transformers' own forward that is called, and without position ids."""
    if not type(model).__module__.startswith("transformers."):
        return False
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return False
    named = {**given, **given.get("kwargs", {})}
    return named.get("position_ids") is None
