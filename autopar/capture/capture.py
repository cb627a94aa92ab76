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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar import _torch
from autopar.capture.as_strided import plain_windows
from autopar.capture.bounds import bound_masks
from autopar.capture.common_subexpressions import merge_equal
from autopar.capture.effects import SetAnewError, WrittenBuffers, judge, made_by_torch, refuse_global_hooks, said, set_flags
from autopar.capture.experts import install_experts
from autopar.capture.family import Family
from autopar.capture.hidden_states import install_recorders
from autopar.capture.identity_index import plain_indices
from autopar.capture.masks import plain_masks
from autopar.capture.ops import captured_ops, copied_operands
from autopar.capture.sinks import sinks_as_attention
from autopar.capture.tags import lift_marks, settle_tags
from autopar.capture.unchanged import drop_unchanged
from autopar.errors import CaptureError
from autopar.graph.varying import Varying, with_units
from autopar.tensors.memory_format import order_of, strides_of

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # (global shape, dtype) of every tensor of a call


class Role(NamedTuple):
    """What a graph input or output is: kind in {param, buffer, input, tangent, output, grad, none}, name or position."""

    kind: str
    name: str = ""
    index: int = -1  # type: ignore[assignment]  # in place of the method of tuples


@dataclass(frozen=True)
class Captured:
    """A captured step.

    gm: the joint graph, one placeholder per entry of `inputs`, one output tuple matching `outputs`.
    out_spec: pytree spec of what the user gets, over the `output` roles in order; loss_only: it was cut down to the scalar loss.
    constants: outputs that are no tensors, by position.
    notes: what Python state the program depends on.
    family: where sizes vary, the program for all of them, of which this is the one at the sizes that stand for all.
    samples: of the program of a micro-batch.
    """

    gm: fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    out_spec: Any
    loss_only: bool
    fake_mode: Any
    input_shapes: Shapes
    constants: Mapping[int, Any]
    notes: _torch.Notes
    family: Family[Captured] | None = None
    samples: Any = None  # of a micro-batch, which part of a batch it is (`autopar.capture.micro_batches.Samples`)


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
        tensors, positions, paths = [], [], []
        constants: list[Any] = []
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
    """The skeleton behind a signature of tensors only.

    written: buffers that forward sets anew. What they are set to is written into them at the end."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        loss_fn: Callable[..., torch.Tensor] | None,
        loss_only: bool,
        written: WrittenBuffers = frozenset(),
    ) -> None:
        super().__init__()
        self.m = model
        self.call_spec = call
        self.loss_fn = loss_fn
        self.loss_only = loss_only
        self.written = sorted(written)
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> Any:
        if not self.written:
            return self.called(*tensors)
        before = [getattr(self.m.get_submodule(m), n) for m, n in self.written]
        for (m, n), old in zip(self.written, before, strict=True):
            setattr(self.m.get_submodule(m), n, old.clone())  # what read it keeps what it read, as in eager
        out = self.called(*tensors)
        for (m, n), old in zip(self.written, before, strict=True):
            owner = self.m.get_submodule(m)
            with torch.no_grad():
                old.copy_(getattr(owner, n))
            setattr(owner, n, old)
        return out

    def called(self, *tensors: torch.Tensor) -> Any:
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
        return out


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
        loose = [(name, m, t) for name, m, t in _loose(model) if id(t) not in memo]
        for name, _, t in loose:
            canonical[name] = first.setdefault(id(t), name)
            if id(t) not in memo:
                memo[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as e:
        raise _uncopied(model, memo, e) from e
    install_recorders(copied)
    install_experts(copied)
    for name, m, t in loose:
        path, _, attr = name.rpartition(".")
        if attr in made_by_torch(m):
            continue
        if t.requires_grad:
            raise CaptureError(
                f"attribute {attr!r} of module {path or type(model).__name__!r} requires a gradient and is no parameter",
                fix="make it a torch.nn.Parameter, or detach it",
            )
        # Dynamo would take it for a constant: as a buffer it is read at every call.
        owner = copied.get_submodule(path)
        fake = owner.__dict__.pop(attr)
        owner.register_buffer(attr, fake, persistent=False)
    return copied, canonical


def _uncopied(model: nn.Module, memo: dict[int, Any], e: Exception) -> CaptureError:
    for path, m in model.named_modules():
        for attr, v in vars(m).items():
            try:
                copy.deepcopy(v, {**memo, **{id(child): child for child in m.children()}})
            except Exception:
                return CaptureError(
                    f"attribute {attr!r} of module {path or type(model).__name__!r} cannot be copied ({e}), and a copy of the model is what is traced",
                    fix=f"keep it outside of the model, or give {type(v).__name__} a method __deepcopy__ that returns self",
                )
    return CaptureError(
        f"{type(model).__name__} cannot be copied, and a copy of it is what is traced: {e}", fix="make copy.deepcopy(model) work"
    )


def _loose(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """(name, module, tensor) of tensors that are plain attributes of modules."""
    for path, m in model.named_modules():
        for attr, t in vars(m).items():
            if isinstance(t, torch.Tensor):
                yield f"{path}.{attr}".lstrip("."), m, t


def tensor_named(model: nn.Module, name: str) -> torch.Tensor:
    """A buffer, or a tensor that is a plain attribute of a module."""
    path, _, attr = name.rpartition(".")
    found = getattr(model.get_submodule(path), attr)
    assert isinstance(found, torch.Tensor), name
    return found


def off_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Key/value caches are off unless asked for: they are not part of a training step."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None) and "use_cache" in inspect.signature(model.forward).parameters:
        return {"use_cache": False, **kwargs}
    return kwargs


def capture(
    model: nn.Module,
    call: Call,
    shapes: Shapes,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    loss_only: bool = True,
    grad: bool = True,
    cast: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    varying: tuple[Varying, ...] = (),
) -> Captured:
    """Captures one call of `model` at the given global input shapes.

    shapes: (global shape, dtype) of every tensor of `call`; how it lies in memory is the tensor's own format. grad: with a backward. cast: compute dtype of float32 parameters.
    autocast: dtype of the surrounding torch.autocast, if one is on. varying: dims of the inputs whose sizes vary, in place of what `shapes` says of them.
    Raises NotGeneralError where the program is another one at every size; CaptureError with the user's source line where the model cannot be captured whole.
    """
    mode = _torch.new_fake_mode()
    copied, canonical = skeleton(model, mode, cast)
    for p in copied.parameters() if not grad else ():
        p.requires_grad_(False)
    refuse_global_hooks()
    constants = _constant_sizes(copied, shapes, varying)
    varying = with_units(varying, constants)
    symbols = _torch.Symbols(mode, [v.units for v in varying])
    traced_at = varied(shapes, varying, symbols.sizes)
    with mode:
        inputs = tuple(
            torch.empty_strided(s, strides_of(s, order_of(t)), dtype=cast if cast is not None and d == torch.float32 else d).requires_grad_(
                t.requires_grad and grad
            )
            for (s, d), t in zip(traced_at, call.tensors, strict=True)
        )
    scope = torch.autocast("cpu", dtype=autocast) if autocast is not None else torch.autocast("cpu", enabled=False)
    args, kwargs = call.arguments(call.tensors)
    notes = _torch.Notes()
    written: WrittenBuffers = frozenset()

    def judged(found: _torch.Notes) -> None:
        nonlocal notes
        notes = found
        judge(found, copied, written)

    def traced() -> tuple[fx.GraphModule, list[Any], list[Any], Any]:
        flat = _Flat(copied, call, loss_fn, loss_only, written)
        try:
            return _torch.export_joint(flat, inputs, judged)
        except RuntimeError as e:
            if "modified by an inplace operation" not in str(e):
                raise
        with copied_operands():
            return _torch.export_joint(flat, inputs, judged)

    with (
        scope,
        torch.set_grad_enabled(grad),
        captured_ops(),
        plain_masks(model, args, kwargs),
        sinks_as_attention(copied, kwargs),
        _explained(model, bool(varying)),
    ):
        try:
            gm, in_descs, out_descs, out_spec = traced()
        except SetAnewError as e:
            written = e.buffers
            gm, in_descs, out_descs, out_spec = traced()
        if notes.sets:
            first = notes
            set_flags(copied, first)
            first.settled = str(traced()[0].graph) == str(gm.graph)
            notes = first

    def name(target: str) -> str:
        target = target.removeprefix("m.")
        return canonical.get(target, target)

    roles_in = tuple(_role(d, name) for d in in_descs)
    roles_out = tuple(_role(d, name) for d in out_descs)
    buffers = {r.name: i for i, r in enumerate(roles_in) if r.kind == "buffer"}
    same = drop_unchanged(gm, buffers, {i: r.name for i, r in enumerate(roles_out) if r.kind == "buffer_update"})
    roles_out = tuple(Role("none") if i in same else r for i, r in enumerate(roles_out))
    _refuse_unknown(roles_in, model, notes)
    _refuse_writes(roles_out, call, model)
    notes.effects, notes.sources = [], []
    is_loss = LOSS in _keys(out_spec)

    def finished(gm: fx.GraphModule, mode: Any, units: tuple[int, ...]) -> Captured:
        _torch.drop_dead_code(gm)
        lift_marks(gm)
        if plain_windows(gm, mode) | plain_indices(gm, mode):
            _torch.drop_dead_code(gm)
        merge_equal(gm)
        bound_masks(gm)
        settle_tags(gm)
        results = _torch.results_of(gm.graph)
        constants = {r.index: v for r, v in zip(roles_out, results, strict=True) if r.kind == "output" and not isinstance(v, fx.Node)}
        return Captured(gm, roles_in, roles_out, out_spec, is_loss, mode, varied(shapes, varying, units), constants, notes)

    _warn_of_checkpointed(gm, roles_out)
    if not varying:
        return finished(gm, mode, ())
    if not symbols.are_free:
        raise NotGeneralError("sizes that vary are compared with each other or with constants")
    family = Family(gm, symbols, varying, constants, notes.sizes, finished)
    return replace(family.at(family.units), family=family)


class NotGeneralError(CaptureError):
    """A program cannot be one for all sizes: it is captured for each."""


def varied(shapes: Shapes, varying: tuple[Varying, ...], units: Sequence[Any]) -> Shapes:
    """`shapes`, with so many units in the dims whose sizes vary."""
    whole = [list(s) for s, _ in shapes]
    for v, n in zip(varying, units, strict=True):
        for i, d in v.dims:
            whole[i][d] = v.step * n
    return tuple((tuple(s), d) for s, (_, d) in zip(whole, shapes, strict=True))


def _constant_sizes(model: nn.Module, shapes: Shapes, varying: tuple[Varying, ...]) -> frozenset[int]:
    """Sizes of parameters, buffers and inputs that do not vary."""
    there = {d for v in varying for d in v.dims}
    sizes = {n for t in (*model.parameters(), *model.buffers()) for n in t.shape}
    return frozenset(sizes | {n for i, (s, _) in enumerate(shapes) for d, n in enumerate(s) if (i, d) not in there})


def _refuse_writes(outputs: tuple[Role, ...], call: Call, model: nn.Module) -> None:
    changed = {r.name: tensor_named(model, r.name) for r in outputs if r.kind == "buffer_update"}
    others = [*model.named_buffers(), *((n, t) for n, _, t in _loose(model))] if changed else []
    for name, t in changed.items():
        for other, u in others:
            if u is not t and t.numel() and _torch.storage_of(u) == _torch.storage_of(t):
                raise CaptureError(
                    f"forward changes {name!r}, which shares memory with {other!r}: a compiled step has two tensors of them",
                    fix="keep one of them, and make the other from it in forward",
                )
    for r in outputs:
        if r.kind == "param_update":
            raise CaptureError(
                f"forward changes parameter {r.name!r} in place",
                fix="change it outside of the model, between steps, or compute with a changed copy (torch.nn.utils.parametrize)",
            )
        if r.kind == "input_update":
            raise CaptureError(
                f"forward changes its input {call.paths[r.index] if r.index >= 0 else ''} in place",
                fix="write x = x + 1 for x.add_(1) in the model, or pass a clone and let forward return what changed",
            )


def _warn_of_checkpointed(gm: fx.GraphModule, outputs: tuple[Role, ...]) -> None:
    """Eager runs a checkpointed region's forward again in backward, and changes its buffers again."""
    twice = [
        r.name
        for r, n in zip(outputs, _torch.results_of(gm.graph), strict=True)
        if r.kind == "buffer_update" and isinstance(n, fx.Node) and any(_torch.region_of(m)[0] is not None for m in (n, *n.all_input_nodes))
    ]
    if twice:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        warnings.warn(
            f"buffers {', '.join(map(repr, twice[:3]))}{more} are changed in a checkpointed region: eager changes them once more when the region runs again "
            "in backward (running statistics move twice a step); a compiled step changes them once",
            stacklevel=2,
        )


