"""Checkpointed regions: opened while capturing, told apart by number, with what their policies say of single calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx

from autopar._torch.fakes import storage_of
from autopar._torch.nodes import get_attribute, value_of

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode


# What a policy that saves attention calls it, by device and kernel; captured is one op of ours.
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}" for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)


def open_regions(gm: fx.GraphModule, numbers: Iterator[int], region: int | None) -> None:
    """In dynamo's graph, calls of `tag_activation_checkpoint` become calls that trace the region as part of the program, each node with its
    region's number and what the region's policy says of it. A region within a region is a part of it.

    (torch's own way there goes through saved-tensor hooks, and what it says of a node does not tell a region from a policy's hint.)"""
    for node in list(gm.graph.nodes):
        body = get_attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(body, fx.GraphModule):
            continue
        inner = region
        for user in list(node.users):
            if user.target is torch.ops.higher_order.tag_activation_checkpoint:
                inner = next(numbers) if region is None else region
                user.target, user.args, user.kwargs = _run_region, (node, inner, _changed_in_place(user), *user.args[1:]), {}
        open_regions(body, numbers, inner)
    gm.recompile()


def _changed_in_place(call: fx.Node) -> tuple[bool, ...]:
    """Which results of a region are changed in place, but for those that are its arguments. What the region's own backward reads of them would be changed too, where a
    checkpoint makes it again. (Their versions count what the region itself did in place as well, so such a result is copied without need.)"""
    arguments = [value_of(a) for a in call.args if isinstance(a, fx.Node)]
    given = {storage_of(v) for v in arguments if isinstance(v, torch.Tensor)}
    results = torch.utils._pytree.tree_leaves(value_of(call))
    return tuple(isinstance(v, torch.Tensor) and v._version > 0 and storage_of(v) not in given for v in results)


def _run_region(body: fx.GraphModule, region: int, changed: tuple[bool, ...], *args: Any) -> Any:
    """changed: of which results a copy is given."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    context_fn = body.meta.get("_checkpoint_context_fn")
    around: Any = contextlib.nullcontext() if context_fn is None else context_fn()[0]
    tag = CheckpointPolicy.MUST_RECOMPUTE
    if hasattr(around, "policy_fn"):
        around, tag = _Asking(around.policy_fn), CheckpointPolicy.PREFER_RECOMPUTE
    for n in body.graph.nodes:  # what these nodes are traced into inherits the two
        n.meta |= {"ac_graph_id": region, "recompute": tag}
    with traceback.preserve_node_meta(), around:
        results = fx.Interpreter(body).run(*args)
    leaves, spec = torch.utils._pytree.tree_flatten(results)
    return torch.utils._pytree.tree_unflatten([r.clone() if c else r for r, c in zip(leaves, changed, strict=True)], spec)


class _Asking(TorchDispatchMode):
    """Asks a selective checkpoint's policy about every op, and notes its answers on the nodes that the op is traced into."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils.checkpoint import SAC_IGNORED_OPS

        kwargs = kwargs or {}
        mode = get_proxy_mode()
        if mode is None or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        out = func(*args, **kwargs)
        answer = self.answer(out, func, args, kwargs)
        for n in itertools.islice(reversed(nodes), len(nodes) - before):
            n.meta["recompute"] = answer
        return out

    def answer(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

        context: Any = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = out
        answer = self.policy(context, func, *args, **kwargs)
        if str(func).startswith("autopar.attention"):
            also = (self.policy(context, getattr(torch.ops.aten, name).default, *args, **kwargs) for name in _ATTENTION)
            answer = next((a for a in also if a != answer), answer)
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.MUST_RECOMPUTE
        # A list of ops is turned by torch into a policy of its own: of what is not on it, it cannot say "must".
        if getattr(self.policy, "__module__", "") == "torch.utils.checkpoint" and answer is CheckpointPolicy.PREFER_RECOMPUTE:
            return CheckpointPolicy.MUST_RECOMPUTE
        return answer


def region_of(n: fx.Node) -> tuple[int | None, str]:
    """The checkpointed region of a node of the joint graph, and what the region says of it: "must_recompute", ... What it would have offloaded
    it would not have made again."""
    region, answer = n.meta.get("ac_graph_id"), n.meta.get("recompute")
    if region is None:
        return None, ""
    assert answer is not None
    return region, answer.name.lower().replace("cpu_offload", "save")


def leave_region(n: fx.Node) -> None:
    n.meta.pop("ac_graph_id", None)
    n.meta.pop("recompute", None)
