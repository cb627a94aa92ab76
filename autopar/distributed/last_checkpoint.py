"""The checkpoint that this process has written or read last: what an error that ends a run says to start again from."""

from __future__ import annotations

_last: list[str] = []


def note(place: object, step: int | None) -> None:
    """There is a whole one at `place`, a path or a URL."""
    _last[:] = [f"the last checkpoint, {place}" + ("" if step is None else f" of step {step}")]


def last_checkpoint() -> str:
    """As in "start again, from ...": with its place and step, where this process knows of one."""
    return _last[0] if _last else "the last checkpoint"
