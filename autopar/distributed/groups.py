"""Process groups over mesh axes, under names that are the same on every rank.

Every rank of the mesh must ask for the same axes in the same order (all apply one plan). Other ranks of the job need not take part. What has to be told
apart in the job's store goes by an id that the mesh's first rank draws: processes count differently that have done different things before.
"""

from __future__ import annotations

import atexit
import hashlib
import uuid
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.distributed import presence
from autopar.errors import MeshError
from autopar.graph.mesh import Mesh
from autopar.passes.sharding.groups import group_name

_all: weakref.WeakSet[Groups] = weakref.WeakSet()
_alone = [False]


def be_alone(alone: bool) -> None:
    """Whether groups that are made from here on are of ranks that are not there: this process compiles for them, and asks them nothing."""
    _alone[0] = alone


@atexit.register
def _let_go() -> None:
    """Ends the threads of destroyed groups while Python still runs.

    gloo's threads drop the tensors of a collective some time after it was awaited, and need Python for it. Where Python has begun to end by then the process
    aborts: "terminate called without an active exception" (torch 2.13; plain torch too: about half the runs of init_device_mesh, all_reduce,
    destroy_process_group). A group waits for its threads when the last reference to it goes.
    """
    presence.forget()
    for groups in list(_all):
        groups.made.clear()
        groups.known.clear()
        groups.world = None
        _torch.let_go_of_groups(groups.device_mesh)


def is_ours(device_mesh: DeviceMesh) -> bool:
    """Whether a model of ours is on this mesh."""
    return any(g.device_mesh == device_mesh for g in _all)


def prefix_of(ranks: list[int], axes: dict[str, int], device_type: str) -> str:
    """Of the names of a mesh's groups. The same in every run of a program: it is in the text of graphs, which are cached."""
    return "autopar." + hashlib.sha256(f"{ranks}{axes}{device_type}".encode()).hexdigest()[:8]


