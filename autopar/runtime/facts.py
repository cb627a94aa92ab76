"""What a model was compiled with, as texts: compared between ranks before parameters are spread, and with what was compiled ahead."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from autopar.distributed.agreement import Facts
from autopar.plan.schema import canonical
from autopar.runtime.config import Config

PLAN = "the plan that was given"
HELD = "the model's parameters and buffers"
# Of the arguments, those that no plan says.
COMPILED = ("inputs", "outputs", "layout", "precision", "grad_accumulation", "micro_batches", "bucket_collectives", "loss_head")


def facts(model: nn.Module, c: Config, axes: Mapping[str, int]) -> Facts:
    """What must be the same on all ranks."""
    w = c.request
    return {
        HELD: held(model),
        "the arguments of autopar.compile": "\n".join(
            f"{k}={v}"
            for k, v in {
                "mesh": axes, **_arguments(c), "optimizer": getattr(c.optimizer, "__name__", c.optimizer), "backend": c.backend,
                "memory": "least" if w.least else w.memory_bytes, "cluster": w.cluster, "options": w.limits, "offload": w.offload, "imbalance": w.imbalance,
                "schedule": "" if c.schedule is None else "; ".join(c.schedule.text().splitlines()), "artifacts": c.artifacts,
            }.items()
        ),
        PLAN: "" if w.plan is None else canonical(w.plan),
    }  # fmt: skip


def of_compiled(model: nn.Module, c: Config) -> Facts:
    """What compiled code depends on besides the program, the plan and the machine; wherever the parameters are by now."""
    return {
        HELD: held(model, meta=False),
        "arguments of autopar.compile": "\n".join(f"{k}={v}" for k, v in _arguments(c).items()),
    }


def held(model: nn.Module, meta: bool = True) -> str:
    kinds = (("parameter", model.named_parameters), ("buffer", model.named_buffers))
    return "\n".join(
        f"{kind} {n}: {tuple(t.shape)} {t.dtype}{' on meta' if meta and t.is_meta else ''}{' trained' if t.requires_grad else ''}"
        for kind, named in kinds
        for n, t in named(remove_duplicate=False)
    )


def _arguments(c: Config) -> dict[str, object]:
    return {name: getattr(c, name) for name in COMPILED}
