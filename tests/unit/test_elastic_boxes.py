"""Which pieces go where when the layout changes: against sets of elements, counted one by one."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.elastic.boxes import ALIGNED, Box, Spec, common, elements, moves, offsets, within
from autopar.elastic.protocol import Shard, partner, sources, stride_over, ward


def inside(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in box)))


def random_specs(draw: random.Random) -> tuple[Spec, ...]:
    out = []
    for i in range(draw.randrange(1, 4)):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(0, 4)))
        dim = draw.choice([None, *range(len(shape))]) if shape else None
        out.append(Spec(f"t{i}", shape, "float32", 4, dim))
    return tuple(out)


@pytest.mark.parametrize("seed", range(40))
def test_all_elements_arrive_once_and_no_more_than_must(seed: int) -> None:
    """n ranks lose one: every new rank gets its part, each element from one place; what it gets from others is what it holds nowhere."""
    draw = random.Random(seed)
    specs, n = random_specs(draw), draw.randrange(2, 6)
    dead = draw.randrange(n)
    alive = [r for r in range(n) if r != dead]
    holds = [{Shard(0, 0, n, r), Shard(0, 0, n, ward(r, n))} for r in alive]
    source = sources((0, 0, n), holds, [Shard(0, 0, n, r) for r in alive])
    dims = {s.name: draw.choice([None, *range(len(s.shape))]) if s.shape else None for s in specs}
    for new, mine in enumerate(alive):
        got: dict[str, list[tuple[int, ...]]] = {s.name: [] for s in specs}
        sent: dict[str, set[tuple[int, ...]]] = {s.name: set() for s in specs}
        for old in range(n):
            by = source[old][new]
            assert Shard(0, 0, n, old) in holds[by]
            for m in moves(specs, dims, old, n, new, len(alive), mine):
                assert inside(m.piece) <= inside(m.old_box) & inside(m.new_box)
                got[m.spec.name] += inside(m.piece)
                if by != new:
                    sent[m.spec.name] |= inside(m.piece)
        for s in specs:
            wanted = inside(Spec(s.name, s.shape, s.dtype, 4, dims[s.name]).box(new, len(alive)))
            assert sorted(got[s.name]) == sorted(wanted), (s, dims)
            here = set().union(*(inside(s.box(x.rank, n)) for x in holds[new]))
            assert sent[s.name] == wanted - here


def test_chunks_are_those_of_dtensor() -> None:
    s = Spec("t", (7, 3), "float32", 4, 0)
    assert [s.box(r, 4) for r in range(4)] == [((0, 2), (0, 3)), ((2, 2), (0, 3)), ((4, 2), (0, 3)), ((6, 1), (0, 3))]
    assert [elements(Spec("t", (4,), "float32", 4, 0).box(r, 3)) for r in range(3)] == [2, 2, 0]


def test_common_and_within() -> None:
    assert common(((0, 4), (0, 3)), ((2, 5), (1, 1))) == ((2, 2), (1, 1))
    assert common(((0, 2),), ((2, 2),)) is None
    assert common((), ()) == ()
    assert within(((2, 2), (1, 1)), ((1, 5), (0, 3))) == (slice(1, 3), slice(1, 2))


def test_tensors_lie_aligned_and_apart() -> None:
    specs = (Spec("a", (3,), "float16", 2, None), Spec("b", (), "float64", 8, None), Spec("c", (5,), "float32", 4, 0))
    at, length = offsets(specs, 1, 2)
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
