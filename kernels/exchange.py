"""Operators that exchange rows with other ranks inside.

A body is a generator that yields what is to be exchanged, so that the same code runs on a process group and on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar import _torch


@dataclass(frozen=True)
class Exchange:
    """rows [sum(send), ...] in the order of the ranks that they are for; answered by [sum(receive), ...] in the order of those they are from. is_later: answered by
    a function instead, which waits for them: what is done until then runs beside the exchange."""

    rows: Tensor
    send: list[int]
    receive: list[int]
    is_later: bool = False


Body = Generator[Exchange, Any, Any]


def over_group(body: Body, group: str) -> Any:
    """What `body` gives on this rank of the process group named `group` ("": it has none, and asks for nothing)."""
    answer: Tensor | Callable[[], Tensor] | None = None
    while True:
        try:
            ask = next(body) if answer is None else body.send(answer)
        except StopIteration as e:
            return e.value
        later, is_later = _torch.exchanged(ask.rows, ask.send, ask.receive, group), ask.is_later
        del ask  # rows that were sent are the body's, to be let go of
        answer = later if is_later else later()
