"""Runs with losses at random places, until so many were survived, each held against one process of plain PyTorch.

    python -m tests.elastic_soak --seed 1 --kills 20 [--way fsdp+tp] [--seconds 400] [--rejoin] [--out benchmarks/results/elastic_soak.json]

A run has one loss or two: of any rank, at any phase of any step, of two at once, or of the second while the first is recovered from. With --rejoin lost places are filled again, and of those that join,
and of the others meanwhile, some are lost, too. What is drawn follows from the seed. --out adds the soak to those that the file has.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.record import write
from tests.elastic import PHASES, TWICE, Death, Task, compare, run

PP = (("pp", 2),)
WAYS: dict[str, Task] = {
    "fsdp": Task("fsdp"),
    "ddp": Task("ddp"),
    "fsdp+tp": Task("fsdp+tp", axes=(("tp", 2),)),
    "planned": Task(None, axes=(("tp", 2),)),
    "least": Task(None, axes=(("tp", 2),), memory="least"),
    "pipeline": Task("fsdp", axes=PP, model="toy", silence_s=60.0),
    "pipeline planned": Task(None, axes=PP, model="toy", silence_s=60.0),
    "llama": Task("fsdp+tp", axes=(("tp", 2),), model="llama", silence_s=60.0),
    "mixtral": Task("fsdp", model="mixtral", silence_s=60.0),
}
FEW = 4  # steps of a model that takes long to compile
LIMIT_S = 400.0  # of a run


@dataclass
class Soak:
    """What became of one. kills: survived, by way; failures: runs whose curve, or state, or end was not that of one process."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    joins: int = 0
    failures: int = 0

    @property
    def survived(self) -> int:
        return self.kills.total()


def random_task(draw: random.Random, way: str) -> Task:
    """A run with one or two losses. Of two at once none is the other's partner; the second of two may be lost while the first is recovered from."""
    task = replace(WAYS[way], survive=2, optimizer=draw.choice(["adamw", "sgd"]), batch=draw.choice([12, 12, 8]))
    task = replace(task, steps=8 if task.model == "net" else FEW)
    phases = [p for p in PHASES if way not in ("ddp", "planned") or p not in ("copy", "commit")]  # which replicas do not have
    first = Death(draw.randrange(task.ranks), draw.randrange(1, task.steps - 1), draw.choice(phases))
    deaths = [first]
    if draw.random() < 0.3:
        other = (first.worker + 2) % task.ranks
        at_once, later = replace(first, worker=other), Death(other, draw.randrange(first.step + 1, task.steps), draw.choice(phases), 1)
        deaths.append(draw.choice([at_once, later, Death(other, first.step, draw.choice(TWICE), 1)]))
    return replace(task, deaths=tuple(deaths))


def random_join(draw: random.Random, way: str) -> Task:
    """A loss whose place is filled again. The one that joins, or another while it does, may be lost."""
    phases = [p for p in PHASES if p not in ("copy", "copied")]  # which take place only where somebody is to die there
    first = Death(draw.randrange(4), draw.randrange(1, 5), draw.choice(phases))
    hold = first.step + draw.randrange(1, 4)
    task = replace(WAYS[way], steps=12, survive=2, rejoin=3, hold=hold)
    task = replace(task, optimizer=draw.choice(["adamw", "sgd"]), batch=draw.choice([12, 8]), every=draw.choice([1, 1, 2]))
    new = task.ranks
    others = [
        None,
        Death(new, 0, draw.choice(["forward", "backward", "reduced"]), 1),
        Death(new, 0, "regrouped", 2),
        Death(new, hold + 1, draw.choice(["moved", *phases]), 2),
        Death((first.worker + draw.randrange(1, 4)) % task.ranks, hold + 1, draw.choice([*TWICE, *phases]), 2),
    ]
    other = draw.choice(others)
    return replace(task, deaths=(first,) if other is None else (first, other))


def soak(seed: int, kills: int, ways: Sequence[str], seconds: float, rejoin: bool = False) -> Soak:
    """Ends with the first failure, once so many losses were survived, or with the run in which the time is over."""
    draw, done, begun = random.Random(seed), Soak(), time.monotonic()
    while done.survived < kills and time.monotonic() - begun < seconds:
        task = (random_join if rejoin else random_task)(draw, way := ways[done.runs % len(ways)])
        done.runs += 1
        try:
            # Of two at once the second may be told of the first before it gets to where it is to die.
            out = run(task, LIMIT_S)
            compare(task, out, {w for w, _ in out.lost} | {task.deaths[0].worker})
        except AssertionError as e:
            print(f"run {done.runs}: {task}\n{e}", flush=True)
            done.failures += 1
            return done
        gone = [w for w, _ in out.lost] + [
            w for w in range(task.ranks, 2 * task.ranks) if any(f"worker {w} has not joined" in x for x in out.said)
        ]
        done.kills[way] += len(gone)
        done.phases.update(d.phase for d in task.deaths if d.worker in gone)
        joins = sum("joined" in x and "generation" in x for x in out.said)
        done.joins += joins
        what = ", ".join(f"{d.worker} {d.phase} at {d.step}" for d in task.deaths)
        print(f"run {done.runs}: {way} {what}: survived{f', {joins} joins' if rejoin else ''}", flush=True)
    return done


def added(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """A soak beside others; in place of an earlier one of the same draws."""
    same = ("seed", "rejoin", "ways")
    return [*(r for r in rows if any(r[k] != row[k] for k in same)), row]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--kills", type=int, default=20, help="until so many losses were survived")
    p.add_argument("--way", action="append", choices=sorted(WAYS), help="default: all in turn")
    p.add_argument("--seconds", type=float, default=1200, help="no run begins after so many")
    p.add_argument("--rejoin", action="store_true", help="lost places are filled again")
    p.add_argument("--out", type=Path, help="a JSON file that the result is added to")
    asked = p.parse_args()
    begun, ways = time.monotonic(), asked.way or list(WAYS)
    done = soak(asked.seed, asked.kills, ways, asked.seconds, asked.rejoin)
    seconds = time.monotonic() - begun
    if asked.out is not None:
        row = {
            "seed": asked.seed, "rejoin": asked.rejoin, "ways": ways, "kills": done.survived, "runs": done.runs, "joins": done.joins, "seconds": round(seconds, 1),
            "failures": done.failures, "by_way": dict(done.kills), "by_phase": dict(sorted(done.phases.items())),
        }  # fmt: skip
        before = json.loads(asked.out.read_text()).get("soaks", []) if asked.out.exists() else []
        write(asked.out, "python -m tests.elastic_soak", {"soaks": added(before, row)})
    if done.failures:
        return 1
    print(f"{done.survived} losses survived in {done.runs} runs, {seconds:.0f} s; every curve is that of one process")
    return 0 if done.survived >= asked.kills else 2


if __name__ == "__main__":
    sys.exit(main())
