"""A schedule written out: for every rank the list of what it does, in order, in torch.distributed.pipelining's notation.

    2F0     forward of stage 2, micro-batch 0
    3B1     its whole backward
    3I1     the part of backward that other stages wait for: gradients of what the stage received
    3W1     the rest: gradients of its parameters

A stage's list has every micro-batch's F once, before its B, or before its I and, behind that, its W. What is sent and received follows from the lists: F of a stage
needs F of the stage before it, I and B need I or B of the stage behind it, of the same micro-batch.

A file has a line for every rank, actions between commas, as torch writes them; empty places, where a rank waits, mean nothing. In torch's files that hold communication
as well (`2SEND_F0`, `1UNSHARD`), that is left out, as the executor finds it by itself, and two actions that torch runs together, `(0F7;3B2)OVERLAP_F_B`, come one after the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from autopar.errors import LayoutError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OTHERS = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """What a rank does at once: kind, one of F, B, I, W, of a stage and a micro-batch."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    def said(self) -> str:
        """For people."""
        of = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradients", WEIGHT: "weight gradients"}[self.kind]
        return f"{of} of micro-batch {self.micro_batch} on stage {self.stage} ({self})"

    @property
    def waits_for(self) -> int:
        """The stage whose result of this micro-batch it reads: the one before, the one behind, or itself (W)."""
        return self.stage + {FORWARD: -1, WEIGHT: 0}.get(self.kind, 1)


@dataclass(frozen=True)
class Lists:
    """Every rank's actions. Whether they make a schedule says `verified`."""

    ranks: tuple[tuple[Action, ...], ...]
    name: str = ""

    @cached_property
    def stages(self) -> int:
        return 1 + max((a.stage for actions in self.ranks for a in actions), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max((a.micro_batch for actions in self.ranks for a in actions), default=-1)

    @cached_property
    def where(self) -> tuple[int, ...]:
        """The rank of each stage."""
        found = {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}
        return tuple(found[s] for s in range(self.stages))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Its stages."""
        return tuple(s for s, r in enumerate(self.where) if r == rank)

    @property
    def splits_backward(self) -> bool:
        return any(a.kind in (INPUT, WEIGHT) for actions in self.ranks for a in actions)

    def in_flight(self, rank: int) -> int:
        """The most micro-batches whose forward has run on a stage of the rank and whose backward has not ended, each stage's counted by itself."""
        held = most = 0
        for a in self.ranks[rank]:
            held += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(a.kind, 0)
            most = max(most, held)
        return most

    def fullest(self, rank: int) -> list[dict[int, int]]:
        """The moments at which a rank holds activations of most micro-batches: by stage of it, of how many. One is left out where another has as many of each."""
        held = dict.fromkeys(self.of_rank(rank), 0)
        seen: dict[tuple[int, ...], None] = {}
        for a in self.ranks[rank]:
            held[a.stage] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(a.kind, 0)
            if a.kind == FORWARD:
                seen[tuple(held.values())] = None
        most = [x for x in seen if not any(y != x and all(b >= a for a, b in zip(x, y, strict=True)) for y in seen)]
        return [dict(zip(held, x, strict=True)) for x in most]

    @cached_property
    def most_in_flight(self) -> int:
        """Of any rank."""
        return max(map(self.in_flight, range(len(self.ranks))))

    def text(self) -> str:
        """As torch writes them."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.text())


def parse(text: str, where: str = "", name: str = "") -> Lists:
    """The lists in such a text. where: what to call it. Raises LayoutError for what is no action."""
    ranks = []
    for number, line in enumerate(text.strip("\n").splitlines(), 1):
        actions = []
        for word in _TOGETHER.sub(lambda found: found[1].replace(";", ","), line).split(","):
            word = word.strip().strip('"')
            if not word or _OTHERS.fullmatch(word):
                continue
            found = _ACTION.fullmatch(word)
            if found is None:
                raise LayoutError(
                    f"{word[:40]!r} is no action of a schedule",
                    where=f"{where or 'schedule'}, line {number}",
                    fix="write stage, F, B, I or W, and micro-batch, as in 2F0; one line a rank, actions between commas",
                )
            actions.append(Action(int(found[1]), found[2], int(found[3])))
        ranks.append(tuple(actions))
    return Lists(tuple(ranks), name)


def load(path: str | os.PathLike[str]) -> Lists:
    """The schedule in a file, verified. Raises LayoutError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise LayoutError(
            f"the schedule {os.fspath(path)!r} cannot be read: {e}", fix="give the path of a file that torch or autopar wrote"
        ) from e
    lists = parse(text, os.fspath(path), Path(path).stem)
    verified(lists, os.fspath(path))
    return lists


def verified(lists: Lists, where: str = "") -> Lists:
    """`lists`, which run: every stage on one rank, every micro-batch once and in order through each, no rank waiting for another for ever. Raises LayoutError."""
    at = f"{where or 'schedule ' + lists.name}: "
    seen: dict[tuple[int, int], list[str]] = {}
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(lists.ranks):
        for a in actions:
            if rank_of.setdefault(a.stage, rank) != rank:
                raise LayoutError(
                    f"stage {a.stage} is on ranks {rank_of[a.stage]} and {rank}", where=f"{at}{a}", fix="give each stage to one rank"
                )
            seen.setdefault((a.stage, a.micro_batch), []).append(a.kind)
    for s in range(lists.stages):
        for i in range(lists.micro_batches):
            kinds = "".join(seen.get((s, i), []))
            if kinds not in ("FB", "FIW"):
                raise LayoutError(
                    f"stage {s} does {' '.join(kinds) or 'nothing'} of micro-batch {i}",
                    where=f"{at}rank {rank_of.get(s, '?')}",
                    fix="every stage has each micro-batch's F once, behind it B once, or I and then W",
                )
    stuck = waiting(lists.ranks)
    if stuck:
        rank, a = next(iter(stuck.items()))
        raise LayoutError(
            f"the pipeline's ranks {sorted(stuck)} wait for each other forever",
            where=f"{at}rank {rank}, at the {a.said()}, which needs stage {a.waits_for}'s",
            fix="give every rank an order in which what it waits for does not wait for it: the known schedules have one",
        )
    return lists


def waiting(ranks: Sequence[Iterable[Action]]) -> dict[int, Action]:
    """Ranks that never come to an end, each with the action that it stands at."""
    lists = [list(actions) for actions in ranks]
    last = max((a.stage for actions in lists for a in actions), default=0)
    done: set[tuple[int, str, int]] = set()
    at, moved = [0] * len(lists), True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                a = actions[at[rank]]
                back = a.kind in (BACKWARD, INPUT)
                needs = (a.waits_for, "b" if back else "f", a.micro_batch)
                if a.kind != WEIGHT and 0 <= a.waits_for <= last and needs not in done:
                    break
                if a.kind != WEIGHT:
                    done.add((a.stage, "b" if back else "f", a.micro_batch))
                at[rank] += 1
                moved = True
    return {rank: actions[at[rank]] for rank, actions in enumerate(lists) if at[rank] < len(actions)}
