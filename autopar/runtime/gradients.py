"""When gradients are reduced: every backward, or every m-th, or at the first one outside `no_sync`.

Until then they wait unreduced, each where the program left it that made it. A program takes in what lies as its own gradients do. What another program left otherwise, of
another size or of another branch of the model, is reduced by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.capture.capture import Role
from autopar.errors import AutoparError
from autopar.graph.placement import Placement
from autopar.runtime.step import Step


@dataclass(frozen=True)
class Waiting:
    """An unreduced gradient, and where it lies."""

    local: torch.Tensor
    at: Placement


# (parameter, unreduced gradient, where it lies) -> its part as the parameter is stored. Collective.
Reduce = Callable[[str, torch.Tensor, Placement], torch.Tensor]


class GradSync:
    """Holds the unreduced gradients of micro-batches that were not reduced (as `no_sync` of FSDP2). alone: reduces one by itself."""

    def __init__(self, every: int, alone: Reduce) -> None:
        if every < 1:
            raise AutoparError(f"grad_accumulation must be at least 1, not {every}")
        self.every, self.alone = every, alone
        self.enabled = True
        self.count = 0
        self.buffers: dict[str, Waiting] = {}
        self.reduced: dict[str, torch.Tensor] = {}  # gradients that are reduced already, and not handed over yet

    def variant(self, enabled: bool) -> tuple[bool, bool]:
        """Which backward runs next: (gradients are reduced, with those of earlier ones)."""
        return enabled and (self.count + 1) % self.every == 0, bool(self.buffers or self.reduced)

    def reduce(
        self, step: Step, saved: list[torch.Tensor], values: Mapping[Role, torch.Tensor], enabled: bool
    ) -> dict[Role, torch.Tensor | None]:
        """Runs backward; the gradients by role, empty while they are only accumulated."""
        sync, _ = self.variant(enabled)
        self.count += 1
        values = {**values, **self._taken(step)}
        results = dict(step.backward(saved, values, sync, any(r.kind == "accumulated" for r in values)))
        if sync:
            for name, t in self.reduced.items():
                mine = results.get(Role("grad", name))
                results[Role("grad", name)] = t if mine is None else mine + t
            self.reduced = {}
            return results
        at = step.accumulated
        self.buffers = {r.name: Waiting(t, at[r.name][0]) for r, t in results.items() if r.kind == "grad" and t is not None}
        return {r: t for r, t in results.items() if r.kind != "grad"}

    def handed(self, found: Mapping[str, torch.Tensor], enabled: bool) -> dict[str, torch.Tensor]:
        """Gradients that were reduced already, as a pipeline's are, with those that wait; nothing while they are only accumulated."""
        sync, _ = self.variant(enabled)
        self.count += 1
        for name, t in found.items():
            self._add_reduced(name, t)
        if not sync:
            return {}
        whole, self.reduced = self.reduced, {}
        return whole

    def _taken(self, step: Step) -> dict[Role, torch.Tensor]:
        """The buffers that `step` takes in, zeros where there is none of a gradient of its; none at all where it would take in nothing else."""
        held, self.buffers = self.buffers, {}  # nobody but the step holds them: each is freed when its gradient is added
        if not held:
            return {}
        wanted = step.accumulated
        fits = {n for n, w in held.items() if n in wanted and (w.at, w.local.dtype) == wanted[n]}
        for name in [n for n in held if n not in fits]:
            self._reduce_alone(name, held.pop(name))
        if not held:
            return {}
        device = next(iter(held.values())).local.device
        mesh = step.plan.mesh
        return {
            Role("accumulated", n): held.pop(n).local if n in fits else torch.zeros(at.local_shape(mesh), dtype=dtype, device=device)
            for n, (at, dtype) in wanted.items()
        }

    def _reduce_alone(self, name: str, w: Waiting) -> None:
        self._add_reduced(name, self.alone(name, w.local, w.at))

    def _add_reduced(self, name: str, t: torch.Tensor) -> None:
        self.reduced[name] = self.reduced[name] + t if name in self.reduced else t

    def add(self, step: Step, unreduced: Mapping[str, torch.Tensor], reduced: Mapping[str, torch.Tensor]) -> None:
        """Gradients of micro-batches of the call whose last backward runs next. step: that left the unreduced ones."""
        for name, t in unreduced.items():
            at, earlier = step.accumulated[name][0], self.buffers.pop(name, None)
            if earlier is not None and (earlier.at, earlier.local.dtype) != (at, t.dtype):
                self._reduce_alone(name, earlier)
                earlier = None
            self.buffers[name] = Waiting(t if earlier is None else earlier.local + t, at)
        for name, t in reduced.items():
            self._add_reduced(name, t)
