"""Parameters become DTensors: `distribute` cuts those that exist, `materialize` makes those of a meta model, each as a shard.

`materialize` runs the model's own initialisers (constructor's `reset_parameters`, `init_weights`, Hugging Face's `_init_weights`) on
the meta tensors, records the operators they call (see init_record.py), and runs what was recorded on each rank's shard. Whole values live
for one parameter at a time, and only where an initialiser is not elementwise. Buffers are replicated, and computed whole.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.init_record import Local, Recorder, Target, compute
from autopar.tensors.memory_format import laid, order_of
from autopar.tensors.owned import Box, Owned, cut_box, local_box, owned_by

Placements = Callable[[str, tuple[int, ...]], tuple[Placement, ...]]

# By age: what a constructor runs, then what a model runs over its parts.
INITIALISERS = ("_reset_parameters", "reset_parameters", "reset_buffers", "_init_weights", "init_weights")


def _parameter(old: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    new = nn.Parameter(_torch.dtensor(local, mesh, placements, tuple(old.shape), order_of(old)), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    _torch.set_hooks(new, _torch.hooks_of(old))
    return new


def _of_first_rank(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The value the mesh's first rank has; written into `t` where it lies in a format without gaps."""
    order = order_of(t)
    t = laid(t, order)
    raw = t.permute(order).reshape(-1).view(torch.uint8)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1 and raw.numel():
            dist.broadcast(raw, group=mesh.get_group(axis), group_src=0)
    return t


@torch.no_grad()
def distribute(module: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    """Real parameters become DTensors and buffers equal, with the values of the mesh's first rank, one tensor at a time."""
    kind = mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    every = owned_by(module)
    while every:
        o = every.pop(0)
        if isinstance(o.tensor, DTensor):
            continue
        value = _of_first_rank(o.tensor.detach().to(device), mesh)
        if o.is_param:
            how = placements(o.name, tuple(value.shape))
            value = _parameter(o.tensor, cut_box(value, local_box(value.shape, mesh, how)), mesh, how)
        o.set(value)


# ---- the model's initialisers ------------------------------------------------------------------------------------


def _trunc_normal_(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None) -> torch.Tensor:
    """Stands in for torch's, which rejects samples and so needs values: the inverse of the normal distribution's integral."""
    low, high = (math.erf((x - mean) / std / math.sqrt(2)) for x in (a, b))
    edge = 1 - 2.0**-24  # the last float32 whose inverse is finite
    low, high = max(min(low, edge), -edge), max(min(high, edge), -edge)
    with torch.no_grad():
        return tensor.uniform_(low, high, generator=generator).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


@contextlib.contextmanager
def _initialisers_run_on_meta() -> Iterator[None]:
    """torch's own initialisers return at once for meta tensors; here they do not, under whatever name they were imported."""
    init = torch.nn.init
    codes = {f: f.__code__ for f in (init.orthogonal_, init.sparse_, init.dirac_, init.trunc_normal_)}
    try:
        for f, code in codes.items():
            # Where they ask whether a tensor is meta, they ask whether it is sparse, which no parameter to be initialised is.
            names = tuple("is_sparse" if n == "is_meta" else n for n in code.co_names)
            f.__code__ = _trunc_normal_.__code__ if f is init.trunc_normal_ else code.replace(co_names=names)
        yield
    finally:
        for f, code in codes.items():
            f.__code__ = code


def _is_hf(module: nn.Module) -> bool:
    return hasattr(module, "_initialize_weights") and hasattr(module, "tie_weights")


def _own_initialisers(module: nn.Module) -> Iterator[Callable[[], Any]]:
    for name in INITIALISERS:
        f = getattr(module, name, None)
        if callable(f) and not isinstance(f, nn.Module):
            needed = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty and p.kind in (0, 1)]
            if not needed:
                yield f
            elif len(needed) == 1 and name.endswith("init_weights"):  # the idiom self.apply(self._init_weights)
                yield _applied(module, f)


