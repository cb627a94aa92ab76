"""Which pieces go where when the layout changes: against sets of elements, counted one by one."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from autopar.elastic.boxes import ALIGNED, Box, Moves, Spec, common, elements, laid_out, missing, offsets, within
from autopar.elastic.protocol import Shard, partner, sources, stride_over, ward


def inside(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in box)))


def random_dims(draw: random.Random, shape: tuple[int, ...], axes: int) -> tuple[int | None, ...]:
    return tuple(draw.choice([None, *range(len(shape))]) for _ in range(axes))


def random_specs(draw: random.Random, axes: int, staged: bool) -> tuple[Spec, ...]:
    shapes = [tuple(draw.randrange(1, 7) for _ in range(draw.randrange(0, 4))) for _ in range(draw.randrange(1, 4))]
    specs = []
    for i, shape in enumerate(shapes):
        stages: Any = ()
        if staged and shape and draw.random() < 0.7:  # along the first axis, on one place or on both
            stages = 0, draw.choice([(0,), (1,), (0, 1)])
        specs.append(
            Spec(
                f"t{i}",
                shape,
                "float32",
                4,
                (None, *random_dims(draw, shape, axes - 1)) if stages else random_dims(draw, shape, axes),
                stages,
            )
        )
    return tuple(specs)


@pytest.mark.parametrize("seed", range(80))
def test_all_elements_arrive_once_and_no_more_than_must(seed: int) -> None:
    """n ranks lose one, on meshes of one to three axes, of which one may be a pipeline's: every new rank gets its part, each element from one place; what it gets from others is what it holds nowhere."""
    draw = random.Random(seed)
    olds = draw.choice([(2,), (3,), (5,), (2, 2), (3, 2), (1, 3), (2, 2, 2)])
    specs, n = random_specs(draw, len(olds), staged=len(olds) > 1 and olds[0] == 2), math.prod(olds)
    dead = draw.randrange(n)
    alive = [r for r in range(n) if r != dead]
    news = draw.choice([(len(alive),), (1, len(alive)), (len(alive), 1)])
    holds = [{Shard(0, 0, n, r), Shard(0, 0, n, ward(r, n))} for r in alive]
    source = sources((0, 0, n), holds, [Shard(0, 0, n, r) for r in alive])
    after = laid_out(specs, {s.name: (random_dims(draw, s.shape, len(news)), ()) for s in specs})
    moves = Moves(specs, olds, after, news, source)
    for new in range(len(alive)):
        got: dict[str, list[tuple[int, ...]]] = {s.name: [] for s in specs}
        sent: dict[str, set[tuple[int, ...]]] = {s.name: set() for s in specs}
        every = list(moves.to(new))
        assert sorted(map(repr, every)) == sorted(repr(m) for by in range(len(alive)) for m in moves.to(new, only=by))
        for m in every:
            assert m.by == source[m.old][new] and Shard(0, 0, n, m.old) in holds[m.by]
            assert inside(m.piece) <= inside(m.old_box) & inside(m.new_box)
            got[m.spec.name] += inside(m.piece)
            if m.by != new:
                sent[m.spec.name] |= inside(m.piece)
        for s, there in zip(specs, after, strict=True):
            boxes = [s.box(x.rank, olds) for x in holds[new]]
            assert missing(there.box(new, news), boxes) == len(sent[s.name])
            wanted = inside(there.box(new, news))
            assert sorted(got[s.name]) == sorted(wanted), (s, there)
            here = set().union(*(inside(s.box(x.rank, olds)) for x in holds[new]))
            assert sent[s.name] == wanted - here


@pytest.mark.parametrize("sizes", [(4,), (3,), (2, 2), (3, 2), (2, 1, 3)])
def test_chunks_are_those_of_dtensor(sizes: tuple[int, ...]) -> None:
    """Of every rank, for every way to lie, sizes that do not divide and dims that two axes cut among them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Cut
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    n = math.prod(sizes)
    for dims in itertools.product((None, 0, 1), repeat=len(sizes)):
        spec = Spec("t", (7, 3), "float32", 4, dims)
        for rank in range(n):
            at = [rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes)]
            how = [Replicate() if d is None else Cut(d) for d in dims]
            shape, offset = _compute_local_shape_and_global_offset((7, 3), sizes, lambda i, at=at: at[i], how)
            box = spec.box(rank, sizes)
            assert tuple(length for _, length in box) == tuple(shape)
            assert not elements(box) or tuple(start for start, _ in box) == tuple(offset)
    assert [elements(Spec("t", (4,), "float32", 4, (0,)).box(r, (3,))) for r in range(3)] == [2, 2, 0]


def test_common_and_within() -> None:
    assert common(((0, 4), (0, 3)), ((2, 5), (1, 1))) == ((2, 2), (1, 1))
    assert common(((0, 2),), ((2, 2),)) is None
    assert common((), ()) == ()
    assert within(((2, 2), (1, 1)), ((1, 5), (0, 3))) == (slice(1, 3), slice(1, 2))


def test_tensors_lie_aligned_and_apart() -> None:
    specs = (Spec("a", (3,), "float16", 2, (None,)), Spec("b", (), "float64", 8, (None,)), Spec("c", (5,), "float32", 4, (0,)))
    at, length = offsets(specs, 1, (2,))
    assert at == {"a": 0, "b": ALIGNED, "c": 2 * ALIGNED} and length == 3 * ALIGNED


def nodes_of(ranks: int) -> list[tuple[int, ...]]:
    """All ways to have so many ranks on nodes."""
    return [(n, *more) for n in range(1, ranks) for more in nodes_of(ranks - n)] + [(ranks,)] if ranks else [()]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_partners_are_on_other_nodes(ranks: int) -> None:
    """Of every rank, where no node has more than half of all; else of as many as can be. So whichever node is lost, its shards are elsewhere."""
    for sizes in nodes_of(ranks):
        nodes = [k for k, n in enumerate(sizes) for _ in range(n)]
        stride = stride_over(nodes)
        to = [partner(r, ranks, stride) for r in range(ranks)]
        assert sorted(to) == list(range(ranks)) and [ward(p, ranks, stride) for p in to] == list(range(ranks))
        elsewhere = sum(nodes[p] != nodes[r] for r, p in enumerate(to))
        assert elsewhere == min(ranks, 2 * (ranks - max(sizes))), (sizes, stride)
