"""Initialisers recorded on meta tensors, and run again on a shard.

- A tensor whose records are elementwise in-place operators and draws, on all of it or on a box of it (`weight[padding_idx].zero_()`),
  is computed on a box (a rank's shard) alone, in chunks. A draw is a function of (seed, parameter name, how many draws before, element):
  it does not depend on the mesh, the rank or the chunk.
- Any other (`orthogonal_`: a QR of a temporary) is computed whole on the CPU from the records it depends on.
- An initialiser that needs values to go on (`.item()`) runs once more on real CPU tensors of its module alone.

Draws come from SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) under a 64-bit key for each draw
of each tensor: of ten thousand keys two are equal with probability 3e-12, where 32 bits would give 1e-2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar import _torch
from autopar.errors import AutoparError
from autopar.tensors.owned import Box, Owned, owned_by

aten = torch.ops.aten
# On a CPU a chunk's temporaries stay in a core's cache and below the size from which malloc's heap breaks into pieces between shards: with four
# times as many elements the resident memory peaks at 1.2 to 1.4 times the shards, with these at 1.05. Elsewhere launches cost more than memory.
CPU_CHUNK_ELEMENTS, CHUNK_ELEMENTS = 1 << 14, 1 << 22
CUT_AT_ELEMENTS = 1 << 16  # a computed value larger than this is cut as soon as it is seen
DRAWS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float}
FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}


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
    starts: list[int] = []
    rest = int(view.storage_offset())
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


class Recorder(_torch.TorchDispatchMode):
    """Records operators on meta tensors. Real tensors of the model are never written: they have their values."""

    def __init__(self, targets: list[Target], real: list[torch.Tensor], seed: int, cut: Callable[[Owned, torch.Tensor], Local]) -> None:
        super().__init__()
        self.targets = {_torch.storage_of(t.owned.tensor): t for t in targets}
        self.real = {_torch.storage_of(t) for t in real}
        self.seed, self.cut = seed, cut
        self.records: list[Record] = []
        self.recording, self.scope = True, ""
        self.touched: set[int] = set()  # storages written while not recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written, given = _written(func, args, kwargs), _tensors(args, kwargs)
        if any(_torch.storage_of(t) in self.real for t in written):
            return written[0]
        if not self.recording:
            self.touched.update(_torch.storage_of(t) for t in written)
            return func(*args, **kwargs)
        is_meta = any(t.is_meta for t in given) or str(kwargs.get("device")) == "meta"
        if not is_meta:
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
        target = self.targets.get(_torch.storage_of(written[0])) if written else None
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
            if func is aten.copy_.default and box is not None and whole and others and others[0].numel() > CUT_AT_ELEMENTS:
                args = (args[0], self.cut(target.owned, args[1].expand(view.shape).to(base.dtype).reshape(base.shape)))
        # The program may change a tensor after it was read.
        args, kwargs = _map_tensors(lambda t: t if isinstance(t, Local) or t.is_meta else t.clone(), (args, kwargs))
        reads = frozenset(_torch.storage_of(t) for t in _tensors(args, kwargs))
        r = Record(func, args, kwargs, tuple(outs), reads, frozenset(_torch.storage_of(t) for t in [*written, *outs]), box, key)
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
        mine = [self.targets[_torch.storage_of(o.tensor)] for o in owned_by(module) if o.tensor.is_meta]
        real = {t.owned.name: self.whole(t) for t in mine}
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
            owner, attr = t.owned.owners[0]
            value = getattr(owner, attr).detach()
            t.owned.set(t.owned.tensor)
            storage = _torch.storage_of(value)
            if storage in self.touched or storage != _torch.storage_of(real[t.owned.name]):  # written in place, or another tensor
                self.record(aten.copy_.default, (t.owned.tensor, self.cut(t.owned, value)), {}, [t.owned.tensor], [])
        self.touched.clear()

    def adopt(self, owned: Owned) -> Target:
        """A meta tensor that an initialiser put in the place of another one."""
        storage = _torch.storage_of(owned.tensor)
        made = any(storage in r.writes for r in self.records)
        self.targets[storage] = Target(owned, writes=None, covered={"made": owned.tensor.numel()} if made else {})
        return self.targets[storage]

    # ---- computing -----------------------------------------------------------------------------------------------

    def whole(self, target: Target) -> torch.Tensor:
        """The whole value on the CPU, from the records it depends on."""
        needed, chosen = {_torch.storage_of(target.owned.tensor)}, []
        for r in reversed(self.records):
            if r.writes & needed:
                chosen.append(r)
                needed |= r.reads
        values: dict[int, torch.Tensor] = {}
        roots: dict[int, torch.Tensor] = {}  # the first value in every storage

        def value(t: Any) -> Any:
            if isinstance(t, Local):
                return t.whole()
            if not t.is_meta:
                return t
            if id(t) not in values:
                storage = _torch.storage_of(t)
                if storage not in roots:
                    if storage not in self.targets:
                        raise AutoparError(
                            f"an initialiser reads a meta tensor that is neither parameter nor buffer, for {target.owned.name!r}",
                            fix="register it as a buffer, or build that module on a real device",
                        )
                    base = self.targets[storage].owned.tensor
                    roots[storage] = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype)
                values[id(t)] = roots[storage].as_strided(t.size(), t.stride(), t.storage_offset())
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
            for k, v in zip(r.outs, _tensors(out), strict=True):
                values[id(k)] = v
                roots.setdefault(_torch.storage_of(k), v)
        whole: torch.Tensor = value(target.owned.tensor)
        return whole


def _apply(r: Record, x: torch.Tensor, index: torch.Tensor, target: Target, at: slice) -> torch.Tensor:
    """The chunk `x` (elements `index` of the target, `at` of the local shard) after record `r`."""
    base, box = target.owned.tensor, r.box
    assert box is not None
    if isinstance(r.args[-1], Local):
        return x.copy_(r.args[-1].shard.view(-1)[at])
    everywhere = all(n == size for (_, n, _), size in zip(box, base.shape, strict=True))
    operands = [t for t in _tensors(r.args[1:], r.kwargs) if t.dim()]
    selected: slice | torch.Tensor = slice(None)
    where: list[torch.Tensor] = []
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


def compute(target: Target, box: Box, device: torch.device) -> torch.Tensor:
    """The part `box` of a target whose writes are all elementwise, chunk by chunk."""
    base, writes = target.owned.tensor, target.writes
    assert writes is not None
    if len(writes) == 1 and isinstance(writes[0].args[-1], Local):
        return writes[0].args[-1].shard.to(device)
    out = torch.empty([n for _, n, _ in box], dtype=base.dtype, device=device)
    flat, row = out.view(-1), math.prod(out.shape[1:])
    dtype = torch.float32 if base.dtype in (torch.float16, torch.bfloat16) else base.dtype
    consecutive = all(n == size for (_, n, _), size in zip(box[1:], base.shape[1:], strict=True))
    chunk = CPU_CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS
    for a in range(0, flat.numel(), chunk):
        b = min(a + chunk, flat.numel())
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
