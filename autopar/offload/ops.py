"""The ops that a compiled graph moves activations with.

    t = offload(x, medium, store)         x's data begins to leave                          medium: "host" or "nvme"
    h = offloaded(t, x)                   x's memory may be used for other things           x is an operand so that it lives until here
    t = reload(h, size, dtype, device)    the data begins to come back
    y = reloaded(t, size, dtype, device)  y is x, contiguous

All are functional: nothing is mutated or aliased, and every result depends on what has to be done before it. A ticket owns what it stands
for (`tickets`), the last one the handle's data too: whatever a compiler frees early, in whatever order, nothing is given up that is still
to be read. What data dependence does not say, it leaves to the graph's order: how early a reload begins.

Opaque to Inductor: these names stand for what they do, and no graph that is cached under them holds a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.offload.registry import find_store
from autopar.offload.store import Load, Parcel
from autopar.offload.tickets import empty_ticket, redeem, ticket_of


@torch.library.custom_op("autopar::offload", mutates_args=())
def offload(x: Tensor, medium: str, store: str) -> Tensor:
    return ticket_of(find_store(store).offload(x, medium))


@offload.register_fake
def _(x: Tensor, medium: str, store: str) -> Tensor:
    return empty_ticket()


@torch.library.custom_op("autopar::offloaded", mutates_args=())
def offloaded(ticket: Tensor, x: Tensor) -> Tensor:
    parcel = redeem(ticket, Parcel)
    parcel.store.offloaded(parcel, x)
    return ticket_of(parcel)


@offloaded.register_fake
def _(ticket: Tensor, x: Tensor) -> Tensor:
    return empty_ticket()


@torch.library.custom_op("autopar::reload", mutates_args=())
def reload(handle: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    parcel = redeem(handle, Parcel)
    return ticket_of(parcel.store.reload(parcel, size, dtype, device))


@reload.register_fake
def _(handle: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return empty_ticket()


@torch.library.custom_op("autopar::reloaded", mutates_args=())
def reloaded(ticket: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    load = redeem(ticket, Load)
    return load.parcel.store.reloaded(load, size, dtype, device)


@reloaded.register_fake
def _(ticket: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)
