"""`autopar.predict`: what a hand layout costs, by the prices of the integer program.

The layout is a constraint on the very problem the planner solves: a micro-batch of one replica, or of all that share experts, is captured and solved on the tensor, context and expert axes
(`autopar.planner.formulation.layouts`), which says what every device does; pipeline, data parallelism, recomputation and offload, which repeat that micro-batch, are priced
around it (`step.py`). So there is no formula for a kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from autopar.errors import InputError
from autopar.hardware.cluster import Cluster
from autopar.planner.expert_folding import CONTEXT, DATA, EXPERTS, FEATURES, TENSOR, named
from autopar.planner.found import Found
from autopar.planner.imbalance import EVEN, refuse_more
from autopar.planner.imbalance import checked as checked_load
from autopar.planner.layout import Layout
from autopar.planner.planning import Step
from autopar.planner.precision import Precision
from autopar.planner.task import Task, task
from autopar.predict.data import sharded_over
from autopar.predict.pieces import Piece, pieces
from autopar.predict.prediction import Prediction
from autopar.predict.runtime import Runtime
from autopar.predict.step import step
from autopar.solver.solve import Limits


def predict(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    layout: Layout,
    *,
    global_batch: int,
    runtime: str | Runtime = "autopar",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = "bfloat16",
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    progress: Callable[[str, float], None] | None = None,
    imbalance: float = EVEN,
) -> Prediction:
    """Prices a step of `model` under a hand layout; nothing is computed, the model may lie on the meta device.

    inputs: keyword arguments of a call, tensors or shapes (a shape is taken for token ids); their dim 0 is the batch, whatever its size there. layout: sizes
    (`Layout(tp=8, pp=4, ...)`); what they leave of the cluster's devices is data parallel. global_batch: sequences of a step, over all devices.
    runtime: what software runs it (`autopar.predict.RUNTIMES`); ours by default. imbalance: where ep ranks share routed experts, rows of the fullest of them over the
    mean, which is what is priced; 1.0: even load, as in most published figures.

    Raises LayoutError where sizes do not divide, InputError, CaptureError, ClusterError; AutoparError for an imbalance that ep ranks cannot have.
    """
    where, how = Cluster.of(cluster), Runtime.of(runtime)
    sharded_over(layout, layout.replicas(where.size))  # what is refused is so before anything is captured
    refuse_more(checked_load(imbalance, where.size), layout.ep, f"ep={layout.ep} ranks")
    found = micro_batch(model, inputs, where, layout, how, loss_fn, precision, progress, imbalance)
    return priced(found, type(model).__name__, where, layout, how, global_batch, tokens_of(inputs), precision, optimizer, imbalance)


def priced(
    found: Sequence[Piece],
    model: str,
    cluster: Cluster,
    layout: Layout,
    runtime: Runtime,
    global_batch: int,
    tokens: int,
    precision: Precision | str | torch.dtype | None,
    optimizer: str | type[torch.optim.Optimizer],
    imbalance: float = EVEN,
) -> Prediction:
    """found: a micro-batch's pieces; tokens: of a sequence; imbalance: that the pieces were made at."""
    done = step(found, layout, runtime, cluster, global_batch, optimizer)
    p = Precision.of(precision)
    dtype = str(p.param).removeprefix("torch.") if p.param is not None else "float32"
    device = cluster.device
    return Prediction(
        model=model, cluster=cluster.name, devices=cluster.size, layout=layout, runtime=runtime.name,
        global_batch=global_batch, micro_batches=done.micro_batches, tokens=global_batch * tokens,
        step_time_s=done.step_time_s, parts_s=done.parts_s, memory_bytes=done.peak_bytes, usable_bytes=device.usable_bytes, layers=done.layers,
        peak_flops=device.peak(dtype), model_flops=done.model_flops, square_flops=done.square_flops, imbalance=imbalance,
    )  # fmt: skip


def micro_batch(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: Cluster,
    layout: Layout,
    runtime: Runtime,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = "bfloat16",
    progress: Callable[[str, float], None] | None = None,
    imbalance: float = EVEN,
) -> tuple[Piece, ...]:
    """The pieces of a micro-batch of one replica, on the devices that share it."""
    return pieces(solved(model, inputs, cluster, layout, loss_fn, precision, progress, imbalance), runtime.fusion)


def solved(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: Cluster,
    layout: Layout,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = "bfloat16",
    progress: Callable[[str, float], None] | None = None,
    imbalance: float = EVEN,
) -> Found:
    """The integer program's answer for that micro-batch: every operator's strategy is the layout's."""
    sequences = layout.micro_batch * layout.sharing
    t = captured(model, inputs, sequences, cluster, loss_fn, precision, progress, imbalance=imbalance)
    return answered(t, layout, progress)


def captured(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    sequences: int,
    cluster: Cluster,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = "bfloat16",
    progress: Callable[[str, float], None] | None = None,
    in_subprocess: bool = False,
    imbalance: float = EVEN,
) -> Task:
    """A micro-batch of so many sequences: what `answered` takes, whatever the layout. in_subprocess: as `autopar.plan` has it."""
    shapes = {k: _resized(v, sequences) for k, v in inputs.items()}
    on_progress = progress or (lambda stage, seconds: None)
    return task(
        model, shapes, cluster, {"dp": 1}, loss_fn, precision, "adamw", 1, None, None, on_progress, in_subprocess, imbalance=imbalance
    )


def answered(t: Task, layout: Layout, progress: Callable[[str, float], None] | None = None) -> Found:
    """t: a micro-batch of the layout's, of all ranks that share experts."""
    ranks = layout.together
    axes = {p.name: p.size for p in ranks} or {"tp": 1}
    roles = Layout(
        data=named(ranks, dense=DATA),
        experts=named(ranks, routed=EXPERTS),
        tensor=named(ranks, dense=TENSOR),
        context=named(ranks, dense=CONTEXT),
        sequence_parallel=layout.sequence_parallel,
        name=str(layout),
        expert_features=None if layout.expert_tp is None else named(ranks, routed=FEATURES),
    )
    training = replace(t.training, counts=False)  # strategies are the layout's: memory is counted around them, not traded
    program = Step.of(t.folded, axes, t.cluster, training, Limits(), progress, roles if ranks else None)
    with program.in_time():
        return program.stages.run()


def _resized(x: torch.Tensor | Sequence[int], batch: int) -> torch.Tensor | tuple[int, ...]:
    if isinstance(x, torch.Tensor):
        if not x.dim():
            return x
        return torch.empty((batch, *x.shape[1:]), dtype=x.dtype, device="meta")
    if not isinstance(x, (tuple, list)) or not x:
        raise InputError(f"an input is {x!r}", where="predict", fix="give tensors, or shapes such as (8, 4096)")
    return (batch, *tuple(x)[1:])


def tokens_of(inputs: Mapping[str, torch.Tensor | Sequence[int]]) -> int:
    """Of a sequence: the second dim of the first input that has one."""
    for x in inputs.values():
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else tuple(x)
        if len(shape) > 1:
            return int(shape[1])
    return 1
