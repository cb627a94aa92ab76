"""What a local lowering may ask: placements, coordinates, global indices, reductions over mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar._torch import collectives
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules.grammar import Rule


@dataclass(frozen=True)
class Part:
    """Where the samples of a micro-batch are in a tensor: in dim `dim`, with `right` elements of it to the right of their digit. samples: of the batch's `of`, which came
    in `parts`: a micro-batch has as many of each, in order."""

    dim: int
    right: int
    samples: int
    of: int
    parts: int

    def index(self, index: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Indices in the whole batch's tensor along `dim`. first: of a part's samples, the first of this micro-batch; 0-d."""
        sample, each = (index // self.right) % self.samples, self.samples // self.parts
        there = sample // each * (self.of // self.parts) + sample % each + first
        return (index // (self.right * self.samples) * self.of + there) * self.right + index % self.right


@dataclass(frozen=True)
class Local:
    """The surroundings of one op on one rank.

    strategy: axis -> (letter, stride within the letter). inputs/outputs: placements of the tensor operands in order
    (None for an output that is no tensor). op_index: position among the graph's random ops (for random numbers). part: of a micro-batch, where its samples are.
    """

    op: Op
    rule: Rule
    mesh: Mesh
    strategy: dict[str, tuple[str, int]]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    coordinate: Callable[[str], torch.Tensor]  # axis -> 0-d int64 tensor
    group: Callable[[tuple[str, ...]], str]  # axes (mesh order) -> name of the process group over them
    seed: Callable[
        [], torch.Tensor
    ]  # 1-d int64 tensor (seed, step): the counters of random ops; of a micro-batch (seed, step, its first sample)
    op_index: int = 0
    part: Part | None = None

    def axes(self, *letters: str) -> tuple[str, ...]:
        """The mesh axes that split any of `letters`, in mesh order."""
        return self.mesh.sort(tuple(a for a, (x, _) in self.strategy.items() if x in letters))

    def is_split(self, *letters: str) -> bool:
        return bool(self.axes(*letters))

    def local_shape(self, output: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        p = self.outputs[output]
        assert p is not None
        return p.local_shape(self.mesh)

    def index(self, placement: Placement, dim: int) -> torch.Tensor:
        """Global indices, int64 [local size], of this rank's elements along `dim`."""
        index = torch.zeros((), dtype=torch.int64)
        stride = placement.shape[dim]
        for size, axis in placement.digits(dim, self.mesh):
            stride //= size
            if axis is None:
                digit = torch.arange(size, dtype=torch.int64)
                index = (index.unsqueeze(-1) + digit * stride).reshape(-1)
            else:
                index = index + self.coordinate(axis) * stride
        return index if index.dim() else index.reshape(1)

    def linear_index(self, placement: Placement) -> torch.Tensor:
        """Global row-major element index, int64 of the local shape; in a micro-batch, that in the tensor of the whole batch."""
        shape, part = list(placement.shape), self.part
        if part is not None:
            shape[part.dim] = shape[part.dim] // part.samples * part.of
        out = torch.zeros((), dtype=torch.int64)
        stride = 1
        for dim in reversed(range(len(shape))):
            i = self.index(placement, dim)
            if part is not None and part.dim == dim:
                i = part.index(i, self.seed()[2])
            i = i * stride
            out = out + i.reshape((-1,) + (1,) * (len(shape) - 1 - dim))
            stride *= shape[dim]
        return out.reshape(placement.local_shape(self.mesh))

    def reduce(self, x: torch.Tensor, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
        """All-reduce of `x` over `axes` ("sum", "max", "min")."""
        axes = tuple(a for a in axes if self.mesh.axis_size(a) > 1)
        if not axes:
            return x
        reduced: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), op, self.group(axes)))
        return reduced
