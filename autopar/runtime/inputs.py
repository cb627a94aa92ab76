"""From what the user passes to what this rank's graph takes.

Local inputs come split over axes that stay the same for a module's life, since a sampler has dealt out the data by them. A plan may split the
batch over fewer: its parts are then gathered here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar import _torch
from autopar.capture.capture import Call, Shapes
from autopar.distributed.agreement import all_gathered, all_same
from autopar.distributed.groups import Groups
from autopar.distributed.shards import cut, dtensor_placements
from autopar.errors import InputError
from autopar.graph.graph import Tensor
from autopar.graph.placement import Placement, shard
from autopar.planner.storage import batch_size
from autopar.runtime.python_state import ATOMS
from autopar.tensors.memory_format import laid, order_of

_ALIKE = "ranks call the model alike, in the same mode and precision, and what forward reads of Python (attributes, hooks, globals) changes alike on all"
CHECKED_BATCHES = 3  # how many of the first batches ranks compare
SIZES_REMEMBERED = 4096


class UnequalSizesError(InputError):
    """Ranks were given local batches of other sizes."""


class InputReader:
    """mode "global": every rank passes the same whole batch; "local": each passes its part, in order of `data_rank`.

    data_axes: over which local inputs come split.
    """

    def __init__(self, groups: Groups, mode: str, data_axes: tuple[str, ...]) -> None:
        if mode not in ("global", "local"):
            raise InputError(f"inputs={mode!r} is not a mode", fix='use inputs="global" (the same batch on every rank) or inputs="local"')
        self.groups, self.mode, self.data_axes = groups, mode, data_axes
        self.left = CHECKED_BATCHES
        self.compared: set[Shapes] = set()
        self.parts = groups.mesh.sizes_product(data_axes)

    def global_shapes(self, call: Call) -> Shapes:
        shapes = [tuple(t.shape) for t in call.tensors]
        if self.mode == "local":
            batch = batch_size(tuple(Tensor("", s, "") for s, t in zip(shapes, call.tensors, strict=True) if not isinstance(t, DTensor)))
            shapes = [
                (s[0] * self.parts, *s[1:]) if s and s[0] == batch and not isinstance(t, DTensor) else s
                for s, t in zip(shapes, call.tensors, strict=True)
            ]
        return tuple((s, t.dtype) for s, t in zip(shapes, call.tensors, strict=True))

    def local(self, t: torch.Tensor, p: Placement, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of input `t`, which the plan places at `p`, in the format of the whole."""
        order = order_of(t)
        if isinstance(t, DTensor) and t.device_mesh != self.groups.device_mesh:
            t = _torch.dtensor(
                t.full_tensor(), self.groups.device_mesh, dtensor_placements(Placement.of(p.shape), self.groups.mesh), p.shape
            )
        if isinstance(t, DTensor):
            whole = t.detach()
            assert isinstance(whole, DTensor)
            t = whole.redistribute(self.groups.device_mesh, dtensor_placements(p, self.groups.mesh)).to_local()
        elif self.mode == "global":
            t = cut(t.detach(), p, self.groups.mesh, self.groups.coordinates)
        elif (came := self.arrival(t, p)) != p:
            t = self._dtensor(t.detach(), came).redistribute(placements=dtensor_placements(p, self.groups.mesh)).to_local()
        elif tuple(t.shape) != p.local_shape(self.groups.mesh):
            raise InputError(
                f"a local input of shape {tuple(t.shape)} does not make a whole batch that splits {self.parts} ways",
                fix="every rank must pass the same local batch size",
            )
        return laid(t.detach().to(device=device, dtype=dtype), order)

    def whole(self, t: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Input `t` of all ranks, of `shape`. Collective where inputs are local."""
        there, p = t.detach().to(device), Placement.of(shape)
        came = self.arrival(t, p)
        return there if self.mode == "global" or came == p else self._dtensor(there, came).full_tensor()

    def arrival(self, t: torch.Tensor, p: Placement) -> Placement:
        """How the local input `t` comes, of which the plan places the whole at `p`."""
        whole = tuple(t.shape) == p.shape
        return Placement.of(p.shape) if whole else shard(p.shape, 0, self.data_axes, self.groups.mesh)

    def returned(self, t: torch.Tensor, local: torch.Tensor, p: Placement) -> torch.Tensor:
        """What is `local` in the plan's placement `p`, such as a gradient, in the form that input `t` came in."""
        if isinstance(t, DTensor):
            if t.device_mesh != self.groups.device_mesh:
                return distribute_tensor(self._dtensor(local, p).full_tensor().to(t.dtype), t.device_mesh, t.placements, src_data_rank=None)
            return self._dtensor(local, p).redistribute(t.device_mesh, t.placements).to(t.dtype)
        if self.mode == "global":
            local = self._dtensor(local, p).full_tensor()
        elif (came := self.arrival(t, p)) != p:
            local = self._dtensor(local, p).redistribute(placements=dtensor_placements(came, self.groups.mesh)).to_local()
        return local.to(device=t.device, dtype=t.dtype)

    def _dtensor(self, local: torch.Tensor, p: Placement) -> DTensor:
        return _torch.dtensor(local, self.groups.device_mesh, dtensor_placements(p, self.groups.mesh), p.shape)

    def check_same(self, call: Call, shapes: Shapes, how: Sequence[object], why_new: Callable[[], str] | None) -> None:
        """Raises on every rank where ranks would not run one program: where sizes differ, or how they call, or only some capture anew. Of the first batches, and of those of
        sizes that are new, contents are compared, too (global). Collective.

        how: what a call's program depends on besides sizes. why_new: None where this rank has the program."""
        if not self.groups.talks:
            return
        atoms = tuple(x for x in call.constants if isinstance(x, ATOMS))
        digest = hashlib.blake2b(repr((shapes, atoms, *how)).encode(), digest_size=7).digest()
        same_call, same_program = all_same(self.groups, (int.from_bytes(digest, "big"), int(why_new is not None)))
        if same_call and not same_program:
            reasons = all_gathered(self.groups, None if why_new is None else why_new())
            new = next(r for r, why in zip(self.groups.ranks, reasons, strict=True) if why is not None)
            raise InputError(
                f"rank {new} has to capture this call anew, and others do not",
                where=next(why for why in reasons if why is not None),
                fix=_ALIKE,
            )
        if not same_call or why_new is not None or self.left > 0 or shapes not in self.compared:
            self._compare(call)
        if not same_call:
            said = [f"rank {r}: {x}" for r, x in zip(self.groups.ranks, all_gathered(self.groups, repr(how)), strict=True)]
            raise InputError("ranks do not call the model alike", where="; ".join(dict.fromkeys(said))[:400], fix=_ALIKE)
        self.left -= 1
        if len(self.compared) > SIZES_REMEMBERED:
            self.compared.clear()
        self.compared.add(shapes)

    def _compare(self, call: Call) -> None:
        mine = [(n, tuple(t.shape), f"{t.dtype} {order_of(t)}", self._digest(t)) for n, t in zip(call.paths, call.tensors, strict=True)]
        mine.append(("other arguments", (), "", repr(call.constants)))
        everyone = all_gathered(self.groups, mine)
        self._compare_stages(call)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                differ = next(
                    ((a, b) for a, b in zip(theirs, everyone[0], strict=False) if a != b), (("their number", (), ""), ("", (), ""))
                )
                name, mine_, first = differ[0][0], differ[0][1], differ[1][1]
                if self.mode == "local" and mine_ != first:
                    raise UnequalSizesError(
                        f"ranks 0 and {rank} were given local batches of other sizes: {list(first)} and {list(mine_)}",
                        where=f"input {name}",
                        fix="every rank passes as many samples, at least one (drop_last=True, or a sampler that fills up), and what is not tokens, "
                        "their masks and labels by the usual names is padded to one length before",
                    )
                raise InputError(
                    f"ranks 0 and {rank} were given different batches",
                    where=f"input {name}",
                    fix='with inputs="global" every rank passes the same whole batch (seed the loader alike); for a '
                    'DistributedSampler pass inputs="local" to autopar.compile',
                )

    def _compare_stages(self, call: Call) -> None:
        """In a pipeline, the ranks of one place in the stages' meshes pass the same samples: each stage makes masks and the like of them by itself. Collective."""
        if self.mode != "local" or self.groups.whole is self.groups.device_mesh:
            return
        digests = [_digest(t) for t in call.tensors if not isinstance(t, DTensor)]
        place = tuple(sorted(self.groups.coordinates.items()))
        first: dict[object, tuple[int, object]] = {}
        for rank, (there, theirs) in zip(self.groups.ranks, all_gathered(self.groups, (place, digests)), strict=True):
            other, expected = first.setdefault(there, (rank, theirs))
            if theirs != expected:
                raise InputError(
                    f"ranks {other} and {rank} have the same place in their stages of the pipeline, and were given different batches",
                    fix='with inputs="local" deal data out by the model\'s own numbers: DistributedSampler(data, num_replicas=model.data_world, rank=model.data_rank)',
                )

    def _digest(self, t: torch.Tensor) -> str:
        if self.mode == "local" or isinstance(t, DTensor):
            return ""
        return _digest(t)


def _digest(t: torch.Tensor) -> str:
    data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
