"""nn.Module + example inputs -> one joint forward/backward fx graph on fake tensors, at global shapes.

The user's module is never traced itself: a skeleton of it (a deep copy whose parameters and buffers are fake CPU tensors of
the same shapes, ties kept) is. So it does not matter whether the parameters are plain, DTensors or on meta, and no memory is used.
Dynamo inlines the module's Python; AOTAutograd adds the backward. Attention is caught as one op
(`capture_ops`), checkpointed regions become tags (`capture_tags`), everything else stays at the level of aten.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar import _torch
from autopar.capture_masks import plain_masks
from autopar.capture_ops import captured_ops
from autopar.capture_strides import plain_windows
from autopar.capture_tags import lift_marks, settle_tags
from autopar.common import merge_equal
from autopar.errors import CaptureError
from autopar.memory_format import order_of, strides_of


@dataclass(frozen=True)
class Role:
    """What a graph input or output is: kind in {param, buffer, input, tangent, output, grad, none}, name or position."""

    kind: str
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Captured:
    """A captured step.

    gm: the joint graph, one placeholder per entry of `inputs`, one output tuple matching `outputs`.
    out_spec: pytree spec of what the user gets, over the `output` roles in order; loss_only: it was cut down to the scalar loss.
    constants: outputs that are no tensors, by position.
    """

    gm: fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    out_spec: Any
    loss_only: bool
    fake_mode: Any
    input_shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    constants: Mapping[int, Any]


@dataclass(frozen=True)
class Call:
    """A call of the user's model, taken apart: tensors in flattened order, and all that is constant about it."""

    tensors: tuple[torch.Tensor, ...]
    spec: Any
    constants: tuple[Any, ...]  # one per leaf; None where the leaf is a tensor
    positions: tuple[int, ...]  # leaf index of every tensor
    paths: tuple[str, ...]  # a name for people of every tensor

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        leaves, spec = _torch.pytree.tree_flatten_with_path((args, dict(kwargs)))
        tensors, constants, positions, paths = [], [], [], []
        for i, (path, leaf) in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                positions.append(i)
                paths.append(_torch.pytree.keystr(path[1:]) if path else "input")
                constants.append(None)
            else:
                constants.append(leaf)
        return Call(tuple(tensors), spec, tuple(constants), tuple(positions), tuple(paths))

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's, with these in place of its tensors."""
        leaves = list(self.constants)
        for i, t in zip(self.positions, tensors, strict=True):
            leaves[i] = t
        args, kwargs = _torch.pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


LOSS = "__autopar_loss__"


class _Flat(nn.Module):
    """The skeleton behind a signature of tensors only."""

    def __init__(self, model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None, loss_only: bool) -> None:
        super().__init__()
        self.m = model
        self.call_spec = call
        self.loss_fn = loss_fn
        self.loss_only = loss_only
        self.train(model.training)

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self.call_spec.arguments(tensors)
        if self.loss_fn is not None:
            if "target" in kwargs:
                target = kwargs.pop("target")
            else:
                target, args = args[-1], args[:-1]
            return {LOSS: self.loss_fn(self.m(*args, **kwargs), target)}
        out = self.m(*args, **kwargs)
        if self.loss_only:
            loss = out.get("loss", None) if isinstance(out, dict) else getattr(out, "loss", None)
            if loss is not None and loss.dim() == 0:
                return {LOSS: loss}
        # AOTAutograd gives results that are views of inputs or of each other no gradient of their own: it means to take those views once more outside.
        return _torch.pytree.tree_map_only(torch.Tensor, torch.clone, out)


def skeleton(model: nn.Module, mode: Any, cast: torch.dtype | None = None) -> tuple[nn.Module, dict[str, str]]:
    """A copy of `model` with fake parameters and buffers, and every parameter and buffer name -> its canonical name.

    cast: floating parameters of float32 get this dtype (the compute dtype of mixed precision).
    """
    memo: dict[int, Any] = {}
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    with mode:
        for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
            canonical[name] = first.setdefault(id(t), name)
            if id(t) in memo:
                continue
            dtype = t.dtype
            if cast is not None and isinstance(t, nn.Parameter) and dtype == torch.float32:
                dtype = cast
            fake = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="cpu")
            memo[id(t)] = nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake
    copied = copy.deepcopy(model, memo)
    return copied, canonical


