"""What a call returns: tensors as the caller knows them, and the loss, with the rest computed when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch import dtensor
from autopar.distributed.groups import Groups
from autopar.distributed.shards import cut, dtensor_placements
from autopar.errors import AutoparError
from autopar.graph.graph import Tensor
from autopar.graph.placement import Placement, shard
from autopar.planner.storage import batch_size
from autopar.runtime import sharded_output
from autopar.runtime.inputs import InputReader
from autopar.runtime.rows import Rows, rows_of
from autopar.runtime.step import Step

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class OutputGiver:
    """Between a step's local outputs and the caller's tensors.

    With global inputs every rank's caller has the whole of an output, the same on all; of a large one a tensor that behaves so (`ShardedOutput`). With local inputs a caller has its own samples of what has the batch as its
    dim 0, and a loss of its own: the step's is the mean of those, as in DDP.
    """

    def __init__(self, groups: Groups, reader: InputReader, device: torch.device) -> None:
        self.groups, self.reader, self.device = groups, reader, device

    def given(self, local: torch.Tensor, p: Placement, shapes: Shapes) -> torch.Tensor:
        """An output that is `local` where the plan has it, at `p`. shapes: of the call's tensors, whole. Collective."""
        return local if not local.dim() else self.moved(local, p, self.handed(p, shapes))

    def tangent(self, grad: torch.Tensor | None, step: Step, index: int) -> torch.Tensor:
        """What backward takes for output `index`, of which the caller has the gradient `grad`. Collective."""
        like = step.tangent_like(index)
        if grad is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        return self.taken(grad.to(self.device), step.plan.outputs[index], step.captured.input_shapes).to(like.dtype)

    def taken(self, grad: torch.Tensor, p: Placement, shapes: Shapes) -> torch.Tensor:
        """The caller's gradient of that output, local at `p`. Collective."""
        parts, mode = self.reader.parts, self.reader.mode
        if isinstance(grad, DTensor):
            there = grad.redistribute(self.groups.device_mesh, dtensor_placements(p, self.groups.mesh))
            return there.to_local()
        handed = self.handed(p, shapes)
        if mode == "local" and parts > 1 and p.shape:
            grad = grad / parts
            if not handed.splits:
                grad = self.groups.summed(grad, self.reader.data_axes)
        if handed.splits:
            return self.moved(grad, handed, p)
        return cut(grad, p, self.groups.mesh, self.groups.coordinates).contiguous()

    def handed(self, p: Placement, shapes: Shapes) -> Placement:
        """How the caller has an output that the plan has at `p`."""
        mine = self.reader.mode == "local" and self.reader.parts > 1 and p.shape
        batch = batch_size(tuple(Tensor("", s, "") for s, _ in shapes)) if mine else None
        if mine and p.shape[0] == batch:
            return shard(p.shape, 0, self.reader.data_axes, self.groups.mesh)
        rows = self.rows(p)
        return Placement.of(p.shape) if rows is None else rows.placement(p.shape)

    def rows(self, p: Placement) -> Rows | None:
        """How an output is dealt out that is too large to lie whole on every rank; None for others, and with local inputs."""
        is_large = self.reader.mode != "local" and len(p.shape) > 1 and math.prod(p.shape) >= sharded_output.LARGE
        return rows_of(p.shape, p, self.groups) if is_large else None

    def worn(self, output: torch.Tensor | None, p: Placement) -> torch.Tensor | None:
        """An output as the caller sees it."""
        rows = self.rows(p) if output is not None and output.dim() else None
        return output if output is None or rows is None else sharded_output.ShardedOutput.worn(output, rows)

    def moved(self, local: torch.Tensor, here: Placement, there: Placement) -> torch.Tensor:
        if here == there:
            return local
        mesh = self.groups.mesh
        whole = dtensor(local, self.groups.device_mesh, dtensor_placements(here, mesh), here.shape)
        found: torch.Tensor = whole.redistribute(placements=dtensor_placements(there, mesh)).to_local()
        return found


class NotComputedError(AutoparError, AttributeError, KeyError, IndexError):
    """A field of the model's output that was not computed with the loss, and no longer can be."""

    __str__ = AutoparError.__str__


class LossOutput(dict[str, Any]):
    """A call's output: the loss is there; what else the model returns is computed when it is first asked for.

    `.loss`, `["loss"]`, and `[0]` where the model's own output has that.
    """

    def __init__(self, loss: torch.Tensor, rest: Callable[[], Any]) -> None:
        super().__init__(loss=loss)
        self.__dict__["_rest"], self.__dict__["_all"] = rest, None

    def everything(self) -> Any:
        """The model's own output. Collective on first use."""
        if self.__dict__["_all"] is None:
            found = self.__dict__["_all"] = self.__dict__["_rest"]()
            self.__dict__["_rest"] = None
            if isinstance(found, dict):
                super().update({k: v for k, v in found.items() if k != "loss"})
        return self.__dict__["_all"]

    def __getattr__(self, name: str) -> Any:
        if name == "loss":
            return super().__getitem__("loss")
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.everything(), name)

    def __getitem__(self, key: Any) -> Any:
        if key in ("loss", 0):
            return super().__getitem__("loss")
        return self.everything()[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return super().__getitem__("loss") if key == "loss" else self.everything().get(key, default)

    def __contains__(self, key: object) -> bool:
        return key == "loss" or key in self.everything()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.everything())

    def __len__(self) -> int:
        return len(self.everything())

    def keys(self) -> Any:
        return self.everything().keys()

    def values(self) -> Any:
        return self.everything().values()

    def items(self) -> Any:
        return self.everything().items()

    def to_tuple(self) -> Any:
        return self.everything().to_tuple()