# Lambdas: the name of what initialises is part of what its random numbers come from.
def _applied(module: nn.Module, f: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    return lambda: module.apply(f)


def _reset_adapter(module: Any, adapter: str, config: Any) -> Callable[[], Any]:
    return lambda: module.reset_lora_parameters(adapter, config.init_lora_weights)


def _initialise(
    path: str, module: nn.Module, run: Callable[[str, nn.Module, Callable[[], Any]], None], in_hf: bool, seen: set[int]
) -> None:
    """Parts before the whole, so that the whole has the last word; a Hugging Face model's rule comes after its parts' constructors."""
    seen.add(id(module))
    for name, child in module.named_children():
        if id(child) not in seen:
            _initialise(f"{path}.{name}" if path else name, child, run, in_hf or _is_hf(module), seen)
    if not _is_hf(module):
        for f in _own_initialisers(module):
            run(path, module, f)
    elif not in_hf:
        _initialise_hf(path, module, module, run)
        adapters = getattr(module, "peft_config", {})
        for name, m in module.named_modules(prefix=path):
            lora: Any = m
            if hasattr(lora, "reset_lora_parameters"):
                for a, config in adapters.items():
                    run(name, m, _reset_adapter(lora, a, config))


def _initialise_hf(path: str, module: nn.Module, model: Any, run: Callable[[str, nn.Module, Callable[[], Any]], None]) -> None:
    """transformers' initialize_weights, one module at a time: parts first, each by the innermost model's rule."""
    for name, child in module.named_children():
        _initialise_hf(f"{path}.{name}" if path else name, child, child if _is_hf(child) else model, run)
    marked: Any = module
    marked._is_hf_initialized = False
    run(path, module, lambda: model._initialize_weights(module))


def _untie(model: Any) -> None:
    """transformers ties after it initialises, so that the source's rule counts: until then the tied parameters are apart."""
    for name in model.get_expanded_tied_weights_keys(all_submodels=False):
        parent, _, attr = name.rpartition(".")
        owner = model.get_submodule(parent)
        t = owner._parameters.get(attr)
        if t is not None and t.is_meta:
            setattr(owner, attr, nn.Parameter(torch.empty_like(t), t.requires_grad))


@torch.no_grad()
def materialize(module: nn.Module, mesh: DeviceMesh, placements: Placements, seed: int, device: torch.device) -> None:
    """Meta parameters become DTensors with initialised shards, meta buffers are rebuilt; what is real is distributed as it is.

    The mesh's first rank's `seed` counts. Raises AutoparError for a parameter or buffer that nothing initialises.
    """
    tying: list[Any] = [m for m in module.modules() if hasattr(type(m), "tie_weights") and _is_hf(m)]  # not what only wraps such a model
    for m in tying:
        _untie(m)
    seed = int(_of_first_rank(torch.tensor([seed % 2**63], device=device), mesh))
    every = owned_by(module)
    real = [o.tensor for o in every if not o.tensor.is_meta]
    for x in real:
        x.copy_(_of_first_rank(x.to(device), mesh))

    def how(o: Owned) -> tuple[tuple[Placement, ...], Box]:
        shape = tuple(o.tensor.shape)
        p = placements(o.name, shape) if o.is_param else ()
        return p, local_box(shape, mesh, p)

    def cut(o: Owned, value: torch.Tensor) -> Local:
        p, box = how(o)
        shard = cut_box(value.clone() if all(n == s for (_, n, _), s in zip(box, value.shape, strict=True)) else value, box)
        if not o.is_param:
            return Local(shard, lambda: shard)
        return Local(shard, lambda: _torch.dtensor(shard.to(device), mesh, p, tuple(value.shape)).full_tensor().cpu())

    targets = [Target(o) for o in every if o.tensor.is_meta]
    recorder = Recorder(targets, real, seed, cut)
    with torch.random.fork_rng(devices=[]), _initialisers_run_on_meta():
        _initialise("", module, recorder.run, False, set())
        for m in tying:
            m.tie_weights()
        known, targets = {id(t.owned.tensor): t for t in targets}, []
        for o in owned_by(module):
            if o.tensor.is_meta:
                targets.append(known.get(id(o.tensor)) or recorder.adopt(o))
                targets[-1].owned.owners = o.owners
        lost = [t for t in targets if not t.is_initialised]
        if lost:
            raise _nobody_initialises(lost)
        aliases = {}
        for t in targets:
            p, box = how(t.owned)
            value = compute(t, box, device) if t.writes is not None else cut_box(recorder.whole(t), box).to(device)
            t.writes = None
            t.owned.set(_parameter(t.owned.tensor, value, mesh, p) if t.owned.is_param else value)
            aliases[_torch.storage_of(t.owned.tensor)] = value
    for m in module.modules():
        for attr, v in vars(m).items():
            if isinstance(v, torch.Tensor) and v.is_meta and _torch.storage_of(v) in aliases:
                m.__dict__[attr] = aliases[_torch.storage_of(v)]
    distribute(module, mesh, placements)


def _nobody_initialises(lost: list[Target]) -> AutoparError:
    first = lost[0].owned
    kind, method = ("parameter", "reset_parameters") if first.is_param else ("buffer", "reset_buffers")
    owner = type(first.owners[0][0])
    more = f" (and {len(lost) - 1} more: {', '.join(t.owned.name for t in lost[1:6])})" if len(lost) > 1 else ""
    return AutoparError(
        f"{kind} {first.name!r} is on the meta device and nothing initialises it{more}",
        where=f"{owner.__module__}.{owner.__qualname__}",
        fix=f"give {owner.__name__} a method {method}() that fills it in place, or put a real tensor in its place: what is real keeps its value",
    )
