"""What the software that runs a layout does about kernels, overlap and precision: the part of a run that neither model nor layout says.

slowdown           compute takes so much longer than the same kernels elsewhere
network_share      of the rate between nodes that the cluster's description has, what this site reaches
fusion             what memory-bound neighbours share a kernel: "compiled", all; "modules", those of one module (written by hand); "none"
attention_rate     of the device's rate for attention, what this kernel for it reaches
unfused_passes     of memory traffic over the matrix of attention scores in forward, twice that in backward, where attention is not one kernel; 0: it is one
tensor_hidden      share of tensor-parallel traffic that runs beside products (pipelined with them)
context_hidden     whether context parallelism's traffic runs beside attention (ring attention)
two_level          whether tokens go to experts on other nodes once for each node (`autopar.cost.two_level`), where that is faster
keeps_rows         whether backward of routed experts has what forward received and made of it; else, as ours, it sends x again and makes h again
balanced           a pipeline's layers are dealt so that ranks have as many FLOPs of products, the head counted (nanotron); else ranks have as many layers
hops               what a pipeline's ranks hand on runs beside compute: "always", "interleaved", where ranks hold several chunks, "never"; else sender and
                   receiver wait for it (Megatron-LM exchanges so, and since 2023 not where it interleaves: overlap_p2p_comm)
data_exposed       share of data-parallel traffic that is waited for, however much compute there is beside it: 1 where none is overlapped
by_halves          traffic of every micro-batch (ZeRO-3) runs beside the half that it is for: what forward gathers beside forward; else beside all of the step
sums_loss          the loss of a micro-batch is that of all its ranks, a sum that is waited for; else every rank has its own
accumulated_bytes  moved per element of a weight's gradient by the product that makes it: 2 where it is written in half precision, 8 where it is
                   added to one in single precision: half of it read, which devices that read ahead do beside the product
clears_gradients   whether the step of the optimizer clears gradients that a rank holds whole, and reads them (`Cost.optimizer_s`)
grad_bytes, reduce_bytes, param_bytes, master_bytes, moment_bytes    of an element of a gradient, of
                   what is reduced, of a compute copy, of what the optimizer steps, of its moments
fragmented         in a pipeline, of what is not state: so much more the allocator takes, where forwards and backwards of several micro-batches take turns
workspace_bytes    of libraries, besides the tensors of a step (what the driver and communicators hold is the device's reserve)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import LayoutError


@dataclass(frozen=True)
class Runtime:
    name: str
    slowdown: float = 1.0
    network_share: float = 1.0
    gathers_logits: bool = False
    logits_bytes: float = 10.0
    fusion: str = "modules"
    attention_rate: float = 1.0
    unfused_passes: float = 0.0
    tensor_hidden: float = 0.0
    context_hidden: bool = True
    context_even: bool = True
    two_level: bool = False
    keeps_rows: bool = False
    balanced: bool = False
    hops: str = "interleaved"
    data_exposed: float = 1.0
    by_halves: bool = False
    sums_loss: bool = False
    accumulated_bytes: float = 8.0
    clears_gradients: bool = True
    grad_bytes: float = 4.0
    reduce_bytes: float = 4.0
    param_bytes: float = 2.0
    master_bytes: float = 4.0
    moment_bytes: float = 8.0
    fragmented: float = 0.0
    workspace_bytes: float = 0.5e9

    @staticmethod
    def of(runtime: str | Runtime) -> Runtime:
        if isinstance(runtime, Runtime):
            return runtime
        if runtime not in RUNTIMES:
            raise LayoutError(
                f"no runtime is called {runtime!r}",
                where="runtime",
                fix=f"use one of {', '.join(RUNTIMES)}, or autopar.predict.Runtime(...)",
            )
        return RUNTIMES[runtime]


OVERLAPPED = 0.59  # fsdp and others that reduce beside backward: fitted
PIPELINED = 0.80  # of tensor-parallel bytes, where products are cut to run beside them: fitted

_MEGATRON = Runtime("megatron", keeps_rows=True)
RUNTIMES = {
    r.name: r
    for r in (
        Runtime(
            "autopar",
            fusion="compiled",
            context_hidden=False,
            context_even=False,
            hops="always",
            data_exposed=0.0,
            accumulated_bytes=2.0,
            by_halves=True,
            sums_loss=True,
            clears_gradients=False,
        ),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-overlap", tensor_hidden=PIPELINED, data_exposed=OVERLAPPED),
        replace(_MEGATRON, name="fsdp", data_exposed=OVERLAPPED, accumulated_bytes=2.0),
    )
}
