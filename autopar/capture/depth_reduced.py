"""A module with fewer layers: what is captured in place of a deep one (`autopar.capture.tile`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn


def reduced_depth(model: nn.Module, layers: Mapping[str, int]) -> nn.Module:
    """A copy of `model` with only the first layers of its module lists, by path. Parameters and buffers are the model's own, not copied."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for path, n in layers.items():
        for layer in list(_list(model, path))[n:]:
            memo[id(layer)] = nn.Identity()  # copied as this, then cut off
    copied = copy.deepcopy(model, memo)
    for path, n in layers.items():
        del _list(copied, path)[n:]
    return copied


def _list(model: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    found = model.get_submodule(path)
    assert isinstance(found, (nn.ModuleList, nn.Sequential)), path
    return found