def _refuse_unknown(inputs: tuple[Role, ...], model: nn.Module, notes: _torch.Notes) -> None:
    for r in inputs:
        if r.kind == "buffer":
            try:
                tensor_named(model, r.name)
            except (AttributeError, AssertionError):
                raise CaptureError(
                    f"forward reads a tensor that is neither parameter, buffer nor attribute of a module: {said(notes.source_of(r.name))}",
                    fix="register it as a buffer (register_buffer(name, tensor, persistent=False)), also where it is in a list or a global variable",
                ) from None


def _keys(spec: Any) -> list[Any]:
    return list(spec.context) if spec.type is dict else []


def _role(d: Any, name: Callable[[str], str]) -> Role:
    kind, value = _torch.describe_io(d)
    if kind in ("param", "buffer", "grad", "buffer_update", "param_update"):
        return Role(kind, name(str(value)))
    return Role(kind, "", -1 if value is None else int(value))


@contextlib.contextmanager
def _explained(model: nn.Module, general: bool = False) -> Iterator[None]:
    """Turns dynamo's errors into one that shows the user's line and a way round. general: while a program for all sizes is captured, of which nothing is lost."""
    try:
        with _torch.failures_untold() if general else contextlib.nullcontext():
            yield
    except Exception as e:
        found = None if isinstance(e, CaptureError) else _torch.explain_capture_failure(e)
        if general:
            what, where = found or (f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}", "")
            raise NotGeneralError(what, where=where) from e
        if isinstance(e, CaptureError):
            raise
        if found is None:
            raise
        what, where = found
        raise CaptureError(
            f"{type(model).__name__} cannot be captured as one graph: {what}",
            where=where,
            fix="keep Python control flow and .item() off tensor values in forward (use torch.where or a constant), or move "
            "this part out of the model; for a Hugging Face model try another attn_implementation or experts_implementation",
        ) from e
