"""Inductor: late decomposition, compilation of one graph, its cache, and its defects worked around."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx


def import_compiler() -> None:
    """Imports what the first capture would import, so that a command can count it as what it is."""
    for part in ("_dynamo.backends.debugging", "_dynamo.functional_export", "_functorch.aot_autograd", "export._trace"):
        importlib.import_module(f"torch.{part}")


def invoke_subgraph() -> Any:
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as op

    return op


def pools_with_offsets(window: list[int], dilation: list[int]) -> bool:
    """Whether Inductor has kernels of its own for a max pool with this window, which give where in it a maximum is."""
    from torch._inductor import lowering

    return set(dilation) == {1} and not lowering.should_fallback_max_pool_with_indices(window, n_dim=len(window))


def pool_with_offsets() -> tuple[Any, Any]:
    """(x, window, stride, padding, dilation, ceil_mode) -> (out, int8 offsets); (offsets, window, plane, stride, padding, dilation) -> indices."""
    importlib.import_module("torch._inductor.inductor_prims")
    prims: Any = torch.ops.prims
    return prims._low_memory_max_pool_with_offsets.default, prims._low_memory_max_pool_offsets_to_indices.default


@functools.cache
def keep_strides(names: tuple[str, ...]) -> None:
    """Inductor gives the operators of these names their operands as the graph has them, where it calls torch's kernel."""
    from torch._inductor import lowering

    for name in names:
        packet: Any = functools.reduce(getattr, name.split("."), torch.ops)
        for overload in packet.overloads():
            lowering._maybe_layout_constraints.setdefault(getattr(packet, overload), lowering.constrain_to_fx_strides)


def decompose_late(gm: fx.GraphModule, values: list[Any], mode: Any) -> fx.GraphModule:
    """Retraces `gm` through Inductor's decompositions on the fake tensors `values`."""
    importlib.import_module("torch._inductor.lowering")  # decompositions look for it without importing it
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        n.target = torch.ops.aten.reshape.default  # decomposed, values may lie otherwise than recorded
    gm.recompile()
    # Some operators have kernels for symbolic sizes in Python alone.
    with_sizes = mode.shape_env is not None and mode.shape_env.var_to_range
    with mode, torch.no_grad(), enable_python_dispatcher() if with_sizes else contextlib.nullcontext():
        return make_fx(gm, decomposition_table=select_decomp_table(), tracing_mode="real", _allow_non_fake_inputs=True)(*values)


@contextlib.contextmanager
def scatters_before_readers() -> Iterator[None]:
    """While open, Inductor's scheduler keeps the order of reads and writes in place when it computes a node's loops again.

    It does so on CPU, where it fuses loops of different shapes. torch 2.13 then forgets that a node reads what a scatter added to (the
    gradient of an upsampling or a max pooling, index_add), not the zeros before it; such a node may come to stand before the scatter, and
    silently reads zeros. Torch before 2.13 also forgets what must run before a write. pytorch/pytorch#185509, mended by #185873; where it
    is, nothing changes.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    patched: Any = SchedulerNode
    theirs = patched.recompute_size_and_body

    def ours(node: Any, *args: Any, **kwargs: Any) -> None:
        order: Any = OrderedSet(d for d in node.read_writes.reads if isinstance(d, (WeakDep, StarDep)))
        theirs(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    config: Any = torch.compiler.config
    patched.recompute_size_and_body = ours
    try:
        # Another key of the cache on disk, where what was compiled without this may lie, wrong.
        with config.patch(cache_key_tag=f"{config.cache_key_tag}scatters before readers"):
            yield
    finally:
        patched.recompute_size_and_body = theirs


def compile_inner(gm: fx.GraphModule, mode: Any, is_backward: bool) -> tuple[Any, tuple[tuple[Any, ...] | None, ...] | None]:
    """Inductor on a decomposed graph: the callable (a list of tensors in, boxed) and the strides of its outputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    context = TracingContext(mode)
    context.fakify_first_call = True  # strides of outputs are said with symbols, where sizes have some
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    # Reordering for peak memory would undo the order in which collectives are issued and waited for. Reductions of different orders in one
    # kernel silently give wrong gradients of modulated layer norms that share a scale on GPUs (torch 2.10 to 2.13, pytorch/pytorch#193061).
    with (
        tracing(context),
        V.set_fake_mode(mode),
        config.patch({"reorder_for_peak_memory": False, "triton.mix_order_reduction": False}),
        scatters_before_readers(),
        context.report_output_strides() as found,
    ):
        fn = compile_fx_inner(gm, values, is_backward=is_backward)
    strides = (
        None
        if found is None
        else tuple(None if s is None else tuple(x if isinstance(x, torch.SymInt) else int(x) for x in s) for s in found)
    )
    return fn, strides


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm`'s generated code as a function of a list that it empties: called with plain arguments, the caller would keep all of them alive."""

    class Boxed(fx.graph.CodeGen):
        def gen_fn_def(self, free_vars: list[str], *_: Any, **__: Any) -> str:
            names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
            return f"def forward(self, flat):\n    [{', '.join(names)}] = flat\n    flat.clear()"

    gm.graph.set_codegen(Boxed())
    gm.recompile()
    return gm.forward


def inductor_cache_counts() -> dict[str, int]:
    """Hits, misses and bypasses of Inductor's graph cache so far in this process."""
    from torch._dynamo.utils import counters

    c = counters["inductor"]
    return {k: int(c[f"fxgraph_cache_{k}"]) for k in ("hit", "miss", "bypass")}


def decomposed_late() -> set[Any]:
    """The operators that Inductor decomposes before its partitioner sees a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return set(select_decomp_table())
