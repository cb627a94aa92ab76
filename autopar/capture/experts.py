"""Routed experts of transformers' models become one op of ours (`autopar.kernels.experts`), with factors that a plan can split.

transformers asks a registry which function runs a module's experts, by a name in the module's config. On the skeleton (never on the user's model) that name is
ours, where the module's own implementation means the same: its loop, grouped or batched products. What else a user has chosen there stays: kernels of other
libraries compute with other numbers. So do modules whose experts are more than two products and a function of each row between them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from autopar.kernels.experts import experts
from autopar.kernels.gates import named

_MODULE = "transformers.integrations.moe"
_NAME = "autopar"
_SAME = ("eager", "grouped_mm", "batched_mm")
_GATE = "_autopar_gate"


def install_experts(skeleton: nn.Module) -> None:
    registry = getattr(sys.modules.get(_MODULE), "ALL_EXPERTS_FUNCTIONS", None)
    if registry is None:
        return
    registry.register(_NAME, _forward)
    found: dict[int, tuple[Any, list[tuple[nn.Module, str | None]]]] = {}
    for m in skeleton.modules():
        if _is_experts(m):
            found.setdefault(id(m.config), (m.config, []))[1].append((m, _gate_of(m)))
    for config, modules in found.values():
        # One config speaks for all modules that have it.
        if config._experts_implementation in _SAME and all(gate is not None for _, gate in modules):
            config._experts_implementation = _NAME
            for m, gate in modules:
                setattr(m, _GATE, gate)


def has_experts(model: nn.Module) -> bool:
    """Whether some module of it is routed experts of transformers'."""
    return any(map(_is_experts, model.modules()))


def _is_experts(m: nn.Module) -> bool:
    return all(hasattr(m, a) for a in ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj"))


def _up(m: Any) -> Any:
    return m.gate_up_proj if m.has_gate else m.up_proj


def _gate_of(m: Any) -> str | None:
    known = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
    if (
        getattr(m, "_is_expert_parallel", False)  # which older transformers do not have
        or getattr(m, "has_post_expert_norm", False)
        or any(n.split(".")[0] not in known for n, _ in m.named_parameters())
    ):
        return None
    if not all(isinstance(w, Tensor) and w.dim() == 3 for w in (_up(m), m.down_proj)):
        return None
    return named(m._apply_gate if m.has_gate else m.act_fn, m.down_proj.dtype)


def _forward(self: Any, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """hidden [T, D], index and scores [T, K] -> [T, D]."""
    b1 = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    b2 = self.down_proj_bias if self.has_bias else None
    out: Tensor = experts(
        hidden,
        index.to(torch.int64),
        scores,
        _up(self),
        self.down_proj,
        b1,
        b2,
        self.is_transposed,
        not self.is_concatenated,
        self._autopar_gate,
        "",
        1,
        [],
    )
    return out
