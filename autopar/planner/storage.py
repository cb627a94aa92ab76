"""Where parameters are stored, and which placements the user's mesh can express.

Storage is always a plain DTensor placement on the user's axes: one `Shard(dim)` or `Replicate` an axis, several axes on one dim in
mesh order. So `state_dict`, DCP and optimizers need to know nothing of autopar. Block permutations and splits over part of an axis
exist only in the compute copy. A dim 0 that does not divide is padded, as in FSDP2 (chunks of ceil(N / W)).
"""

from __future__ import annotations

import math
from collections import Counter

from autopar.graph.graph import Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.plan.decisions import ParamChoice
from autopar.planner.layout import Layout


def batch_size(inputs: tuple[Tensor, ...]) -> int | None:
    """The batch: the most common size of dim 0 among the inputs (the first among equals)."""
    sizes = Counter(t.shape[0] for t in inputs if t.shape)
    return sizes.most_common(1)[0][0] if sizes else None


def batch_placements(inputs: tuple[Tensor, ...], data: tuple[str, ...], mesh: Mesh) -> tuple[Placement, ...]:
    """Dim 0 of every input of the batch's size, split over the data axes as far as it divides."""
    batch = batch_size(inputs)
    out = []
    for t in inputs:
        where: dict[str, tuple[int, int]] = {}
        if t.shape and t.shape[0] == batch:
            left = t.shape[0]
            for a in data:
                if left and left % mesh.axis_size(a) == 0:
                    left //= mesh.axis_size(a)
                    where[a] = (0, left)
        out.append(Placement.of(t.shape, where))
    return tuple(out)


def plain_dim(p: Placement, parent: str, mesh: Mesh) -> int | None:
    """The dim that the whole user axis `parent` splits as DTensor's Shard(dim) would, else None."""
    where = p.where
    children = [c for c in mesh.children(parent) if mesh.axis_size(c) > 1]
    if not children or any(c not in where for c in children):
        return None
    dim = where[children[0]][0]
    on_dim = [s.axis for s in sorted(p.splits, reverse=True) if s.dim == dim]
    digits = p.digits(dim, mesh)
    major = [a for _, a in digits[: len(on_dim)]]
    if any(where[c][0] != dim for c in children) or None in major or tuple(major) != mesh.sort(tuple(on_dim)):
        return None
    return dim


def representable(p: Placement, mesh: Mesh) -> Placement:
    """`p` without the splits that DTensor placements on the user's axes cannot say."""
    for parent in reversed(list(mesh.parents)):
        if plain_dim(p, parent, mesh) is None:
            for c in mesh.children(parent):
                p = p.with_axis(c, None)
    return p


def param_choice(t: Tensor, compute: Placement, layout: Layout, mesh: Mesh, trainable: bool) -> ParamChoice:
    """Storage for a parameter that is computed with in placement `compute`."""
    where: dict[str, tuple[int, int]] = {}
    padded = t.shape
    axes = {p: [c for c in mesh.children(p) if mesh.axis_size(c) > 1] for p in mesh.parents if mesh.parents[p] > 1}
    # Experts are stored where they compute: nothing is gathered over such an axis.
    experts = [p for p, mine in axes.items() if all(c in layout.experts and c in compute.where for c in mine)]
    shard = [p for p, mine in axes.items() if p not in experts and any(c in layout.shard for c in mine)]
    tensor = [p for p, mine in axes.items() if p in experts or (p not in shard and any(c in layout.tensor for c in mine))]
    used: dict[int, list[str]] = {}
    for parent in tensor:
        dims = {compute.where[c][0] for c in mesh.children(parent) if c in compute.where}
        if len(dims) == 1 and t.numel and not (len(t.shape) == 1 and shard):
            (dim,) = dims
            if t.shape[dim] % math.prod(mesh.parents[p] for p in [*used.get(dim, []), parent]) == 0:
                used.setdefault(dim, []).append(parent)
    if shard and t.shape and t.numel:
        placed = False
        for dim in [d for d in range(len(t.shape)) if d not in used]:
            if t.shape[dim] % math.prod(mesh.parents[p] for p in shard) == 0:
                used[dim] = shard
                placed = True
                break
        if not placed and 0 not in used:
            even: list[str] = []
            for p in shard:
                if t.shape[0] % math.prod(mesh.parents[q] for q in [*even, p]) == 0:
                    even.append(p)
            if not even:
                widest = max(shard, key=lambda p: mesh.parents[p])
                even = [widest]
                padded = (-(-t.shape[0] // mesh.parents[widest]) * mesh.parents[widest], *t.shape[1:])
            used[0] = even
    for dim, parents in used.items():
        left = padded[dim]
        for c in mesh.sort(tuple(c for p in parents for c in mesh.children(p))):
            if mesh.axis_size(c) > 1:
                left //= mesh.axis_size(c)
                where[c] = (dim, left)
    return ParamChoice(t.shape, t.dtype, padded, Placement.of(padded, where), compute, trainable)
