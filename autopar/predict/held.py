"""Parameters that a device computes with: routed experts' apart from all others, since fewer ranks have the same ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Elements. dense: of what all dp x cp ranks have alike; experts: of routed experts, which a dp x cp / ep of them have alike. tensors: of what is dense, elements of a
    parameter and how many there are of so many; none: not known."""

    dense: float
    experts: float = 0.0
    tensors: tuple[tuple[float, float], ...] = ()

    @property
    def total(self) -> float:
        return self.dense + self.experts