def off_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Key/value caches are off unless asked for: they are not part of a training step."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None) and "use_cache" in inspect.signature(model.forward).parameters:
        return {"use_cache": False, **kwargs}
    return kwargs


def capture(
    model: nn.Module,
    call: Call,
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    *,
    loss_fn: Callable[..., Any] | None = None,
    loss_only: bool = True,
    grad: bool = True,
    cast: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Captured:
    """Captures one call of `model` at the given global input shapes.

    shapes: (global shape, dtype) of every tensor of `call`; how it lies in memory is the tensor's own format. grad: with a backward. cast: compute dtype of float32 parameters.
    autocast: dtype of the surrounding torch.autocast, if one is on.
    Raises CaptureError with the user's source line where the model cannot be captured whole.
    """
    mode = _torch.new_fake_mode()
    copied, canonical = skeleton(model, mode, cast)
    for p in copied.parameters() if not grad else ():
        p.requires_grad_(False)
    flat = _Flat(copied, call, loss_fn, loss_only)
    with mode:
        inputs = tuple(
            torch.empty_strided(s, strides_of(s, order_of(t)), dtype=cast if cast is not None and d == torch.float32 else d).requires_grad_(
                t.requires_grad and grad
            )
            for (s, d), t in zip(shapes, call.tensors, strict=True)
        )
    scope = torch.autocast("cpu", dtype=autocast) if autocast is not None else torch.autocast("cpu", enabled=False)
    args, kwargs = call.arguments(call.tensors)
    with scope, torch.set_grad_enabled(grad), captured_ops(), plain_masks(model, args, kwargs), _explained(model):
        gm, in_descs, out_descs, out_spec = _torch.export_joint(flat, inputs)

    def name(target: str) -> str:
        target = target.removeprefix("m.")
        return canonical.get(target, target)

    roles_in = tuple(_role(d, name) for d in in_descs)
    roles_out = tuple(_role(d, name) for d in out_descs)
    spec = out_spec
    is_loss = LOSS in _keys(spec)
    _without_copies(gm, roles_out)
    _torch.drop_dead_code(gm)
    lift_marks(gm)
    plain_windows(gm, mode)
    merge_equal(gm)
    settle_tags(gm)
    results = gm.graph.output_node().args[0]
    constants = {r.index: v for r, v in zip(roles_out, results, strict=True) if r.kind == "output" and not isinstance(v, fx.Node)}
    return Captured(gm, roles_in, roles_out, spec, is_loss, mode, shapes, constants)


def _without_copies(gm: fx.GraphModule, roles: tuple[Role, ...]) -> None:
    """Takes back the copies of results that `_Flat` made."""
    output = gm.graph.output_node()
    results = list(output.args[0])
    for i, (role, n) in enumerate(zip(roles, results, strict=True)):
        if role.kind == "output" and isinstance(n, fx.Node) and n.target is torch.ops.aten.clone.default:
            results[i] = n.args[0]
    output.args = (tuple(results),)


def _keys(spec: Any) -> list[Any]:
    return list(spec.context) if spec.type is dict else []


def _role(d: Any, name: Callable[[str], str]) -> Role:
    kind, value = _torch.describe_io(d)
    if kind in ("param", "buffer", "grad", "buffer_update"):
        return Role(kind, name(str(value)))
    return Role(kind, "", -1 if value is None else int(value))


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turns dynamo's errors into one that shows the user's line and a way round."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as e:
        found = _torch.explain_capture_failure(e)
        if found is None:
            raise
        what, where = found
        raise CaptureError(
            f"{type(model).__name__} cannot be captured as one graph: {what}",
            where=where,
            fix="keep Python control flow and .item() off tensor values in forward (use torch.where or a constant), or move "
            "this part out of the model; for a Hugging Face model try another attn_implementation or experts_implementation",
        ) from e
