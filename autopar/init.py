"""Parameters become DTensors: `distribute` cuts those that exist, `materialize` makes those of a meta model, each as a shard.

`materialize` runs the model's own initialisers (constructor's `reset_parameters`, `init_weights`, Hugging Face's `_init_weights`) on
the meta tensors and records the operators they call. What was recorded is then run again with data:

- A parameter whose records are elementwise in-place operators and draws, on all of it or on a box of it (`weight[padding_idx].zero_()`),
  is computed on the rank's shard alone, in chunks. A draw is a function of (seed, parameter name, how many draws before, element):
  it does not depend on the mesh, the rank or the chunk.
- Any other parameter (`orthogonal_`: a QR of a temporary) is computed whole on the CPU from the records it depends on, then cut.
- An initialiser that needs values to go on (`.item()`) runs once more on real CPU tensors of its module alone; those are cut.

Whole values live for one parameter (or such a module) at a time. Buffers are replicated, and computed whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import _torch
from autopar.errors import AutoparError

Placements = Callable[[str, tuple[int, ...]], tuple[Placement, ...]]
Box = tuple[tuple[int, int, int], ...]  # (start, length, step) a dim

aten = torch.ops.aten
CHUNK_ELEMENTS = 1 << 16  # temporaries of a chunk stay in a core's cache
CUT_AT_ELEMENTS = 1 << 16  # a computed value larger than this is cut as soon as it is seen
DRAWS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float}
FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
# By age: what a constructor runs, then what a model runs over its parts.
INITIALISERS = ("_reset_parameters", "reset_parameters", "reset_buffers", "_init_weights", "init_weights")


# ---- shards ------------------------------------------------------------------------------------------------------


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """The part of a tensor that this rank holds: chunks of ceil(N / W), axis by axis, as DTensor cuts."""
    start, size = [0] * len(shape), list(shape)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            chunk = -(-size[p.dim] // mesh.size(axis))
            begin = min(chunk * mesh.get_local_rank(axis), size[p.dim])
            start[p.dim] += begin
            size[p.dim] = min(chunk, size[p.dim] - begin)
    return tuple((a, n, 1) for a, n in zip(start, size, strict=True))


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of `whole` in storage of its own, unless it is all of it."""
    part = whole[tuple(slice(a, a + n) for a, n, _ in box)]
    return part.contiguous() if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)


