"""When gradients are reduced: every backward, or every m-th, or at the first one outside `no_sync`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.capture.capture import Role
from autopar.errors import AutoparError
from autopar.runtime.step import Step


class GradSync:
    """Holds the unreduced gradients of micro-batches that were not reduced (as `no_sync` of FSDP2)."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise AutoparError(f"grad_accumulation must be at least 1, not {every}")
        self.every = every
        self.enabled = True
        self.count = 0
        self.buffers: dict[str, torch.Tensor] = {}
        self.reduced: dict[str, torch.Tensor] = {}  # gradients that are reduced already, and not handed over yet

    def variant(self, enabled: bool) -> tuple[bool, bool]:
        """Which backward runs next: (gradients are reduced, with those of earlier ones)."""
        return enabled and (self.count + 1) % self.every == 0, bool(self.buffers)

    def reduce(
        self, step: Step, saved: list[torch.Tensor], values: Mapping[Role, torch.Tensor], enabled: bool
    ) -> dict[Role, torch.Tensor | None]:
        """Runs backward; the gradients by role, empty while they are only accumulated."""
        sync, accumulated = self.variant(enabled)
        self.count += 1
        values = {**values, **{Role("accumulated", p): t for p, t in self.buffers.items()}}
        self.buffers = {}  # nobody but the step holds them: each is freed when its gradient is added
        results = dict(step.backward(saved, values, sync, accumulated))
        if sync:
            for name, t in self.reduced.items():
                mine = results.get(Role("grad", name))
                results[Role("grad", name)] = t if mine is None else mine + t
            self.reduced = {}
            return results
        self.buffers = {r.name: t for r, t in results.items() if r.kind == "grad" and t is not None}
        return {r: t for r, t in results.items() if r.kind != "grad"}

    def add(self, unreduced: Mapping[str, torch.Tensor], reduced: Mapping[str, torch.Tensor]) -> None:
        """Gradients of micro-batches of the call whose last backward runs next."""
        for mine, more in ((self.buffers, unreduced), (self.reduced, reduced)):
            for name, t in more.items():
                mine[name] = mine[name] + t if name in mine else t
