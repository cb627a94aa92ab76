"""A model and its optimizer as a version of the state: what of it is this rank's alone, packed into one buffer in host memory, and what all ranks have alike."""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Placement as DPlacement
from torch.distributed.tensor import Shard as ShardOf
from torch.optim import Optimizer

from autopar import _torch
from autopar.distributed.agreement import all_gathered
from autopar.elastic.boxes import Box, Lies, Sizes, Spec, offsets
from autopar.errors import AutoparError
from autopar.planner.axes import PIPELINE
from autopar.runtime.module import ParallelModule
from autopar.runtime.stages import Pipeline
from autopar.tensors.memory_format import laid, order_of

Places = Mapping[str, tuple[DeviceMesh, tuple[DPlacement, ...]]]  # of parameters
COUNT = "count:"  # before the key of what an optimizer counts


class Stateful(Protocol):
    """A scheduler, a scaler, or whatever else counts along."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Alike:
    """What all ranks have alike of a version, in copies: buffers, the optimizer's counts and options, random counters, what the user passed besides."""

    buffers: dict[str, torch.Tensor]
    counts: dict[tuple[str, str], Any]  # (parameter, key) -> what is no sharded tensor of the optimizer's state
    options: list[dict[str, Any]]
    random: dict[str, int]
    others: list[dict[str, Any]]


@dataclass
class Packed:
    """A rank's part of the sharded tensors of a version. sizes: of the mesh; crc: of the buffer; 0 until it is known."""

    specs: tuple[Spec, ...]
    rank: int
    sizes: Sizes
    buffer: torch.Tensor
    crc: int = 0

    @property
    def whole(self) -> bool:
        return crc_of(self.buffer) == self.crc

    def views(self) -> dict[str, torch.Tensor]:
        """By tensor, the part in the buffer."""
        at, _ = offsets(self.specs, self.rank, self.sizes)
        return {s.name: _view(self.buffer, at[s.name], s, s.box(self.rank, self.sizes)) for s in self.specs}


def _view(buffer: torch.Tensor, at: int, s: Spec, box: Box) -> torch.Tensor:
    shape = tuple(n for _, n in box)
    length = torch.Size(shape).numel() * s.element_bytes
    return buffer[at : at + length].view(getattr(torch, s.dtype)).view(shape)


def crc_of(buffer: torch.Tensor) -> int:
    data: Any = buffer.numpy()
    return zlib.crc32(data) if buffer.numel() else 0