def _parameter(old: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    new = nn.Parameter(_torch.dtensor(local, mesh, placements, tuple(old.shape)), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


@dataclass
class Owned:
    """A parameter or buffer under its first name, and every (module, attribute) that holds it."""

    name: str
    tensor: torch.Tensor
    owners: list[tuple[nn.Module, str]]

    @property
    def is_param(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def set(self, value: torch.Tensor) -> None:
        for m, attr in self.owners:
            setattr(m, attr, value)  # not _parameters[attr]: recurrent layers keep a second list, which their __setattr__ updates


def _owned(module: nn.Module, prefix: str = "") -> list[Owned]:
    found: dict[int, Owned] = {}
    for path, m in module.named_modules(prefix=prefix):
        for attr, t in [*m._parameters.items(), *m._buffers.items()]:
            if t is not None:
                found.setdefault(id(t), Owned(f"{path}.{attr}" if path else attr, t, [])).owners.append((m, attr))
    return list(found.values())


def _of_first_rank(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The value the mesh's first rank has; written into `t` where it is contiguous."""
    t = t.contiguous()
    raw = t.reshape(-1).view(torch.uint8)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1 and raw.numel():
            dist.broadcast(raw, group=mesh.get_group(axis), group_src=0)
    return t


@torch.no_grad()
def distribute(module: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    """Real parameters become DTensors and buffers equal, with the values of the mesh's first rank, one tensor at a time."""
    kind = mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    every = _owned(module)
    while every:
        o = every.pop(0)
        if isinstance(o.tensor, DTensor):
            continue
        value = _of_first_rank(o.tensor.detach().to(device), mesh)
        if o.is_param:
            how = placements(o.name, tuple(value.shape))
            value = _parameter(o.tensor, _cut(value, local_box(value.shape, mesh, how)), mesh, how)
        o.set(value)


# ---- counter-based random numbers --------------------------------------------------------------------------------


def _bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """64 random bits an element: SplitMix64's finaliser on key + index * golden ratio (int64 arithmetic wraps)."""
    z = index * -7046029254386353131 + key
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _uniform(key: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1): as many leading bits as the dtype's significand holds."""
    n = 53 if dtype == torch.float64 else 24
    return ((_bits(key, index) >> (64 - n)) & ((1 << n) - 1)).to(dtype) * 2.0**-n


def _normal(key: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Box-Muller on the two halves of 64 bits; reaches 6.7 standard deviations."""
    z = _bits(key, index)
    radius = (((z >> 32) & 0xFFFFFFFF).to(dtype) + 0.5) * 2.0**-32
    angle = (z & 0xFFFFFFFF).to(dtype) * (2 * math.pi * 2.0**-32)
    return (-2 * radius.clamp_(max=1).log_()).sqrt_() * angle.cos_()


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that `func` (one of DRAWS) writes to the elements `index` of the tensor's storage."""
    names = {"normal_": ("mean", "std"), "uniform_": ("from", "to"), "bernoulli_": ("p",)}[func.overloadpacket.__name__]
    default = {"mean": 0.0, "std": 1.0, "from": 0.0, "to": 1.0, "p": 0.5}
    value = {n: default[n] for n in names} | {k: v for k, v in kwargs.items() if k in names} | dict(zip(names, args[1:], strict=False))
    real = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    if "std" in value:
        return _normal(key, index, real).mul_(value["std"]).add_(value["mean"]).to(dtype)
    u = _uniform(key, index, real)
    return ((u < value["p"]) if "p" in value else u.mul_(value["to"] - value["from"]).add_(value["from"])).to(dtype)


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big", signed=True) >> 1


# ---- recording ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """A value of which only this rank's shard was kept."""

    shard: torch.Tensor
    whole: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Record:
    """One operator call; reads and writes are storages. key seeds its draws."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[torch.Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    box: Box | None  # where in the target it writes, when that can be computed on a shard
    key: int


@dataclass
class Target:
    """A meta parameter or buffer. writes: its records since the last that overwrote all of it; None: must be computed whole."""

    owned: Owned
    writes: list[Record] | None = field(default_factory=list)
    covered: dict[Any, int] = field(default_factory=dict)
    draws: int = 0

    @property
    def is_initialised(self) -> bool:
        return sum(self.covered.values()) >= self.owned.tensor.numel()


def _storage(t: torch.Tensor) -> int:
    return StorageWeakRef(t.untyped_storage()).cdata


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [a for a in _torch.pytree.tree_leaves(trees) if isinstance(a, torch.Tensor)]


def _map_tensors(f: Callable[[Any], Any], tree: Any) -> Any:
    return _torch.pytree.tree_map_only((torch.Tensor, Local), f, tree)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operator mutates."""
    schema = func._schema.arguments
    given = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(schema)]
    return _tensors([v for a, v in given if a.alias_info is not None and a.alias_info.is_write])


def _is_elementwise(func: Any) -> bool:
    name = func.overloadpacket.__name__
    plain = getattr(aten, name.removesuffix("_"), None)
    if not name.endswith("_") or plain is None:
        return False
    return any(torch.Tag.pointwise in getattr(plain, o).tags for o in plain.overloads())


def _box(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """The box of the contiguous `base` that `view` (selects and slices of it) shows; None for other views."""
    if not base.is_contiguous() or view.dtype != base.dtype:
        return None
    if view.shape == base.shape and view.stride() == base.stride() and not view.storage_offset():
        return tuple((0, n, 1) for n in base.shape)
    starts, rest = [], view.storage_offset()
    for s in base.stride():
        first, rest = divmod(rest, s)
        starts.append(first)
    box, after = [(a, 1, 1) for a in starts], -1
    for n, s in zip(view.shape, view.stride(), strict=True):
        if n == 1:
            continue
        d = next((d for d, size in enumerate(base.shape) if size > 1 and base.stride(d) <= s), None)
        if d is None or d <= after or s % base.stride(d) or starts[d] + (n - 1) * (s // base.stride(d)) >= base.shape[d]:
            return None
        box[d], after = (starts[d], n, s // base.stride(d)), d
    return tuple(box)


class Recorder(TorchDispatchMode):
    """Records operators on meta tensors. Real tensors of the model are never written: they have their values."""

    def __init__(self, targets: list[Target], real: list[torch.Tensor], seed: int, cut: Callable[[Owned, torch.Tensor], Local]) -> None:
        super().__init__()
        self.targets = {_storage(t.owned.tensor): t for t in targets}
        self.real = {_storage(t) for t in real}
        self.seed, self.cut = seed, cut
        self.records: list[Record] = []
        self.recording, self.scope = True, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written, given = _written(func, args, kwargs), _tensors(args, kwargs)
        if any(_storage(t) in self.real for t in written):
            return written[0]
        is_meta = any(t.is_meta for t in given) or str(kwargs.get("device")) == "meta"
        if not is_meta or not self.recording:
            return func(*args, **kwargs)
        if any(not t.is_meta for t in written):
            raise NotImplementedError(f"{func} writes a meta tensor's values into a real one")
        kwargs.pop("generator", None)
        like = _map_tensors(lambda t: t if t.is_meta or not t.dim() else t.to("meta"), (args, kwargs))
        out = func(*like[0], **like[1])
        self.record(func, args, kwargs, written, _tensors(out))
        return out

    def record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> None:
        target = self.targets.get(_storage(written[0])) if written else None
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        base = target.owned.tensor if target else None
        key, box, whole = 0, None, False
        if is_draw:
            key = (
                _key(self.seed, target.owned.name, target.draws) if target else _key(self.seed, self.scope, "temporary", len(self.records))
            )
        if target is not None and base is not None:
            target.draws += is_draw
            view, others = written[0], _tensors(args[1:], kwargs)
            whole = view.numel() == base.numel()
            simple = func in DRAWS or func in FILLS or _is_elementwise(func)
            if simple and len(written) == 1 and not any(t.is_meta for t in others):
                box = _box(view, base)
                if box is None and whole and view.is_contiguous() and base.is_contiguous() and not any(t.dim() for t in others):
                    box = tuple((0, n, 1) for n in base.shape)
            if func is aten.copy_.default and box is not None and whole and args[1].numel() > CUT_AT_ELEMENTS:
                args = (args[0], self.cut(target.owned, args[1].expand(view.shape).to(base.dtype).reshape(base.shape)))
        # The program may change a tensor after it was read.
        args, kwargs = _map_tensors(lambda t: t if isinstance(t, Local) or t.is_meta else t.clone(), (args, kwargs))
        reads = frozenset(_storage(t) for t in _tensors(args, kwargs))
        r = Record(func, args, kwargs, tuple(outs), reads, frozenset(_storage(t) for t in [*written, *outs]), box, key)
        self.records.append(r)
        if target is None:
            return
        overwrites = is_draw or func in FILLS
        if overwrites and whole:
            target.writes = [] if box is not None else None
            target.covered = {}
        if overwrites:
            target.covered[(tuple(view.shape), view.stride(), view.storage_offset())] = view.numel()
        if box is None:
            target.writes = None
        elif target.writes is not None:
            target.writes.append(r)

    # ---- one initialiser -----------------------------------------------------------------------------------------

    def run(self, name: str, module: nn.Module, initialise: Callable[[], Any]) -> None:
        """Records `initialise`; when it asks for values, runs it on real tensors of `module` and keeps their shards."""
        self.scope = f"{name}.{getattr(initialise, '__name__', '')}"
        before = len(self.records), {s: (t.writes and [*t.writes], {**t.covered}, t.draws) for s, t in self.targets.items()}
        torch.default_generator.manual_seed(_key(self.seed, self.scope))
        try:
            with self:
                initialise()
            return
        except RuntimeError:
            del self.records[before[0] :]
            for s, (writes, covered, draws) in before[1].items():
                t = self.targets[s]
                t.writes, t.covered, t.draws = writes, covered, draws
        mine = [self.targets[_storage(o.tensor)] for o in _owned(module) if o.tensor.is_meta]
        real = {t.owned.name: self.whole(t) for t in mine}
        version = {n: v._version for n, v in real.items()}
        for t in mine:
            v = real[t.owned.name]
            t.owned.set(nn.Parameter(v, t.owned.tensor.requires_grad) if t.owned.is_param else v)
        self.recording = False
        torch.default_generator.manual_seed(_key(self.seed, self.scope))
        try:
            with self:
                initialise()
        finally:
            self.recording = True
            for t in mine:
                t.owned.set(t.owned.tensor)
        for t in mine:
            if real[t.owned.name]._version != version[t.owned.name]:
                local = self.cut(t.owned, real[t.owned.name])
                self.record(aten.copy_.default, (t.owned.tensor, local), {}, [t.owned.tensor], [])

    # ---- computing -----------------------------------------------------------------------------------------------

    def whole(self, target: Target) -> torch.Tensor:
        """The whole value on the CPU, from the records it depends on."""
        needed, chosen = {_storage(target.owned.tensor)}, []
        for r in reversed(self.records):
            if r.writes & needed:
                chosen.append(r)
                needed |= r.reads
        values: dict[int, torch.Tensor] = {}

        def value(t: Any) -> Any:
            if isinstance(t, Local):
                return t.whole()
            if not t.is_meta:
                return t
            if id(t) not in values:
                owner = self.targets.get(_storage(t))
                if owner is None:
                    raise AutoparError(
                        f"an initialiser reads a meta tensor that is neither parameter nor buffer, for {target.owned.name!r}",
                        fix="register it as a buffer, or build that module on a real device",
                    )
                base = owner.owned.tensor
                if t is base:
                    values[id(t)] = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
                else:
                    values[id(t)] = value(base).as_strided(t.size(), t.stride(), t.storage_offset())
            return values[id(t)]

        for r in reversed(chosen):
            args, kwargs = _map_tensors(value, (r.args, r.kwargs))
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
            if r.func in DRAWS:
                x = args[0]
                index = torch.arange(x.untyped_storage().nbytes() // x.element_size()).as_strided(x.size(), x.stride(), x.storage_offset())
                out = x.copy_(_draw(r.func, args, kwargs, r.key, index, x.dtype))
            else:
                torch.default_generator.manual_seed(r.key)
                out = r.func(*args, **kwargs)
            values.update((id(k), v) for k, v in zip(r.outs, _tensors(out), strict=True))
        return value(target.owned.tensor)


def _apply(r: Record, x: torch.Tensor, index: torch.Tensor, target: Target, at: slice) -> torch.Tensor:
    """The chunk `x` (elements `index` of the target, `at` of the local shard) after record `r`."""
    base, box = target.owned.tensor, r.box
    assert box is not None
    if isinstance(r.args[-1], Local):
        return x.copy_(r.args[-1].shard.view(-1)[at])
    everywhere = all(n == size for (_, n, _), size in zip(box, base.shape, strict=True))
    operands = [t for t in _tensors(r.args[1:], r.kwargs) if t.dim()]
    selected, where = slice(None), []
    if not everywhere or operands:
        # Coordinates in the box; steps and bounds decide which elements belong to it.
        inside = torch.ones_like(index, dtype=torch.bool)
        for (start, n, step), size, stride in zip(box, base.shape, base.stride(), strict=True):
            c = (index // stride) % size - start
            inside &= (c >= 0) & (c < n * step) & (c % step == 0)
            where.append(c // step)
        selected = inside.nonzero()[:, 0]
        where = [c[selected] for c in where]

    def operand(t: Any) -> Any:
        if not t.dim():
            return t
        spread = t.expand(r.outs[0].shape).reshape([n for _, n, _ in box]).to(x.device)
        return spread[tuple(where)]

    if r.func in DRAWS:
        x[selected] = _draw(r.func, r.args, r.kwargs, r.key, index[selected], x.dtype)
    else:
        args, kwargs = _map_tensors(operand, (r.args[1:], r.kwargs))
        x[selected] = r.func(x[selected], *args, **kwargs)
    return x


def _compute(target: Target, box: Box, device: torch.device) -> torch.Tensor:
    """The part `box` of a target whose writes are all elementwise, chunk by chunk."""
    base, writes = target.owned.tensor, target.writes
    assert writes is not None
    if len(writes) == 1 and isinstance(writes[0].args[-1], Local):
        return writes[0].args[-1].shard.to(device)
    out = torch.empty([n for _, n, _ in box], dtype=base.dtype, device=device)
    flat, row = out.view(-1), math.prod(out.shape[1:])
    dtype = torch.float32 if base.dtype in (torch.float16, torch.bfloat16) else base.dtype
    consecutive = all(n == size for (_, n, _), size in zip(box[1:], base.shape[1:], strict=True))
    for a in range(0, flat.numel(), CHUNK_ELEMENTS):
        b = min(a + CHUNK_ELEMENTS, flat.numel())
        index = torch.arange(a, b, device=device)
        if consecutive:
            index += box[0][0] * base.stride(0) if box else 0
        else:
            rest, index = index, torch.zeros_like(index)
            for d in reversed(range(base.dim())):
                index += (rest % out.shape[d] + box[d][0]) * base.stride(d)
                rest = rest // out.shape[d]
        x = torch.zeros(b - a, dtype=dtype, device=device)
        for w in writes:
            first, n, step = w.box[0] if w.box else (0, 1, 1)
            if not box or (first <= box[0][0] + (b - 1) // row and first + n * step > box[0][0] + a // row):
                x = _apply(w, x, index, target, slice(a, b))
        flat[a:b] = x
    return out


# ---- the model's initialisers ------------------------------------------------------------------------------------


def _trunc_normal_(tensor, mean, std, a, b, generator):  # type: ignore[no-untyped-def]
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
        for f in codes:
            scope: dict[str, Any] = {**vars(init)}
            exec(inspect.getsource(f).replace("tensor.is_meta", "False"), scope)
            f.__code__ = _trunc_normal_.__code__ if f is init.trunc_normal_ else scope[f.__name__].__code__
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
                yield lambda f=f: module.apply(f)


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
            if hasattr(m, "reset_lora_parameters"):
                for a, config in adapters.items():
                    run(name, m, lambda m=m, a=a, config=config: m.reset_lora_parameters(a, config.init_lora_weights))


def _initialise_hf(path: str, module: nn.Module, model: Any, run: Callable[[str, nn.Module, Callable[[], Any]], None]) -> None:
    """transformers' initialize_weights, one module at a time: parts first, each by the innermost model's rule."""
    for name, child in module.named_children():
        _initialise_hf(f"{path}.{name}" if path else name, child, child if _is_hf(child) else model, run)
    module._is_hf_initialized = False
    run(path, module, lambda: model._initialize_weights(module))


@torch.no_grad()
def materialize(module: nn.Module, mesh: DeviceMesh, placements: Placements, seed: int, device: torch.device) -> None:
    """Meta parameters become DTensors with initialised shards, meta buffers are rebuilt; what is real is distributed as it is."""
    for m in module.modules():
        if _is_hf(m):
            m.tie_weights()  # moving a model to meta unties its parameters
    every = _owned(module)
    real = [o.tensor for o in every if not o.tensor.is_meta]
    for t in real:
        t.copy_(_of_first_rank(t.to(device), mesh))

    def how(o: Owned) -> tuple[tuple[Placement, ...], Box]:
        shape = tuple(o.tensor.shape)
        p = placements(o.name, shape) if o.is_param else ()
        return p, local_box(shape, mesh, p)

    def cut(o: Owned, value: torch.Tensor) -> Local:
        p, box = how(o)
        shard = _cut(value.clone() if all(n == s for (_, n, _), s in zip(box, value.shape, strict=True)) else value, box)
        if not o.is_param:
            return Local(shard, lambda: shard)
        return Local(shard, lambda: _torch.dtensor(shard.to(device), mesh, p, tuple(value.shape)).full_tensor().cpu())

    targets = [Target(o) for o in every if o.tensor.is_meta]
    recorder = Recorder(targets, real, seed, cut)
    with torch.random.fork_rng(devices=[]), _initialisers_run_on_meta():
        _initialise("", module, recorder.run, False, set())
        lost = [t for t in targets if not t.is_initialised]
        if lost:
            raise _nobody_initialises(lost)
        aliases = {}
        for t in targets:
            p, box = how(t.owned)
            value = _compute(t, box, device) if t.writes is not None else _cut(recorder.whole(t), box).to(device)
            t.writes = None
            t.owned.set(_parameter(t.owned.tensor, value, mesh, p) if t.owned.is_param else value)
            aliases[_storage(t.owned.tensor)] = value
    for m in module.modules():
        for attr, v in vars(m).items():
            if isinstance(v, torch.Tensor) and v.is_meta and _storage(v) in aliases:
                m.__dict__[attr] = aliases[_storage(v)]
    distribute(module, mesh, placements)


def _nobody_initialises(lost: list[Target]) -> AutoparError:
    first = lost[0].owned
    kind, method = ("parameter", "reset_parameters") if first.is_param else ("buffer", "reset_buffers")
    owner = type(first.owners[0][0])
    more = f" (and {len(lost) - 1} more: {', '.join(t.owned.name for t in lost[1:6])})" if len(lost) > 1 else ""
    return AutoparError(
        f"{kind} {first.name!r} is on the meta device and nothing initialises it{more}",
        where=f"{owner.__module__}.{owner.__qualname__}",
        fix=f"give {owner.__name__} a method {method}() that fills it in place, or build this module on a real device",
    )
