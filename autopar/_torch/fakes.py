"""Fake tensors: values without data, and what is recorded of them in graphs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx


def new_fake_mode() -> Any:
    """A FakeTensorMode with a shape environment (Inductor's cache needs one)."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


@contextlib.contextmanager
def failures_untold() -> Iterator[None]:
    """While open, torch does not log operators that cannot be run on fake tensors: what is tried here may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def fresh_fake(v: Any, mode: Any) -> Any:
    """A new fake tensor like `v`; a size as it is."""
    if not isinstance(v, torch.Tensor):
        return v
    with mode:
        return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)


def fake_mode_of(gm: fx.GraphModule) -> Any:
    """The mode of the values recorded in a graph that has inputs."""
    return next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"].fake_mode


def is_fake(t: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(t, FakeTensor)


def check_recorded_values(gm: fx.GraphModule, fake_mode: Any) -> None:
    """Every node, run again on its operands' recorded fake values, gives the recorded shapes and dtypes."""
    for n in gm.graph.nodes:
        if n.op != "call_function":
            continue
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: m.meta["val"])
        with fake_mode:
            got = n.target(*args, **kwargs)
        same = [
            (g.shape, g.dtype) == (w.shape, w.dtype)
            for g, w in zip(*(v if isinstance(v, (list, tuple)) else [v] for v in (got, n.meta["val"])), strict=True)
            if isinstance(g, torch.Tensor)
        ]
        assert all(same), f"recorded value of {n.format_node()} is not what it computes"


def with_strides(v: torch.Tensor, strides: tuple[int, ...], mode: Any) -> torch.Tensor:
    """A fake tensor like `v` with other strides."""
    with mode:
        return torch.empty_strided(v.shape, strides, dtype=v.dtype, device=v.device)


def storage_of(v: torch.Tensor) -> int:
    """What two tensors that share memory share, fake ones too."""
    address: int = v.untyped_storage()._cdata
    return address
