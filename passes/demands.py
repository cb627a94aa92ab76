"""What kernels demand of how their operands lie in memory. **Add an op here whose kernel trusts its operands' strides.**

Autograd's formulas make sure of it when a step is captured (a `contiguous()`, which is no call where nothing had to be copied). A rewritten graph has
other strides: values come from collectives, from permuted shards, from a compiled forward that laid out what it saved as it liked. A kernel that
trusts its operands then reads the wrong elements, or memory that is not its own.

    whole      operands without gaps, dims in order
    alike      operands in one format, contiguous or channels last: that of the first, if it is in one
    columns    a matrix whose transpose is without gaps
    plain      whole, and dims of one element have the strides of a new tensor, where `when` says so of the call's arguments

Operators that are not listed take operands however they lie; `tests/spmd/test_demands.py` holds all of torch's samples against that. What another library
registered (its namespace is not torch's) gets operands as they were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.graph.calls import is_collective
from autopar.tensors.memory_format import Order, contiguous, copied, dense_order, laid, lies_in, looks_last, order_of, strides_of

ORDERS = "operand_orders"  # meta of a call of an operator that is not torch's: the captured order of each tensor operand
_KNOWN = ("aten", "prims", "prim", "autopar", "_c10d_functional")


@dataclass(frozen=True)
class Demand:
    """Positions of operands among the call's arguments. mask: of the outputs that are wanted, where operands may lie channels last only if the first is."""

    whole: tuple[int, ...] = ()
    alike: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    plain: tuple[int, ...] = ()
    when: Callable[[Sequence[Any]], bool] | None = None
    mask: int | None = None


def _has_few_channels(args: Sequence[Any]) -> bool:
    """A convolution's backward whose weight's gradient oneDNN computes in a workspace that is too small: 1x1, strided, channels last, fewer of them than a
    block of its kernels has (8 with AVX2, 16 with AVX-512). It writes past its end, in eager torch too (2.13; oneDNN issue 6035)."""
    weight, stride, mask = args[2], args[4], args[10]
    return (
        weight.device.type == "cpu"
        and mask[1]
        and weight.shape[1] < 16
        and all(k == 1 for k in weight.shape[2:])
        and any(s > 1 for s in stride)
    )


_FIRST = Demand(whole=(0,))

DEMANDS: dict[str, Demand] = {
    "aten.native_group_norm": Demand(whole=(1, 2), alike=(0,)),
    # The channels-last kernel writes the input's gradient also where none is wanted: a segmentation fault, in eager torch too (2.13).
    "aten.native_group_norm_backward": Demand(whole=(2, 3, 4), alike=(1, 0), mask=9),
    # Where a batch of one has another stride than its size says, the kernel takes channels last for contiguous: wrong, in eager torch too (2.13).
    "aten.native_batch_norm_backward": Demand(alike=(1, 0)),
    "aten.convolution_backward": Demand(plain=(0, 1, 2), when=_has_few_channels),
    "aten.native_layer_norm_backward": Demand(whole=(3, 4)),
    "aten._fused_rms_norm_backward": Demand(whole=(3,)),
    "aten._weight_norm_interface": Demand(whole=(0, 1)),
    "aten._weight_norm_interface_backward": Demand(whole=(0, 1, 2, 3)),
    "aten.nll_loss2d_backward": Demand(whole=(1,)),
    "aten.adaptive_max_pool3d_backward": Demand(whole=(2,)),
    "aten.fractional_max_pool2d_backward": Demand(whole=(4,)),
    "aten.fractional_max_pool3d_backward": Demand(whole=(4,)),
    "aten._pdist_forward": _FIRST,
    "aten._pdist_backward": Demand(whole=(1, 3)),
    "aten._embedding_bag": Demand(whole=(1, 2, 6)),
    "aten._embedding_bag_forward_only": Demand(whole=(1, 2, 6)),
    "aten._embedding_bag_backward": Demand(whole=(1, 2, 3)),
    "aten._embedding_bag_dense_backward": Demand(whole=(1, 2, 3, 4)),
    "aten._embedding_bag_per_sample_weights_backward": Demand(whole=(2, 3, 4)),
    "aten._linalg_check_errors": _FIRST,
    "aten._scaled_mm": Demand(whole=(0,), columns=(1,)),
    # Strides and offsets in the operand's memory, which is to have no gaps and to start with it (`autopar.capture.as_strided`).
    "aten.as_strided": _FIRST,
    "aten.as_strided_copy": _FIRST,
    "aten.as_strided_scatter": _FIRST,
    "aten.view.dtype": _FIRST,
    "aten.view_as_complex": _FIRST,
    # What is sent.
    "_c10d_functional.all_gather_into_tensor": _FIRST,
    "_c10d_functional.all_reduce": _FIRST,
    "_c10d_functional.reduce_scatter_tensor": _FIRST,
    "_c10d_functional.all_to_all_single": _FIRST,
}


