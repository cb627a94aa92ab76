"""`autopar.search`: the best layouts for a model on a cluster, by the prices of `autopar.predict`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from autopar.cost.optimizers import kind_of
from autopar.errors import AutoparError, LayoutError
from autopar.hardware.cluster import Cluster
from autopar.planner.imbalance import EVEN
from autopar.planner.imbalance import checked as checked_load
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.memory import Memory
from autopar.planner.precision import Precision
from autopar.predict.api import tokens_of
from autopar.predict.runtime import Runtime
from autopar.search.best_first import BestFirst
from autopar.search.bounds import Bounds
from autopar.search.cache import Cache
from autopar.search.price import Prices
from autopar.search.result import Progress, Ranked
from autopar.search.solutions import MicroBatches
from autopar.search.space import Space
from autopar.text.sizes import format_bytes


def search(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    *,
    global_batch: int,
    top_k: int = 5,
    runtime: str | Runtime = "autopar",
    memory: float | str | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = "bfloat16",
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    options: Space | Mapping[str, object] | None = None,
    progress: Callable[[Progress], None] | None = None,
    cache: str | Path | None = None,
    in_subprocess: bool = False,
    below_s: float = math.inf,
    imbalance: float = EVEN,
    seconds: float | None = None,
) -> list[Ranked]:
    """The `top_k` fastest layouts of a step of `model` that fit, the best first. Nothing is computed, the model may lie on the meta device.

    inputs, runtime, precision, optimizer: as `autopar.predict` has them, whose answer to each layout comes with it. memory: bytes that a device may use; default what
    it has, less a reserve. options: what is tried (`Space`), such as {"cp": [1], "recompute": ["none", "full"]}. progress: called with a `Progress`. cache: a file that
    keeps what was solved; a search that was interrupted goes on with it. in_subprocess, imbalance: as `autopar.plan` has them. below_s: layouts that take as long are not wanted; there may be none then.
    seconds: from the call to the answer, which then are the best of the layouts that there was time for, one at least; what is likely to be the best is tried first.

    Without `seconds` no layout of the space is better than the first, none that is not in the list better than the last (`autopar.search.bounds` has the proof). Layouts that differ in
    ZeRO's level or offload alone are one, the fastest of them.

    Raises InfeasibleError when none fits; LayoutError, InputError, CaptureError, ClusterError.
    """
    began_s = perf_counter()
    if seconds is not None and not seconds > 0:
        raise AutoparError(f"a search of {seconds!r} seconds", where="seconds", fix="give a number above 0, or leave it out")
    where, how, space = Cluster.of(cluster), Runtime.of(runtime), Space.of(options)
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1 or top_k < 1:
        raise AutoparError(f"a global batch of {global_batch!r}, the best {top_k!r}", where="search", fix="give whole numbers from 1")
    request = Memory.of(memory)
    if request.least:
        raise AutoparError("the least memory is not searched for", where="memory", fix="give the bytes that a device may use")
    budget_bytes = where.device.usable_bytes if request.budget_bytes is None else request.budget_bytes
    kind_of(optimizer)
    checked_load(imbalance, where.size)
    if all(global_batch % b for b in space.micro_batch):
        raise LayoutError(
            f"no micro-batch of {space.micro_batch} sequences divides a global batch of {global_batch}",
            where="options",
            fix="allow a divisor of it",
        )
    micros = MicroBatches(model, inputs, where, how, loss_fn, precision, Cache(cache), in_subprocess, imbalance)
    bounds = Bounds(space, where, how, optimizer, budget_bytes)
    prices = Prices(bounds, type(model).__name__, global_batch, tokens_of(inputs), precision, imbalance)
    until_s = math.inf if seconds is None else began_s + seconds
    found = BestFirst(space, bounds, prices, micros, top_k, progress or (lambda p: None), below_s, until_s).run()
    if not found and math.isinf(below_s):
        raise InfeasibleError(
            constraint=f"no layout of {type(model).__name__} on {where.name} keeps to {format_bytes(budget_bytes)} a device",
            shortfall_bytes=int(bounds.short_bytes) if math.isfinite(bounds.short_bytes) else 0,
            remedy="more devices, a smaller micro-batch, more that may be made again or offloaded, or shorter sequences",
        )
    return found
