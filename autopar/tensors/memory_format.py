"""How a tensor lies in memory: contiguous, or channels last (torch.channels_last for 4 dims, torch.channels_last_3d for 5).

A format is the order of a tensor's dims from the widest stride to the narrowest. It belongs to the whole tensor: every rank's shard of it lies in
the same order, without gaps. Other orders (a transpose, a part of something larger) are views, and what is made of them lies as the operator leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def channels_last(dims: int) -> Order:
    return (0, *range(2, dims), 1)


def contiguous(dims: int) -> Order:
    return tuple(range(dims))


# What torch calls the formats of images and volumes, which there is more than one of.
FORMATS = {contiguous(dims): torch.contiguous_format for dims in (4, 5)} | {
    channels_last(4): torch.channels_last,
    channels_last(5): torch.channels_last_3d,
}


def order_of(t: torch.Tensor) -> Order:
    """The format of `t`; contiguous where it is in none."""
    dims = t.dim()
    if dims in (4, 5) and not t.is_contiguous() and lies_in(t, channels_last(dims)):
        return channels_last(dims)
    return contiguous(dims)


def lies_in(t: torch.Tensor, order: Order) -> bool:
    """Whether the elements of `t` lie without gaps, its dims in `order` from the widest to the narrowest. Dims of one element may have any stride."""
    step = 1
    for d in reversed(order):
        if t.shape[d] != 1 and t.stride(d) != step:
            return t.numel() == 0
        step *= t.shape[d]
    return True


def looks_last(t: torch.Tensor) -> bool:
    """Whether torch takes `t`, of 4 or 5 dims, for channels last: as `lies_in`, but strides of dims of one element count as well (`c10::is_channels_last_strides_2d`)."""
    least = 0
    for d in reversed(channels_last(t.dim())):
        if t.shape[d] == 0 or t.stride(d) < least or t.stride(1) == 0 or (d == 0 and least == t.stride(1)):
            return False
        least = t.stride(d) * t.shape[d]
    return True


def strides_of(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """The strides of a tensor of `shape` that lies in `order` without gaps."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def dense_order(t: torch.Tensor) -> Order | None:
    """Its dims from the widest stride to the narrowest, if it lies in them without gaps."""
    strides = t.stride()
    order = tuple(sorted(range(t.dim()), key=lambda d: (-strides[d], d)))
    return order if lies_in(t, order) else None


def inverse(order: Order) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def laid(t: torch.Tensor, order: Order) -> torch.Tensor:
    """`t`, lying in `order`: itself where it does, else a copy."""
    return t if lies_in(t, order) else copied(t, order)


def copied(t: torch.Tensor, order: Order) -> torch.Tensor:
    """A copy of `t` that lies in `order`."""
    return t.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse(order))


def same_strides(t: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether `t` has these strides, but for dims of one element."""
    return t.numel() == 0 or all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True))


def with_strides(t: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`t` with these strides: itself where it has them, else a copy. A dim of one element has them too: they move nothing, but kernels tell formats by them (a
    convolution of one channel, whose weight is contiguous and channels last at once)."""
    if t.stride() == tuple(strides):
        return t
    if same_strides(t, strides):
        return t.as_strided(t.shape, tuple(strides)) if t.numel() else t
    return torch.empty_strided(t.shape, tuple(strides), dtype=t.dtype, device=t.device).copy_(t)
