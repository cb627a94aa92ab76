"""Copies between a device and host memory, beside the computation.

On CUDA a store has two streams a device, one for each direction, so that neither direction waits for the other nor the computation for
either. What makes a copy wait, and what waits for a copy, are events. On CPU a copy is done when the call returns and there is no event
(None).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Event = torch.cuda.Event


class Streams:
    """Used by several threads: a stream too many, made in a race, does no harm."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def ready(self, device: torch.device) -> Event | None:
        """When all that the caller has queued on `device` so far is done."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def copy(self, to: Tensor, source: Tensor, way: Literal["out", "in"], after: Iterable[Event | None]) -> Event | None:
        """Queues the copy of bytes behind the events of `after`, and says when it is done."""
        device = source.device if way == "out" else to.device
        if device.type != "cuda":
            np.copyto(to.numpy(), source.numpy())  # torch's copy would bring a pool of threads for each thread that calls it
            return None
        side = self._streams.get((device, way)) or self._streams.setdefault((device, way), torch.cuda.Stream(device))
        done = Event(blocking=True)  # a thread that waits for it sleeps
        with torch.cuda.stream(side):
            for event in after:
                if event is not None:
                    side.wait_event(event)
            to.copy_(source, non_blocking=True)
            done.record(side)
        return done

    def hold_back(self, device: torch.device, event: Event | None) -> None:
        """What is queued on `device` from now on waits for `event`; the caller does not."""
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)


def is_done(event: Event | None) -> bool:
    return event is None or event.query()


def as_bytes(x: Tensor) -> Tensor:
    """`x`'s elements in row-major order as a flat tensor of bytes: its own memory where it lies so already.

    The dispatcher has resolved what is conjugate or negative by a bit only.
    """
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
