"""From one placement of a tensor to another: the sequence of collectives, torch-free.

Digits of different axes are independent, so any set of axes can take part in one collective. The plan is greedy, cheapest
effect first: slice (free), reduce-scatter (Partial -> Shard, all axes of one reduction in one collective), all-to-all
(Shard -> Shard), all-reduce (Partial -> Replicate), all-gather (Shard -> Replicate). A move that would make two digits
overlap waits until the digit in its way is gone; if all wait, the digits in the way are gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.graph.first_step import taken
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement


@dataclass(frozen=True)
class Step:
    """One collective (or local slice) over `axes` (mesh order), from placement `src` to `dst`.

    kind: "slice" | "reduce_scatter" | "all_to_all" | "all_reduce" | "all_gather"; reduce: "sum" | "max" | "min" | "".
    """

    kind: str
    axes: tuple[str, ...]
    src: Placement
    dst: Placement
    reduce: str = ""

    def wire_bytes(self, mesh: Mesh, itemsize: int) -> float:
        """Bytes a rank sends, ring algorithms: (W-1)/W of the whole for gather and scatter, twice that for all-reduce."""
        before, after = (math.prod(p.local_shape(mesh)) * itemsize for p in (self.src, self.dst))
        return sent_elements(self.kind, before, after, mesh.sizes_product(self.axes))

    def permuted(self, order: tuple[int, ...]) -> Step:
        """The same of a tensor whose dim i is dim order[i] of this one."""
        return Step(self.kind, self.axes, self.src.permuted(order), self.dst.permuted(order), self.reduce)


def sent_elements(kind: str, before: float, after: float, width: int) -> float:
    """What a rank of `width` sends that holds so many elements, or bytes, before and after."""
    if kind == "slice":
        return 0.0
    return (after if kind == "all_gather" else 2 * before if kind == "all_reduce" else before) * ((width - 1) / width)


def redistribute(src: Placement, dst: Placement, mesh: Mesh) -> list[Step]:
    """The steps from `src` to `dst`. `dst` may be Partial only where `src` is, with the same reduction."""
    assert src.shape == dst.shape, (src, dst)
    names = mesh.names
    steps: list[Step] = []
    for t in taken(src.on(names), dst.on(names), src.shape, mesh.widths):
        after = Placement.of(
            src.shape,
            {a: at for a, at in zip(names, t.after, strict=True) if isinstance(at, tuple)},
            {a: at for a, at in zip(names, t.after, strict=True) if isinstance(at, str)},
        )
        steps.append(Step(t.kind, tuple(names[i] for i in t.axes), steps[-1].dst if steps else src, after, t.reduce))
    return steps


def union_digits(src: Placement, dst: Placement, axes: list[str], mesh: Mesh) -> list[list[tuple[int, str, str]]] | None:
    """Per dim, major first, the digits of the local tensor cut at both placements: (size, kind, axis).

    kind "local": in both; "from": digit of an axis in `axes` in `src` (absent locally before the collective); "to": its digit in
    `dst`. Digits of axes that stay are in neither local tensor and left out. None if the cuts cross.
    """
    out = []
    for dim, size in enumerate(src.shape):
        marks: list[tuple[int, int, str, str]] = []
        for s in src.splits:
            if s.dim == dim:
                marks.append((s.stride, mesh.axis_size(s.axis), "from" if s.axis in axes else "stay", s.axis))
        for s in dst.splits:
            if s.dim == dim and s.axis in axes:
                marks.append((s.stride, mesh.axis_size(s.axis), "to", s.axis))
        marks.sort(reverse=True)
        digits: list[tuple[int, str, str]] = []
        left = size
        for stride, width, kind, axis in marks:
            if left % (stride * width):
                return None
            if left > stride * width:
                digits.append((left // (stride * width), "local", ""))
            if kind != "stay":
                digits.append((width, kind, axis))
            left = stride
        if left > 1:
            digits.append((left, "local", ""))
        out.append(digits)
    return out