class State:
    """What of `model`, `optimizer` and `others` makes a version."""

    def __init__(self, model: ParallelModule, optimizer: Optimizer, others: Sequence[Stateful]) -> None:
        self.model, self.optimizer, self.others = model, optimizer, list(others)
        names = {id(p): n for n, p in self.parameters()}
        self._known, self._every = list[str](), tuple[Spec, ...]()  # in a pipeline: of what ranks have, and that of all
        self.names = {p: names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        strange = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in names]
        if strange:
            raise AutoparError(
                f"the optimizer steps {len(strange)} tensors that are no parameters of the model: they would not outlive a process",
                where=type(optimizer).__name__,
                fix="give the session an optimizer of model.parameters() alone",
            )
        missing = (set() if self.stages is None else self.stages.away & set(names.values())) - set(self.names.values())
        if missing:
            raise AutoparError(
                f"the optimizer has the parameters of this rank's stages alone, and without {sorted(missing)[0]!r} it cannot take over another's",
                where=type(optimizer).__name__,
                fix="make the optimizer before the first call of the model; leave example_inputs= out",
            )

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the model, on whatever stage they are: the module shows those of its own."""
        return self.model._builder.model.named_parameters()

    @property
    def sizes(self) -> Sizes:
        """Of the axes of the mesh that the model is on now, a pipeline's with them."""
        return tuple(self.model._builder.groups.whole.shape)

    @property
    def stages(self) -> Pipeline | None:
        """Where this rank has the tensors of its stages alone."""
        pipeline = self.model._builder.pipeline
        return pipeline if pipeline is not None and pipeline.placed else None

    def tensors(self) -> dict[str, tuple[torch.Tensor, str]]:
        """All of a version that this rank does not have like all others, by name, each with its parameter's name: parameters, and the optimizer's state of their shape; on the
        stages of a pipeline what the optimizer counts, too."""
        return self._tensors(frozenset() if self.stages is None else self.stages.away, self.stages is not None)

    def _tensors(self, away: frozenset[str], counts: bool) -> dict[str, tuple[torch.Tensor, str]]:
        out: dict[str, tuple[torch.Tensor, str]] = {}
        for n, p in self.parameters():
            assert isinstance(p, DTensor)
            if n not in away:
                out[f"parameter {n}"] = p, n
        for p, n in self.names.items():
            for key, value in sorted(self.optimizer.state.get(p, {}).items() if n not in away else ()):
                if isinstance(value, DTensor):
                    if value.shape != p.shape or value.placements != p.placements:
                        raise AutoparError(
                            f"the optimizer's state {key!r} does not lie as its parameter does, so it cannot be moved to another number of processes",
                            where=f"{type(self.optimizer).__name__}, {n}: {list(value.shape)} {value.placements} for {list(p.shape)} {p.placements}",
                            fix="use an optimizer whose state has the shape of its parameters, such as AdamW, or leave elastic= out",
                        )
                    out[f"{key} {n}"] = value, n
                elif counts and isinstance(value, torch.Tensor) and value.numel() == 1:
                    out[f"{COUNT}{key} {n}"] = value.reshape(1), n
                elif counts and value is not None:
                    raise AutoparError(
                        f"the optimizer's state {key!r} is neither a number in a tensor nor of its parameter's shape, so it cannot outlive a stage",
                        where=f"{type(self.optimizer).__name__}, {n}: {type(value).__name__}",
                        fix="use an optimizer such as AdamW, or a mesh without an axis pp",
                    )
        return out

    def is_split(self) -> bool:
        """Whether, on the mesh that the model is on now, any tensor has parts on other ranks that this one does not have."""
        builder = self.model._builder
        if builder.pipeline is not None and len(builder.pipeline.ranks) > 1:
            return True
        lie = (builder.lies(n, tuple(p.shape)) for n, p in self.parameters())
        return any(x.is_shard() and mesh.size(axis) > 1 for mesh, placements in lie for axis, x in enumerate(placements))

    def specs(self) -> tuple[Spec, ...]:
        """Of the tensors that any rank has, the same on all. Collective in a pipeline."""
        pipeline, mine = self.stages, self.tensors()
        if pipeline is None:
            return tuple(_spec(name, t, _dims(t, len(self.sizes))) for name, (t, _) in mine.items())
        specs = [_spec(name, t, *self._on_stages(_dims(t, len(self.sizes) - 1), n)) for name, (t, n) in mine.items()]
        groups = self.model._builder.groups
        known = all_gathered(groups, hashlib.sha256(repr(specs).encode()).hexdigest())
        if known != self._known:
            every = {s.name: s for theirs in all_gathered(groups, specs) for s in theirs}
            self._known, self._every = known, tuple(every[name] for name in sorted(every))
        return self._every

    def _on_stages(self, dims: tuple[int | None, ...], name: str) -> Lies:
        """How a tensor that belongs to parameter `name` lies on the whole mesh, that has `dims` on a stage's."""
        pipeline = self.stages
        if pipeline is None:
            return dims, ()
        axis = (self.model._builder.groups.whole.mesh_dim_names or ()).index(PIPELINE)
        return (*dims[:axis], None, *dims[axis:]), (axis, tuple(sorted({pipeline.lists.where[s] for s in pipeline.holders[name]})))

    def lies(self, specs: tuple[Spec, ...], places: Places) -> dict[str, Lies]:
        """How the tensors of a version are to lie on the mesh that the model is on now."""
        axes = len(self.sizes) - (self.stages is not None)
        out = {}
        for s in specs:
            key, n = s.name.split(" ", 1)
            out[s.name] = self._on_stages((None,) * axes if key.startswith(COUNT) else dims_of(places[n][1]), n)
        return out

    def new_mesh(self) -> None:
        """The model is on another one, with ranks that may not know what others knew."""
        self._known = []

    def pack_whole(self) -> Packed:
        """The same where each rank has all, however the model is to lie next."""
        tensors = self._tensors(frozenset(), False)
        specs = tuple(_spec(name, t, (None,) * len(self.sizes)) for name, (t, _) in tensors.items())
        return self._packed(specs, tensors, 0, (1,) * len(self.sizes), None)

    def pack(self, specs: tuple[Spec, ...], rank: int, sizes: Sizes, into: torch.Tensor | None = None) -> Packed:
        """Copies this rank's parts into host memory. specs: as `specs` says; sizes: of the mesh; into: a buffer to use again, where it has the length."""
        return self._packed(specs, self.tensors(), rank, sizes, into)

    @staticmethod
    def _packed(
        specs: tuple[Spec, ...], tensors: dict[str, tuple[torch.Tensor, str]], rank: int, sizes: Sizes, into: torch.Tensor | None
    ) -> Packed:
        _, length = offsets(specs, rank, sizes)
        if into is None or into.numel() != length:
            into = torch.zeros(length, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        packed = Packed(specs, rank, sizes, into)
        views = packed.views()
        with torch.no_grad():
            for name, (t, _) in tensors.items():
                views[name].copy_((_torch.local_tensor(t) if isinstance(t, DTensor) else t).detach())
        packed.crc = crc_of(into)
        return packed

    def alike(self) -> Alike:
        counts = {
            (n, key): copied(value)
            for p, n in self.names.items()
            for key, value in self.optimizer.state.get(p, {}).items()
            if not isinstance(value, DTensor)
        }
        options = [{k: copied(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
        return Alike(buffers, counts, options, self.model.rng_state(), [copy.deepcopy(o.state_dict()) for o in self.others])

    @torch.no_grad()
    def put(self, packed: Packed, places: Places) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors become what `packed` has, on the mesh that the model is on now. places: of parameters, there. Parameters stay the same objects. Returns what the optimizer counts, as
        far as that is in `packed`."""
        device = self.model._builder.device
        params = dict(self.parameters())
        by_name = {n: p for p, n in self.names.items()}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        counts: dict[tuple[str, str], torch.Tensor] = {}
        on_host = {s.name: s.on_host for s in packed.specs}
        stages, views = self.stages, packed.views()
        if stages is not None:
            for n in stages.away & params.keys():
                params[n].grad = None
                _torch.move_parameter(params[n], stages.nothing(params[n], places[n][1]))
        for name, part in views.items():
            key, n = name.split(" ", 1)
            if stages is not None and n in stages.away:
                continue
            if key.startswith(COUNT):
                counts[n, key.removeprefix(COUNT)] = part.reshape(()).to("cpu" if on_host[name] else device, copy=True)
                continue
            p = params[n]
            order = order_of(p)
            mesh, how = places[n]
            part = part if p.dim() else part.reshape(())
            there = _torch.dtensor(laid(part.to(device=device, copy=True), order), mesh, how, tuple(p.shape), order)
            if key == "parameter":
                p.grad = None
                _torch.move_parameter(p, there)
            else:
                moments.setdefault(n, {})[key] = there
        for n, p in by_name.items():
            self.optimizer.state.pop(p, None)
            if n in moments:
                self.optimizer.state[p].update(moments[n])
        return counts

    @torch.no_grad()
    def put_alike(self, alike: Alike) -> None:
        """After `put`."""
        for n, b in self.model.named_buffers():
            b.copy_(alike.buffers[n])
        by_name, away = {n: p for p, n in self.names.items()}, frozenset() if self.stages is None else self.stages.away
        for (n, key), value in ((k, v) for k, v in alike.counts.items() if k[0] not in away):
            is_away = isinstance(value, torch.Tensor) and value.device.type != "cpu"  # where another rank said it: on that one's device
            self.optimizer.state[by_name[n]][key] = value.to(self.model._builder.device, copy=True) if is_away else copied(value)
        for group, options in zip(self.optimizer.param_groups, alike.options, strict=True):
            group.update({k: copied(v) for k, v in options.items()})
        self.model._seed, self.model._calls = alike.random["seed"], alike.random["step"]
        for other, state in zip(self.others, alike.others, strict=True):
            other.load_state_dict(copy.deepcopy(state))


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def dims_of(placements: Sequence[DPlacement]) -> tuple[int | None, ...]:
    """By axis of the mesh, the dim that it splits."""
    assert all(isinstance(p, (ShardOf, Replicate)) for p in placements), placements
    return tuple(p.dim if isinstance(p, ShardOf) else None for p in placements)


def _dims(t: torch.Tensor, axes: int) -> tuple[int | None, ...]:
    return dims_of(t.placements) if isinstance(t, DTensor) else (None,) * axes


def _spec(name: str, t: torch.Tensor, dims: tuple[int | None, ...], stages: tuple[int, tuple[int, ...]] | tuple[()] = ()) -> Spec:
    """A tensor of no dims is one of one number: a rank may have none of that."""
    return Spec(name, tuple(t.shape) or (1,), str(t.dtype).removeprefix("torch."), t.element_size(), dims, stages, t.device.type == "cpu")
