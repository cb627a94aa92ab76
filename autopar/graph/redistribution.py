"""From one placement of a tensor to another: the sequence of collectives, torch-free.

Digits of different axes are independent, so any set of axes can take part in one collective. The plan is greedy, cheapest
effect first: slice (free), reduce-scatter (Partial -> Shard, all axes of one reduction in one collective), all-to-all
(Shard -> Shard), all-reduce (Partial -> Replicate), all-gather (Shard -> Replicate). A move that would make two digits
overlap waits until the digit in its way is gone; if all wait, the digits in the way are gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement, Split


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
        w = mesh.sizes_product(self.axes)
        n_src = math.prod(self.src.local_shape(mesh)) * itemsize
        n_dst = math.prod(self.dst.local_shape(mesh)) * itemsize
        share = (w - 1) / w
        return {
            "slice": 0.0,
            "reduce_scatter": n_src * share,
            "all_to_all": n_src * share,
            "all_reduce": 2 * n_src * share,
            "all_gather": n_dst * share,
        }[self.kind]

    def permuted(self, order: tuple[int, ...]) -> Step:
        """The same of a tensor whose dim i is dim order[i] of this one."""
        return Step(self.kind, self.axes, self.src.permuted(order), self.dst.permuted(order), self.reduce)


def redistribute(src: Placement, dst: Placement, mesh: Mesh) -> list[Step]:
    """The steps from `src` to `dst`. `dst` may be Partial only where `src` is, with the same reduction."""
    assert src.shape == dst.shape, (src, dst)
    steps: list[Step] = []
    cur = src

    def take(kind: str, axes: list[str], nxt: Placement, reduce: str = "") -> None:
        nonlocal cur
        steps.append(Step(kind, mesh.sort(tuple(axes)), cur, nxt, reduce))
        cur = nxt

    if src == dst:
        return steps
    there = {a: dst.at(a) for a in mesh.names}
    wrong = list(mesh.names)
    while cur != dst:
        here = {a: cur.at(a) for a in wrong}
        wrong = [a for a in wrong if here[a] != there[a]]
        assert all(not isinstance(there[a], str) for a in wrong), f"cannot make a Partial: {src} -> {dst}"
        axes, nxt = _feasible(cur, dst, [a for a in wrong if here[a] is None], mesh)
        if axes:
            take("slice", axes, nxt)
            continue
        summed = [a for a in wrong if isinstance(here[a], str) and there[a] is not None]
        reductions = sorted({str(here[a]) for a in summed})
        for r in reductions:
            axes, nxt = _feasible(cur, dst, [a for a in summed if here[a] == r], mesh)
            if axes:
                take("reduce_scatter", axes, nxt, r)
                break
        else:
            moving = [a for a in wrong if isinstance(here[a], tuple) and there[a] is not None]
            axes, nxt = _feasible(cur, dst, moving, mesh, keep=True)
            if axes:
                take("all_to_all", axes, nxt)
                continue
            whole = [a for a in wrong if isinstance(here[a], str) and there[a] is None]
            if whole:
                r = str(here[whole[0]])
                axes = [a for a in whole if here[a] == r]
                take("all_reduce", axes, _without(cur, axes), r)
                continue
            axes = [a for a in wrong if isinstance(here[a], tuple) and there[a] is None] or moving
            if not axes:  # a Partial that must become a shard, with nothing in its way: reduce, then slice
                axes = summed[:1]
                take("all_reduce", axes, _without(cur, axes), str(here[axes[0]]))
                continue
            take("all_gather", axes, _without(cur, axes))
    return steps


def _without(p: Placement, axes: list[str]) -> Placement:
    for a in axes:
        p = p.with_axis(a, None)
    return p


def _feasible(cur: Placement, dst: Placement, axes: list[str], mesh: Mesh, keep: bool = False) -> tuple[list[str], Placement]:
    """The axes that can go to their place in `dst` now, and the placement then.

    keep: the digit they leave must not overlap the new one either (an all-to-all exposes both).
    """
    if not axes:
        return [], cur
    digits: dict[int, dict[str, tuple[int, int]]] = {}
    for x in cur.splits:
        digits.setdefault(x.dim, {})[x.axis] = x.stride, mesh.axis_size(x.axis)
    exposed = {dim: list(found.values()) for dim, found in digits.items()}
    left, reduced = {x.axis: x for x in cur.splits}, dict(cur.partial)
    done = []
    for a in axes:
        at = dst.at(a)
        assert at is None or isinstance(at, tuple)
        if at is not None:
            dim, new = at[0], (at[1], mesh.axis_size(a))
            if not _fit(cur.shape[dim], [*(d for x, d in digits.get(dim, {}).items() if x != a), new]):
                continue
            if keep and not _fit(cur.shape[dim], [*exposed.get(dim, ()), new]):
                continue
            exposed.setdefault(dim, []).append(new)
        old = left.pop(a, None)
        if old is not None:
            del digits[old.dim][a]
        reduced.pop(a, None)
        if at is not None:
            digits.setdefault(dim, {})[a] = new
            left[a] = Split(*at, a)
        done.append(a)
    if not done:
        return [], cur
    return done, Placement(cur.shape, tuple(sorted(left.values())), tuple(sorted(reduced.items())))


def _fit(size: int, digits: list[tuple[int, int]]) -> bool:
    """Whether digits (stride, width) of a dim of `size` divide it and do not overlap."""
    left = size
    for stride, width in sorted(digits, reverse=True):
        if stride < 1 or left % (stride * width):
            return False
        left = stride
    return True


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
