"""A process that joins a run: what it does until it is let in, beside the others' training.

It starts the user's program from the beginning, in a process group of its own. When the model is compiled, that group gives way to one of as many ranks as the run may have, in which no other is
there: parameters are cut for it, a first batch goes through the loop's body, so that the step is captured and compiled, and steps of other sizes made ahead. Numbers mean nothing there. Then it goes
through its loader to where the members are, says that it is ready, and waits; it holds no shard of any version, and what it has is replaced by theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _torch
from autopar.distributed.agreement import DisagreementError
from autopar.distributed.groups import be_alone
from autopar.elastic import program, words
from autopar.elastic.member import Member
from autopar.elastic.meshes import axes_for
from autopar.errors import AutoparError, MeshError
from autopar.plan.plan import Plan

PAUSE_S = 0.02
WHERE = "autopar.compile, elastic="


@dataclass
class World:
    """The process group that the user's program made. backend, timeout_s: of the one that it joins; axes: of the mesh that the program asked for, as it is for one process."""

    backend: str = ""
    timeout_s: float = 0.0
    axes: dict[str, int] = field(default_factory=dict)


_world = World()


def joins() -> bool:
    """Whether this process was started to join."""
    return words.JOINS in os.environ


def timeout_of_groups_s() -> float:
    """Of the process group that there is; torch's own where its backend does not say."""
    timeout = _torch.default_timeout("cpu")
    return 1800.0 if timeout is None else timeout.total_seconds()


def asked_axes() -> dict[str, int] | None:
    """The mesh that the program asked for, where this process joins; the size of its first axis means nothing."""
    return _world.axes or None


def refuse_apart() -> None:
    """Raises AutoparError: a program that does not join would train beside the run, all by itself."""
    if joins():
        raise AutoparError(
            "this process was started to join an elastic run, and its program compiles a model without elastic=",
            where="autopar.compile",
            fix=program.FIX,
        )


def imagined_mesh(mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None) -> DeviceMesh:
    """A mesh of as many ranks as the run may have, whatever the size of the first axis that is given: the others do not exist. The process group that there was ends."""
    if not dist.is_initialized():
        dist.init_process_group()
    sizes = tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh.values()) if isinstance(mesh, Mapping) else mesh or (1,)
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    given = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else tuple(mesh) if isinstance(mesh, Mapping) else None
    names = given or (("dp", "tp")[: len(sizes)] if len(sizes) <= 2 else tuple(f"axis{i}" for i in range(len(sizes))))
    if isinstance(mesh, DeviceMesh) and len(sizes) > 1:
        raise MeshError(
            f"a device mesh of {len(sizes)} axes cannot be made by a process that is alone until it joins",
            where=WHERE,
            fix='pass the mesh as axes and sizes, such as {"dp": 4, "tp": 2}',
        )
    kind = (
        mesh.device_type
        if isinstance(mesh, DeviceMesh)
        else "cuda"
        if torch.cuda.is_available() and dist.get_backend() != "gloo"
        else "cpu"
    )
    _world.backend, _world.timeout_s = str(dist.get_backend()), timeout_of_groups_s()
    full = int(os.environ[words.FULL])
    _torch.leave_groups()
    _torch.imagined_world(full - 1, full)  # the last rank: what programs let the first one do, such as writing files, it shall not do
    be_alone(True)
    _world.axes = dict(zip(names, sizes, strict=True))
    axes = axes_for(_world.axes, full)
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


@dataclass
class Newcomer:
    """member: this process, which is none yet. rehearsed: whether a batch went through the loop; passes: through the data, that the program has begun."""

    member: Member
    backend: str = field(default_factory=lambda: _world.backend)
    timeout_s: float = field(default_factory=lambda: _world.timeout_s)
    rehearsed: bool = False
    passes: int = 0
    offered: bool = False

    def compare(self, what: str, mine: program.Texts) -> None:
        """Raises DisagreementError where the members have other texts. Waits until they have said theirs."""
        theirs = self._heard(words.program(what))
        self.checked(lambda: program.compare(theirs, mine))

    def compare_steps(self, mine: list[str]) -> None:
        """The same of what the steps compute: theirs may be more."""
        theirs = self._heard(words.program("steps"))

        def compare() -> None:
            for text in mine:
                if text not in theirs:
                    raise program.disagreement("the program", theirs[0], text)

        self.checked(compare)

    def checked(self, work: Callable[[], None]) -> None:
        """What makes that fail is not mended by another start: the supervisor is told."""
        try:
            work()
        except DisagreementError as e:
            words.write(self.member.store, words.unfit(self.member.worker), e.what)
            raise

    def plans(self) -> dict[int, Plan]:
        """That the members have made, by number of ranks. Waits for them."""
        return {int(n): Plan.loads(text) for n, text in self._heard(words.program("plans")).items()}

    def unfit(self, e: AutoparError) -> DisagreementError:
        """The error of a process whose step fails, as the members' does not: another start would not mend it."""
        words.write(self.member.store, words.unfit(self.member.worker), e.what)
        return DisagreementError(f"this process cannot join the run, whose step it cannot make: {e.what}", where=e.where, fix=program.FIX)

    def data(self) -> list[tuple[int, bool]]:
        """By pass through the data, the steps done before it, and whether it went to the loader's end."""
        return [(first, bool(whole)) for first, whole in self._heard(words.PASSES)]

    def version(self) -> int:
        """How many steps the members have done, or a few less."""
        said = [words.read(self.member.store, words.beat(w)) for w in self.member.members]
        return max((x[1] for x in said if x is not None), default=0)

    def offer(self, number: int) -> None:
        """Ready to be let in, in this pass."""
        if not self.offered:
            words.write(self.member.store, words.ready(self.member.worker), number)
            self.offered = True

    def withdraw(self) -> None:
        if self.offered:
            self.member.store.delete_key(words.ready(self.member.worker))
            self.offered = False

    def _heard(self, key: str) -> Any:
        while (found := words.read(self.member.store, key)) is None:
            self.member.refuse_stopped()
            time.sleep(PAUSE_S)
        return found
