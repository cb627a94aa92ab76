"""Checks an op's rule and local lowering on simulated ranks against the whole op on one device.

`check(op, args, kwargs)` tries every legal strategy of a call on a few small meshes: one axis on every letter at its
major, minor and middle digits, two axes on one letter and on two, and every `linear` set of inputs as Partial. Global
inputs are cut by their placements, the local lowering runs on every rank, the outputs are put together by theirs and must
equal what one device computes: to 1e-10 in float64, exactly for integers. What is replicated must agree on all ranks.

A rank is a plain call; a lowering that asks for a process group is run again under torch's LocalTensorMode, where
collectives have a meaning.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from autopar.graph.graph import Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.passes.local import apply
from autopar.passes.local.context import Local
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy, is_legal, placements
from tests.spmd.exchange import Exchanges, groups_over

MESHES = (Mesh.of({"a": 2}), Mesh.of({"a": 3}), Mesh.of({"a": 4}))
_WORLD = 240  # a multiple of every mesh's size: LocalTensorMode finds a group's siblings by its layout in the world


# --- tensors and their shards -----------------------------------------------------------------------------------


def indices(placement: Placement, dim: int, mesh: Mesh, at: dict[str, int]) -> torch.Tensor:
    """Global indices along `dim` at coordinates `at`: element i is at (i // stride) % W."""
    mine: Sequence[int] = range(placement.shape[dim])
    for s in placement.splits:
        if s.dim == dim:
            mine = [i for i in mine if (i // s.stride) % mesh.axis_size(s.axis) == at[s.axis]]
    return torch.tensor(list(mine), dtype=torch.int64)


def shard_of(tensor: torch.Tensor, placement: Placement, mesh: Mesh, at: dict[str, int]) -> torch.Tensor:
    """The piece at coordinates `at`; partial axes are not looked at."""
    for dim in range(tensor.dim()):
        tensor = tensor.index_select(dim, indices(placement, dim, mesh, at))
    return tensor.clone()


def terms(tensor: torch.Tensor, axes: Sequence[str], mesh: Mesh, generator: torch.Generator) -> dict[tuple[int, ...], torch.Tensor]:
    """Random terms for every combination of coordinates of `axes` that sum to `tensor`."""
    if not axes:
        return {(): tensor}
    out, rest = {}, tensor
    for i in range(mesh.axis_size(axes[0])):
        if i == mesh.axis_size(axes[0]) - 1:
            term = rest
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            term = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        else:
            assert tensor.dtype != torch.bool, "a Partial bool has no meaning"
            term = torch.randint(0, 5, tensor.shape, generator=generator).to(tensor.dtype)
        rest = rest - term
        out.update({(i, *k): v for k, v in terms(term, axes[1:], mesh, generator).items()})
    return out


def cut(tensor: torch.Tensor, placement: Placement, mesh: Mesh, generator: torch.Generator) -> list[torch.Tensor]:
    """Every rank's local tensor."""
    axes = list(placement.reductions)
    by_coordinate = terms(tensor, axes, mesh, generator)
    out = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        out.append(shard_of(by_coordinate[tuple(at[a] for a in axes)], placement, mesh, at))
    return out


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def unshard(locals_: Sequence[torch.Tensor], placement: Placement, mesh: Mesh) -> torch.Tensor:
    """The global tensor; raises AssertionError where replicas differ (sums of other terms: but for rounding)."""
    parts = {tuple(mesh.coordinates(r).items()): t for r, t in enumerate(locals_)}
    for axis, how in placement.partial:
        reduced: dict[tuple[tuple[str, int], ...], torch.Tensor] = {}
        for at, t in parts.items():
            key = tuple(kv for kv in at if kv[0] != axis)
            reduced[key] = _COMBINE[how](reduced[key], t) if key in reduced else t
        parts = reduced
    split = {s.axis for s in placement.splits}
    pieces: dict[tuple[tuple[str, int], ...], torch.Tensor] = {}
    for at, t in parts.items():
        key = tuple(kv for kv in at if kv[0] in split)
        if key in pieces:
            assert same(pieces[key], t, tolerance_of([t]) if placement.partial else 0.0), f"replicas differ: {placement}"
        pieces[key] = t
    out = torch.full(placement.shape, 0, dtype=locals_[0].dtype)
    for key, t in pieces.items():
        where = [indices(placement, d, mesh, dict(key)) for d in range(len(placement.shape))]
        expected = tuple(len(w) for w in where)
        assert tuple(t.shape) == expected, f"local shape {tuple(t.shape)}, not {expected}: {placement}"
        if where:
            out[torch.meshgrid(*where, indexing="ij")] = t
        else:
            out = t.clone()
    return out


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    if tolerance == 0.0:
        return bool(((got == want) | (got.isnan() & want.isnan())).all())
    finite = want[want.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def tolerance_of(tensors: Sequence[torch.Tensor | None]) -> float:
    """Of the coarsest float among them; a Partial's terms are rounded one by one."""
    floats = [t.dtype for t in tensors if t is not None and (t.dtype.is_floating_point or t.dtype.is_complex)]
    return max([1e-10, *(16 * torch.finfo(d).eps for d in floats if torch.finfo(d).bits < 64)])


# --- calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One aten call on whole tensors: the operator, its arguments, and what one device computes."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor | None, ...]
    op: Op
    tensors: tuple[torch.Tensor, ...]


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _outputs(result: Any) -> tuple[torch.Tensor | None, ...]:
    found = result if isinstance(result, (list, tuple)) else [result]
    return tuple(t if isinstance(t, torch.Tensor) else None for t in found)


def call(fn: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, reference: Callable[..., Any] | None = None) -> Call:
    """Runs `fn` (an OpOverload, or its name such as "aten.mm.default") on one device and describes the call."""
    if isinstance(fn, str):
        for part in fn.split("."):
            fn = getattr(torch.ops if isinstance(fn, str) else fn, part)
    with torch.no_grad():
        given, named = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), dict(kwargs or {})))
        outputs = tree_map_only(torch.Tensor, lambda t: t.resolve_conj().clone(), _outputs((reference or fn)(*given, **named)))
    tensors: list[torch.Tensor] = []

    def describe(t: torch.Tensor) -> Tensor:
        tensors.append(t)
        return Tensor(f"t{len(tensors) - 1}", tuple(t.shape), _dtype(t))

    args_, kwargs_ = _plain(_map_tensors(describe, given)), _plain(_map_tensors(describe, named))
    outs = tuple(None if t is None else Tensor(f"o{i}", tuple(t.shape), _dtype(t)) for i, t in enumerate(outputs))
    target = str(fn)
    return Call(fn, given, named, outputs, Op("op", target, args_, kwargs_, outs), tuple(tensors))


def _map_tensors(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    """In order of appearance."""
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_map_tensors(f, y) for y in x)
    if isinstance(x, dict):
        return {k: _map_tensors(f, v) for k, v in x.items()}
    return x


def _plain(x: Any) -> Any:
    """As the graph's description has them: tuples, dtypes by name, other things of torch as text."""
    if isinstance(x, (list, tuple)):
        return tuple(_plain(y) for y in x)
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return x if x is None or isinstance(x, (Tensor, bool, int, float, complex, str)) else str(x)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        if not func._schema.is_mutable:
            self.calls.append((func, *held))
        return func(*args, **kwargs)


def aten_calls(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None, backward: bool = False) -> list[Any]:
    """The functional aten calls that `fn` makes, with its backward if asked for: (operator, args, kwargs)."""
    recorder = _Recorder()
    with recorder:
        out = fn(*args, **(kwargs or {}))
        if backward:
            outs = [t for t in _outputs(out) if t is not None and t.requires_grad]
            if outs:
                torch.autograd.backward(outs, [torch.randn_like(t) for t in outs])
    return recorder.calls


# --- strategies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    strategy: dict[str, tuple[str, int]]
    partial: dict[str, frozenset[int]]


def _choices(rule: Rule, width: int) -> Iterator[tuple[str, int]]:
    """Letters and strides for an axis of `width`: major, minor and one digit in between."""
    for x, f in rule.factors.items():
        if x in rule.pairs and f.size != width:
            continue
        if f.split and f.size and f.size % width == 0:
            size = rule.factors[rule.pairs.get(x, x)].size
            strides = [s for s in range(1, size // width + 1) if size % (s * width) == 0]
            for s in dict.fromkeys((strides[-1], strides[0], strides[len(strides) // 2])):
                yield x, s


def trials(rule: Rule, mesh: Mesh, cap: int) -> list[Trial]:
    """Every assignment of the axes to letters, to a Partial, or to nothing; on several axes a fixed random choice of `cap`."""
    options: list[list[Any]] = [[*_choices(rule, a.size), *rule.linear, None] for a in mesh.axes]
    found = []
    for combo in itertools.product(*options):
        used = [c for c in combo if c is not None]
        if not used:
            continue
        pairs = list(zip(mesh.names, combo, strict=True))
        strategy = {a: c for a, c in pairs if isinstance(c, tuple)}
        if is_legal(rule, strategy, mesh):
            found.append((len(used), Trial(strategy, {a: c for a, c in pairs if isinstance(c, frozenset)})))
    single = [t for n, t in found if n == 1]
    several = [t for n, t in found if n > 1]
    random.Random(0).shuffle(several)
    # On several axes a single one leaves the others with replicas.
    return several[:cap] + single[: cap // 3] if len(mesh.axes) > 1 else single


# --- ranks ------------------------------------------------------------------------------------------------------


class _NeedsGroupError(Exception):
    """The lowering communicates."""


@contextlib.contextmanager
def world() -> Iterator[Callable[[Mesh, tuple[str, ...]], str]]:
    """A process group of fake ranks; gives the name of the group over mesh axes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    groups: dict[tuple[int, ...], str] = {}

    def name(mesh: Mesh, axes: tuple[str, ...]) -> str:
        assert _WORLD % mesh.size == 0
        ranks = tuple(mesh.groups(axes)[0])
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks)).group_name
        return groups[ranks]

    try:
        yield name
    finally:
        dist.destroy_process_group()


def run_ranks(
    c: Call, rule: Rule, mesh: Mesh, strategy: Strategy, inputs: Sequence[Placement], outputs: Sequence[Placement | None],
    pieces: Sequence[Sequence[torch.Tensor]],
) -> list[tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """Local outputs of every rank; `pieces[i][rank]` is the local tensor of input i."""

    def context(coordinate: Callable[[str], Any], group: Callable[[tuple[str, ...]], str]) -> Local:
        seed = torch.tensor([1, 2], dtype=torch.int64)
        return Local(c.op, rule, mesh, dict(strategy), tuple(inputs), tuple(outputs), coordinate, group, lambda: seed)

    def local_args(at: Callable[[int], Any]) -> tuple[Any, Any]:
        each = itertools.count()
        take = lambda _: at(next(each))  # noqa: E731
        return _map_tensors(take, c.args), _map_tensors(take, c.kwargs)

    def piece(rank: int, i: int) -> torch.Tensor:
        return pieces[i][rank].clone()

    def refuse(axes: tuple[str, ...]) -> str:
        raise _NeedsGroupError

    try:
        out = []
        for rank in range(mesh.size):
            at = {a: torch.tensor(i) for a, i in mesh.coordinates(rank).items()}
            args, kwargs = local_args(partial(piece, rank))
            out.append(_outputs(apply(context(at.__getitem__, refuse), c.fn, args, kwargs)))
        return out
    except _NeedsGroupError:
        pass
    ranks = range(mesh.size)
    axes_of: dict[str, tuple[str, ...]] = {}

    def named(axes: tuple[str, ...]) -> str:
        axes_of[found := name(mesh, axes)] = axes
        return found

    with world() as name, LocalTensorMode(mesh.size), Exchanges(lambda group: groups_over(axes_of[group], mesh)):
        at = {a: LocalTensor({r: torch.tensor(mesh.coordinates(r)[a]) for r in ranks}) for a in mesh.names}
        args, kwargs = local_args(lambda i: LocalTensor({r: pieces[i][r].clone() for r in ranks}))
        result = _outputs(apply(context(at.__getitem__, named), c.fn, args, kwargs))

    def on(t: Any, rank: int) -> Any:
        return t._local_tensors[rank] if isinstance(t, LocalTensor) else t

    return [tuple(on(t, r) for t in result) for r in ranks]


# --- the check --------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was tried. letters: those split in some trial."""

    rule: Rule
    trials: int = 0
    letters: set[str] = field(default_factory=set)
    partials: set[frozenset[int]] = field(default_factory=set)


class MismatchError(AssertionError):
    pass


def check_call(c: Call, meshes: Sequence[Mesh] = MESHES, cap: int = 24, values: bool = True) -> Report:
    rule = lookup(c.op)
    report = Report(rule)
    generator = torch.Generator().manual_seed(0)
    in_shapes = tuple(t.shape for t in c.op.inputs)
    out_shapes = tuple(None if t is None else t.shape for t in c.op.outputs)
    # Linear is meant of numbers: terms of x / 0 are infinities of both signs.
    finite = all(t is None or not t.dtype.is_floating_point or bool(t.isfinite().all()) for t in c.outputs)
    tolerance = tolerance_of([*c.tensors, *c.outputs])
    for mesh in meshes:
        for trial in trials(rule, mesh, cap):
            if trial.partial and values and not finite:
                continue
            ins, outs = placements(rule, trial.strategy, in_shapes, out_shapes, trial.partial)
            said = f"{c.op.target} {[tuple(t.shape) for t in c.op.inputs]} {_brief(c)} on {mesh.parents}: {trial.strategy} {trial.partial}"
            try:
                assert all(p.is_valid(mesh) for p in [*ins, *(o for o in outs if o is not None)]), "invalid placement"
                pieces = [cut(t, p, mesh, generator) for t, p in zip(c.tensors, ins, strict=True)]
                found = run_ranks(c, rule, mesh, trial.strategy, ins, outs, pieces)
                for i, (want, p) in enumerate(zip(c.outputs, outs, strict=True)):
                    if want is None or p is None:
                        continue
                    each = [t for r in found if (t := r[i]) is not None]
                    assert len(each) == len(found), f"output {i} is missing"
                    if values:
                        whole = unshard([t.resolve_conj() for t in each], p, mesh)
                        assert same(whole, want, tolerance), f"output {i}: {whole} is not {want}"
                    else:
                        local = p.local_shape(mesh)
                        assert all(t.shape == local and t.dtype == want.dtype for t in each), f"output {i}"
            except Exception as e:
                raise MismatchError(f"{said}\n  {[str(p) for p in ins]} -> {[str(p) for p in outs]}\n  {type(e).__name__}: {e}") from e
            report.trials += 1
            report.letters |= {x for x, _ in trial.strategy.values()}
            report.partials |= set(trial.partial.values())
    return report


def _brief(c: Call) -> str:
    return str([a for a in tree_map(lambda x: "T" if isinstance(x, torch.Tensor) else x, list(c.args))])


def check(
    fn: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    meshes: Sequence[Mesh] = MESHES,
    cap: int = 24,
    values: bool = True,
    reference: Callable[..., Any] | None = None,
) -> Report:
    """Checks one call of an operator. values=False: shapes alone (empty tensors). reference: what one device computes, if not
    the operator itself (random ops)."""
    return check_call(call(fn, args, kwargs, reference), meshes, cap, values)