class Groups:
    """The groups of one device mesh.

    within: the mesh of a whole pipeline, of which `device_mesh` is one stage's part. Its ranks then agree, and fail, together (`ranks`, `rank`, `everyone`); graphs'
    collectives, coordinates and what tensors lie on are of the stage alone.
    """

    def __init__(self, device_mesh: DeviceMesh, within: DeviceMesh | None = None) -> None:
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
        self.device_mesh = device_mesh
        self.axes = {n: device_mesh.size(i) for i, n in enumerate(names)}
        self.mesh = Mesh.of(self.axes)
        self.whole = device_mesh if within is None else within
        self.here = [int(r) for r in device_mesh.mesh.flatten().tolist()]
        self.ranks = [int(r) for r in self.whole.mesh.flatten().tolist()]
        if self.ranks != sorted(self.ranks):
            raise MeshError("the mesh lists ranks out of order", where=f"mesh {self.ranks}", fix="use init_device_mesh, or ascending ranks")
        self.prefix = prefix_of(self.ranks, self.axes, device_mesh.device_type)
        self.made: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.known: dict[str, dist.ProcessGroup] = {}  # what graphs' collectives mean by a name
        self.world = dist.group.WORLD if dist.is_initialized() else None
        self.alone = _alone[0]
        self.talks = len(self.ranks) > 1 and not self.alone  # whether there is anybody to agree with
        self.steps = 0
        self._id = f"{self.prefix}.alone" if self.alone else ""
        _all.add(self)

    @property
    def compiling(self) -> list[int]:
        """Ranks that share what one of them compiles."""
        return self.here[:1] if self.alone else self.here

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors."""
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def id(self) -> str:
        """Of these groups alone, in all of the job's time, the same on every rank of the mesh."""
        self.meet()
        return self._id

    def meet(self) -> None:
        """Ranks tell each other who they are, and agree on the id. Collective on first use."""
        if self._id:
            return
        said = [(presence.this_process(), uuid.uuid4().hex[:16])]
        for axis in range(self.whole.ndim):
            if self.whole.size(axis) > 1:
                parts: list[list[tuple[presence.Process, str]]] = [[] for _ in range(self.whole.size(axis))]
                dist.all_gather_object(parts, said, group=self.whole.get_group(axis))
                said = [one for part in parts for one in part]
        presence.know(process for process, _ in said)
        drawn = next(text for process, text in said if process.rank == self.ranks[0])
        self._id = f"{self.prefix}.{drawn}"

    @property
    def rank(self) -> int:
        """This process's position among `ranks`."""
        return self.ranks.index(dist.get_rank()) if dist.is_initialized() else 0

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.here.index(dist.get_rank()) if dist.is_initialized() else 0)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all `ranks`; makes it on first use (collective)."""
        if self.whole is not self.device_mesh:
            return self.between(self.ranks, "everyone")
        axes = tuple(a.name for a in self.mesh.axes if a.size > 1)
        self.ensure(axes)
        return self.made[axes]

    def ensure(self, axes: tuple[str, ...]) -> str:
        """The name of the group over `axes`; makes it on first use (collective)."""
        name = group_name(self.prefix, axes)
        if axes in self.made:
            return name
        mine: dist.ProcessGroup | None = None
        on_cpu = self.device_mesh.device_type == "cpu"
        parents = [p for p in self.mesh.parents if self.mesh.children(p) == axes]
        if len(axes) == len([a for a in self.mesh.axes if a.size > 1]) and len(self.here) == dist.get_world_size():
            mine = dist.group.WORLD
        elif parents:
            mine = self.device_mesh.get_group(parents[0])
        else:
            ranks = next(ranks for g in self.mesh.groups(axes) if dist.get_rank() in (ranks := [self.here[i] for i in g]))
            mine = self._new(ranks, f"{'+'.join(axes)}.{ranks[0]}")
        assert mine is not None
        self.made[axes] = mine
        self.known[name] = _torch.orderly(name, mine, self.id) if on_cpu else mine
        _torch.alias_process_group(name, self.known[name])
        return name

    def between(self, ranks: list[int], name: str) -> dist.ProcessGroup:
        """The group of some ranks of the job, this one among them, by whose name graphs know nothing; makes it on first use (collective over them)."""
        key = ("between", name)
        if key not in self.made:
            whole = dist.group.WORLD
            is_whole = name == "everyone" and len(ranks) == dist.get_world_size()
            self.made[key] = whole if is_whole and whole is not None else self._new(ranks, f"{name}.{ranks[0]}")
        return self.made[key]

    def _new(self, ranks: list[int], name: str) -> dist.ProcessGroup:
        timeout = _torch.default_timeout(self.device_mesh.device_type)  # else torch takes its own, of half an hour
        group: dist.ProcessGroup = _torch.new_group(ranks, f"{self.id}.{name}", timeout)
        return group

    def summed(self, t: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """`t` added up over the ranks along `axes`. Collective."""
        wide = self.mesh.sort(tuple(a for a in axes if self.mesh.axis_size(a) > 1))
        if not wide:
            return t
        total: torch.Tensor = _torch.collectives.wait_tensor(_torch.collectives.all_reduce(t.contiguous(), "sum", self.ensure(wide)))
        return total

    def gathered(self, t: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """The parts of the ranks along `axes`, one behind the other along dim 0, in the ranks' order. Collective."""
        wide = self.mesh.sort(tuple(a for a in axes if self.mesh.axis_size(a) > 1))
        if not wide:
            return t.clone()
        n = self.mesh.sizes_product(wide)
        whole: torch.Tensor = _torch.collectives.wait_tensor(
            _torch.collectives.all_gather_into_tensor(t.contiguous(), n, self.ensure(wide))
        )
        return whole

    def bind(self) -> None:
        """From here on names mean these groups. Another model on a mesh with the same axes and ranks may have groups of its own under them."""
        if self.made and (dist.group.WORLD is not self.world or not all(map(_torch.is_open, self.made.values()))):
            raise MeshError(
                "the process groups that this model was compiled for are destroyed",
                where=f"mesh of {' x '.join(f'{n}={s}' for n, s in self.axes.items())}",
                fix="make a mesh after init_process_group, and call autopar.compile on it again",
            )
        for name, group in self.known.items():
            _torch.alias_process_group(name, group)
