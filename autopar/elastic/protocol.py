"""Which version of the state the survivors of a failure go on from. docs/elastic.md has the rule and its cases.

A version is a number of steps done. A rank keeps its own shard in two versions, and a partner's in two. After its optimizer a rank copies its shard, version v, into
the place of v-2, and sends it to its partner beside the next forward. Before the optimizer of step v it waits for its ward's copy of version v, and then for all ranks
to have got as far: **the commit of v**. So

    a rank that has left the commit of v knows that every copy of v is whole;
    it overwrites v-1, its own and its ward's, only after that;
    hence every rank, always, has v whole or is a ward whose partner has, where v is the last version that anybody has left the commit of,

and among survivors there is no version but v, which is whole, and v+1, which may be. The newest version that is whole is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shard:
    """What a rank of a generation of `ranks` has to itself of version `version`. generation: counts the groups that a run has had."""

    version: int
    generation: int
    ranks: int
    rank: int


def stride_over(nodes: Sequence[int]) -> int:
    """By how many ranks a partner is away: so far that it is on another node. nodes: by rank, the node it is on; those of a node follow each other.

    Where one node has more than half of all ranks, as many partners are on other nodes as there can be."""
    largest = max(Counter(nodes).values())
    others = len(nodes) - largest
    return min(largest, others) or 1


def partner(rank: int, ranks: int, stride: int = 1) -> int:
    """Who keeps a copy of this rank's shard. stride: see `stride_over`."""
    return (rank + stride) % ranks


def ward(rank: int, ranks: int, stride: int = 1) -> int:
    """Whose copy this rank keeps."""
    return (rank - stride) % ranks


def version_to_go_on_from(held: Sequence[Iterable[Shard]]) -> tuple[int, int, int] | None:
    """(version, generation, its ranks): the newest of which survivors, each of which has the shards `held[i]`, have all shards between them. None where there is none."""
    there = {shard for theirs in held for shard in theirs}
    whole = {
        (s.version, s.generation, s.ranks)
        for s in there
        if all(Shard(s.version, s.generation, s.ranks, r) in there for r in range(s.ranks))
    }
    return max(whole, default=None)


def sources(chosen: tuple[int, int, int], held: Sequence[Iterable[Shard]], mine: Sequence[Shard | None]) -> list[list[int]]:
    """By old rank and new one: which survivor gives the one's shard to the other. Itself, where it has it; else whose own it is; else whose copy.

    mine: by survivor, the shard of the chosen version that is its own, not its ward's; None where it has none."""
    version, generation, ranks = chosen
    out = []
    for r in range(ranks):
        shard = Shard(version, generation, ranks, r)
        holders = [i for i, theirs in enumerate(held) if shard in theirs]
        best = next((i for i in holders if mine[i] == shard), holders[0])
        owners = [i for i in holders if mine[i] == shard] or [best]  # of what all have there are many, and each gives to another
        out.append([d if d in holders else owners[d % len(owners)] for d in range(len(held))])
    return out