# Kernels proper: neither windows nor what is sent.
KERNELS = tuple(n for n in DEMANDS if n.startswith("aten.") and not n.startswith(("aten.as_strided", "aten.view")))


def demand_of(target: Any) -> Demand | None:
    name = str(target)
    return DEMANDS.get(name) or DEMANDS.get(name.rpartition(".")[0])


def is_foreign(target: Any) -> bool:
    """Whether an operator is neither torch's nor ours: nothing is known of its kernel."""
    return _torch.is_operator(target) and target.namespace not in _KNOWN


def captured_orders(node: fx.Node) -> tuple[tuple[int, Order], ...]:
    """(position, order) of the operands of a captured call that lay without gaps."""
    tensors = ((i, a.meta["val"]) for i, a in enumerate(node.args) if isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor))
    return tuple((i, order) for i, val in tensors if (order := dense_order(val)) is not None)


def unmet(target: Any, args: Sequence[Any], given: Sequence[tuple[int, Order]] | None = None) -> list[tuple[int, Order]]:
    """(position, order) of the operands that do not lie as `target` demands: what it has to be called on is a copy that does.

    args: tensors where the call has tensors. given: what is known of an operator that is not torch's (`ORDERS`).
    """
    d = demand_of(target)
    alike = () if d is None else d.alike
    out = [
        (i, order)
        for i, order in given or _orders(d, args)
        if not (lies_in(args[i], order) and (i not in alike or _is_told(args[i], order)))
    ]
    if d is not None and d.plain and (d.when is None or d.when(args)):
        found = ((i, contiguous(args[i].dim())) for i in d.plain)
        out += [(i, order) for i, order in found if args[i].stride() != strides_of(args[i].shape, order)]
    return out


def _is_told(t: torch.Tensor, order: Order) -> bool:
    """Whether a kernel that asks torch for the format of `t`, which lies in `order`, hears that one: torch tells it by strides, those of dims of one element too."""
    return order == contiguous(t.dim()) or looks_last(t)


def _orders(d: Demand | None, args: Sequence[Any]) -> list[tuple[int, Order]]:
    """(position, order) of the operands that have to lie in one."""
    if d is None:
        return []
    tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    out = [(i, contiguous(tensors[i].dim())) for i in d.whole if i in tensors]
    out += [(i, (1, 0)) for i in d.columns if i in tensors]
    alike = [i for i in d.alike if i in tensors]
    if alike:
        x = tensors[alike[0]]
        # CUDA's kernels of the ops above know one format.
        one = x.device.type != "cpu" or (d.mask is not None and not args[d.mask][0])
        out += [(i, contiguous(x.dim()) if one else order_of(x)) for i in alike]
    return out


def guarded(n: fx.Node) -> Callable[..., Any] | None:
    """What to call in place of `n`'s operator where strides may be others than recorded: the operator, its operands laid out; None where it takes any."""
    target, given = n.target, n.meta.get(ORDERS)
    if demand_of(target) is None and not given:
        return None
    assert callable(target)
    from_start = str(target).startswith("aten.as_strided")

    def call(*args: Any, **kwargs: Any) -> Any:
        new = list(args)
        for i, order in unmet(target, args, given):
            new[i] = copied(new[i], order)
        if from_start and new[0].storage_offset():
            new[0] = new[0].clone()
        return target(*new, **kwargs)

    call.__name__ = call.__qualname__ = "laid_out_" + str(target).replace(".", "_")
    return call


def guard(graph: fx.Graph) -> None:
    """In place: every call whose kernel demands something of its operands makes sure of it when it is run (or traced)."""
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        if is_collective(n):  # stays a call of its own: a failure is told by the line it comes from (`failures.py`)
            if demand_of(n.target) is not None:
                with graph.inserting_before(n):
                    n.update_arg(0, graph.call_function(whole, (n.args[0],)))
        elif (call := guarded(n)) is not None:
            n.target = call


def whole(x: torch.Tensor) -> torch.Tensor:
    """`x` without gaps, its dims in order."""
    return laid(x, contiguous(x.dim()))
