"""What `torch._dynamo.mark_dynamic`, `maybe_mark_dynamic` and `mark_static` say of a tensor's dims."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

NO_LIMIT = 2**31  # a stated largest size from here on is none


@dataclass(frozen=True)
class Marks:
    """dims that vary, as the user says; those that do not; the largest size of a dim, where it is stated."""

    dynamic: frozenset[int] = frozenset()
    static: frozenset[int] = frozenset()
    most: dict[int, int] = field(default_factory=dict)


def marks_of(t: torch.Tensor) -> Marks:
    if not getattr(t, "_has_dynamo_dim_marking", True):
        return Marks()
    asked = {d % t.dim() for name in ("_dynamo_dynamic_indices", "_dynamo_unbacked_indices") for d in getattr(t, name, ())}
    maybe = {d % t.dim() for d in getattr(t, "_dynamo_weak_dynamic_indices", ())}
    static = {d % t.dim() for d in getattr(t, "_dynamo_static_indices", ())} - asked
    ranges = getattr(t, "_dynamo_dynamic_range", ())
    most = {r.dim % t.dim(): int(r.max) for r in ranges if r.max is not None and r.max < NO_LIMIT}
    return Marks(frozenset(asked | (maybe - static)), frozenset(static), most)
