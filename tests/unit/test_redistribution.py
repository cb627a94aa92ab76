"""Every redistribution between random placements moves exactly the right elements, on simulated ranks written with plain indexing."""

import itertools
import random

import pytest
import torch

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import redistribute, union_digits
from autopar.planner.formulation.least_shape import least_shape
from autopar.planner.formulation.names import hops, moved

MESHES = [{"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}]


def rank_index(p: Placement, mesh: Mesh, rank: int) -> tuple[torch.Tensor, ...]:
    """Global indices per dim that `rank` holds, straight from the definition: element i lives at coordinate (i // stride) % W."""
    c = mesh.coordinates(rank)
    out = []
    for dim, n in enumerate(p.shape):
        keep = [i for i in range(n) if all((i // s.stride) % mesh.axis_size(s.axis) == c[s.axis] for s in p.splits if s.dim == dim)]
        out.append(torch.tensor(keep))
    return tuple(out)


def random_placement(shape: tuple[int, ...], mesh: Mesh, rng: random.Random, partial: bool) -> Placement:
    p = Placement.of(shape)
    for a in rng.sample(mesh.names, len(mesh.names)):
        kind = rng.choice(["R", "S", "S", "P"] if partial else ["R", "S", "S"])
        if kind == "P":
            p = p.with_axis(a, "sum")
        elif kind == "S":
            dim = rng.randrange(len(shape))
            strides = [s for s in range(1, shape[dim] + 1) if p.with_axis(a, (dim, s)).is_valid(mesh)]
            if strides:
                p = p.with_axis(a, (dim, rng.choice(strides)))
    return p


def step_on_ranks(locals_, step, mesh):
    """A collective by its definition: assemble the group's part of the tensor, then cut it again."""
    out = {}
    for group in mesh.groups(step.axes):
        for r in group:
            if step.kind == "slice":
                whole = torch.full(step.src.shape, float("nan"), dtype=torch.float64)
                whole[torch.meshgrid(*rank_index(step.src, mesh, r), indexing="ij")] = locals_[r]
            else:
                whole = torch.full(step.src.shape, float("nan"), dtype=torch.float64)
                if step.reduce:
                    whole[torch.meshgrid(*rank_index(step.src, mesh, r), indexing="ij")] = sum(locals_[q] for q in group)
                else:
                    for q in group:
                        whole[torch.meshgrid(*rank_index(step.src, mesh, q), indexing="ij")] = locals_[q]
            out[r] = whole[torch.meshgrid(*rank_index(step.dst, mesh, r), indexing="ij")]
            assert not out[r].isnan().any(), f"{step.kind} needs elements the group does not hold"
    return out


@pytest.mark.parametrize("sizes", MESHES)
def test_random_redistributions(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(sizes)
    rng = random.Random(0)
    for _ in range(300):
        shape = tuple(rng.choice([1, 4, 6, 8, 12, 24]) for _ in range(rng.choice([1, 2, 3])))
        src, dst = random_placement(shape, mesh, rng, True), random_placement(shape, mesh, rng, False)
        full = torch.randn(shape, dtype=torch.float64)
        terms = {}
        locals_ = {}
        for r in range(mesh.size):
            key = tuple(mesh.coordinates(r)[a] for a in src.reductions)
            if key not in terms:
                terms[key] = (
                    torch.randn(shape, dtype=torch.float64)
                    if len(terms) + 1 < mesh.sizes_product(tuple(src.reductions))
                    else full - sum(terms.values(), torch.zeros(shape))
                )
            locals_[r] = terms[key][torch.meshgrid(*rank_index(src, mesh, r), indexing="ij")]
        for step in redistribute(src, dst, mesh):
            assert step.src.is_valid(mesh) and step.dst.is_valid(mesh)
            locals_ = step_on_ranks(locals_, step, mesh)
        for r in range(mesh.size):
            want = full[torch.meshgrid(*rank_index(dst, mesh, r), indexing="ij")]
            assert tuple(want.shape) == dst.local_shape(mesh)
            torch.testing.assert_close(locals_[r], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", MESHES)
def test_prices_are_those_of_the_least_shape(sizes: dict[str, int]) -> None:
    """What planning pays for a tensor's moves is asked of a smaller one, which many tensors share: by the same collectives, with as many bytes."""
    mesh, rng, smaller = Mesh.of(sizes), random.Random(1), 0
    for _ in range(40):
        shape = tuple(rng.choice([1, 4, 6, 8, 12, 24]) for _ in range(rng.choice([1, 2, 3])))
        places = [random_placement(shape, mesh, rng, True) for _ in range(5)]
        small, elements = least_shape(places)
        smaller += elements > 1
        for (src, a), (dst, b) in itertools.product(zip(places, small, strict=True), repeat=2):
            steps, found = moved(src, dst, mesh), hops(a, b, mesh)
            if steps is None or found is None:
                assert steps is found
                continue
            want = [(k, s.kind, s.axes, s.wire_bytes(mesh, 1)) for k, s in enumerate(steps, 1) if s.kind != "slice"]
            assert [(h.number, h.kind, h.axes) for h in found] == [w[:3] for w in want]
            assert [h.elements * elements for h in found] == pytest.approx([w[3] for w in want])
    assert smaller > 10


def test_one_collective_for_several_axes() -> None:
    mesh = Mesh.of({"a": 2, "b": 4})
    shape = (16, 8)
    full = Placement.of(shape, {}, dict.fromkeys(mesh.names, "sum"))
    one = Placement.of(shape, {"a": (0, 8), "b.0": (0, 4), "b.1": (0, 2)})
    assert [s.kind for s in redistribute(full, one, mesh)] == ["reduce_scatter"]
    assert [s.kind for s in redistribute(one, Placement.of(shape), mesh)] == ["all_gather"]
    other = Placement.of(shape, {"a": (1, 4), "b.0": (1, 2), "b.1": (1, 1)})
    assert [s.kind for s in redistribute(one, other, mesh)] == ["all_to_all"]
    assert [s.kind for s in redistribute(Placement.of(shape), one, mesh)] == ["slice"]
    assert [s.kind for s in redistribute(full, Placement.of(shape), mesh)] == ["all_reduce"]


def test_union_digits_cover_the_local_tensor() -> None:
    mesh = Mesh.of({"a": 2})
    src, dst = Placement.of((8,), {"a": (0, 4)}), Placement.of((8,), {"a": (0, 1)})
    digits = union_digits(src, dst, ["a"], mesh)
    assert digits == [[(2, "from", "a"), (2, "local", ""), (2, "to", "a")]]
    assert list(itertools.chain(*[[d[0] for d in dim] for dim in digits])) == [2, 2, 2]
