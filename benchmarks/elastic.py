"""What surviving costs: the time from a killed process to the next finished step, by part, and from the start of one in its place to its first step; and a step's time where nobody is lost,
with copies and without.

    python -m benchmarks.elastic --out benchmarks/results/elastic.json
    python -m benchmarks.elastic --rounds 0 --kills 0 --out benchmarks/results/elastic_joins.json
    python -m benchmarks.elastic --layout fsdp+tp --tp 2 --rounds 0 --joins 0 --out benchmarks/results/elastic_tp.json
    python -m benchmarks.elastic --pp 2 --rounds 0 --joins 0 --out benchmarks/results/elastic_pp.json
    python -m benchmarks.elastic --processes 4 --hidden 256 --layers 4 --layout fsdp --every 1,4 --rounds 3

A small Llama trains on gloo processes of this machine under `autopar.elastic.supervisor`. For the cost, the same training runs without `elastic=` and with copies every
k-th step, in turn, in each round; ratios are of medians over all steps but the first three. On gloo a copy takes the cores that compute meanwhile, so what is seen here is
an upper bound of what a network beside them would leave to see.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autopar.elastic import words
from autopar.elastic.supervisor import Supervisor, started
from benchmarks.record import write

FIRST = 3  # steps in which things are compiled, or made ahead
LOSE_AT = 6  # steps done before the loss
LONGEST = 2000  # steps that one that joins is waited for


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--processes", type=int, default=4)
    p.add_argument("--layout", default="fsdp", help="a hand layout, or planned")
    p.add_argument("--tp", type=int, default=1, help="ranks of a second axis of the mesh")
    p.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    p.add_argument("--backend", default="aot_eager")
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--batch", type=int, default=12)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--every", default="1,4", help="copies every so many steps, each a case")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--kills", type=int, default=3, help="runs with a loss, each of another rank")
    p.add_argument("--joins", type=int, default=2, help="runs with a loss whose place is filled again")
    p.add_argument("--out", type=Path)
    p.add_argument("--worker", nargs=3, metavar=("EVERY", "LOSE", "FOLDER"), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        every, lose, folder = a.worker
        work(a, int(every), int(lose), Path(folder))
        return
    cost, held = costs(a) if a.rounds else ([], 0)
    losses: list[dict[str, Any]] = []
    for n in range(a.kills):
        row = loss(a, n % a.processes)
        losses.append(row)
        parts = ", ".join(f"{k.removesuffix('_s')} {1e3 * row[k]:.0f}" for k in ("detect_s", "group_s", "state_s", "step_s"))
        print(
            f"rank {row['rank']} lost: {1e3 * row['total_s']:.0f} ms to the next finished step ({parts}); {row['moved_bytes']:,} bytes moved, {row['least_bytes']:,} at least; "
            f"the first step took {row['first_s']:.1f} s, and those made ahead {row['ahead_s']:.1f} s more",
            flush=True,
        )
    joins = []
    for n in range(a.joins):
        row = join(a, n % a.processes)
        joins.append(row)
        print(
            f"rank {row['rank']} again: {row['start_s']:.1f} s until it is ready, in which the others did {row['steps_meanwhile']} steps; let in {1e3 * row['wait_s']:.0f} ms later; the others "
            f"stood for {1e3 * row['pause_s']:.0f} ms (group {1e3 * row['group_s']:.0f}, state {1e3 * row['state_s']:.0f}); first step {1e3 * row['step_s']:.0f}; "
            f"{row['moved_bytes']:,} bytes moved",
            flush=True,
        )
    what = {k: getattr(a, k) for k in ("processes", "layout", "tp", "pp", "backend", "hidden", "layers", "batch", "seq", "steps", "rounds")}
    write(a.out, "python -m benchmarks.elastic", {**what, "cost": cost, "held_bytes": held, "losses": losses, "joins": joins})


def costs(a: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """A step's time in each case, and the bytes that a rank kept at most."""
    cases = [0, *(int(k) for k in a.every.split(","))]
    steps: dict[int, list[float]] = {k: [] for k in cases}
    held = 0
    for i in range(a.rounds):
        for k in cases if i % 2 == 0 else reversed(cases):
            ranks = ran(a, k, -1)
            steps[k] += [max(r["steps_s"][s] for r in ranks) for s in range(FIRST, a.steps)]
            held = max(held, *(r["held_bytes"] for r in ranks))
    plain = statistics.median(steps[0])
    cost = [{"every": k, "step_s": statistics.median(v), "ratio": statistics.median(v) / plain} for k, v in steps.items()]
    for row in cost:
        name = f"copies every {row['every']}" if row["every"] else "without elastic="
        print(f"{name}: {1e3 * row['step_s']:.1f} ms a step ({row['ratio']:.3f})", flush=True)
    print(f"kept in host memory: {held / 1e6:.1f} MB a rank at most", flush=True)
    return cost, held


def join(a: argparse.Namespace, rank: int) -> dict[str, Any]:
    """A run that loses `rank` and gets another in its place: how long that one takes from its start until it is ready; from then until it is let in; what the others stand for meanwhile."""
    said: list[tuple[float, str]] = []
    ranks = ran(a, 1, rank, 1, said)
    started = next(at for at, line in said if line.endswith("started, to join"))
    new, others = next(r for r in ranks if "rehearsed" in r), [r for r in ranks if "rehearsed" not in r and "join" in r]
    last, done = max(others, key=lambda r: float(r["join"]["pause_s"])), new["join"]
    assert all(r["captured"] == 0 for r in (new, *others)), "something was captured after the join"
    return {
        "rank": rank, "start_s": new["rehearsed"] - started, "steps_meanwhile": done["version"] - LOSE_AT, "wait_s": done["began"] - new["rehearsed"] - done["regroup_s"] - done["move_s"],
        "pause_s": last["join"]["pause_s"], "group_s": done["regroup_s"], "state_s": done["move_s"], "step_s": done["step_s"], "moved_bytes": done["moved_bytes"],
    }  # fmt: skip


def loss(a: argparse.Namespace, rank: int) -> dict[str, Any]:
    """A run that loses `rank`; the slowest survivor's times."""
    ranks = ran(a, 1, rank)
    died = next(r["died"] for r in ranks if "died" in r)
    left = [r for r in ranks if "recovery" in r]
    last = max(left, key=lambda r: float(r["redone"]))
    done = last["recovery"]
    assert all(r["captured"] == 0 for r in left), "something was captured after the loss"
    return {
        "rank": rank, "total_s": last["redone"] - died, "group_s": done["regroup_s"], "state_s": done["move_s"],
        "detect_s": last["recovered"] - done["regroup_s"] - done["move_s"] - died, "step_s": last["redone"] - last["recovered"], "moved_bytes": done["moved_bytes"],
        "least_bytes": done["least_bytes"], "ahead_s": max(r["ahead_s"] for r in left), "first_s": max(r["steps_s"][0] - r["ahead_s"] for r in left),
    }  # fmt: skip


def ran(a: argparse.Namespace, every: int, lose: int, rejoin: int = 0, told: list[tuple[float, str]] | None = None) -> list[dict[str, Any]]:
    """What each worker of a run says, that which died included. told: gets what the supervisor says, and when."""
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []

        def tell(line: str) -> None:
            said.append(line)
            if told is not None:
                told.append((time.time(), line))

        command = ["-m", "benchmarks.elastic", *sys.argv[1:], "--worker", str(every), str(lose), folder]
        code = Supervisor(started(command), a.processes, a.processes - 1, tell, rejoin=rejoin).run(600.0)
        if code:
            sys.exit("\n".join(said))
        return [json.loads(f.read_text()) for f in sorted(Path(folder).iterdir())]


# ---- a worker ----------------------------------------------------------------------------------------------------


def work(a: argparse.Namespace, every: int, lose: int, folder: Path) -> None:
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar

    dist.init_process_group("gloo")
    me = dist.get_rank()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=a.hidden, intermediate_size=3 * a.hidden, num_hidden_layers=a.layers, num_attention_heads=8
    )
    elastic = autopar.Elastic(every=every, silence_s=60.0) if every else None
    mesh = {n: k for n, k in (("pp", a.pp), ("dp", dist.get_world_size() // (a.tp * a.pp)), ("tp", a.tp)) if k > 1 or n == "dp"}
    layout = None if a.layout == "planned" else a.layout
    model = autopar.compile(LlamaForCausalLM(config), mesh, layout=layout, backend=a.backend, optimizer="adamw", elastic=elastic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = autopar.elastic.Session(model, optimizer) if elastic else None
    generator = torch.Generator().manual_seed(1)
    loader = [torch.randint(1024, (a.batch, a.seq), generator=generator) for _ in range(a.steps)]
    found: dict[str, Any] = {"steps_s": [], "held_bytes": 0}
    begun, ahead_s = time.perf_counter(), 0.0
    for number, ids in enumerate(session.batches(batches(a, session, loader)) if session else loader):
        note_join(found, session, False)
        with session.step() if session else contextlib.nullcontext(number) as step:
            loss = model(input_ids=ids, labels=ids).loss
            if (me, step) == (lose, LOSE_AT):
                (folder / os.environ[words.WORKER]).write_text(json.dumps({"died": time.time()}))
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found["steps_s"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        if session and step == -1:
            found["rehearsed"] = time.time()
        ahead_s = session.ahead.seconds if session and number == 0 else ahead_s
        note_join(found, session, True)
        if session and session.recoveries and "recovered" not in found:
            found["recovered"] = time.time()  # the step that was left; its repetition comes now
        elif "recovered" in found and "redone" not in found:
            found["redone"] = time.time()
    if session:
        found["held_bytes"] = session.holdings.bytes()
        found["captured"] = model.programs.captured
        found["ahead_s"] = ahead_s
        for r in session.recoveries:
            if not r.joined:
                found["recovery"] = {
                    "regroup_s": r.regroup_s,
                    "move_s": r.move_s,
                    "moved_bytes": r.moved.bytes,
                    "least_bytes": r.moved.least_bytes,
                }
    (folder / os.environ[words.WORKER]).write_text(json.dumps(found))  # a number that a loss does not change
    dist.destroy_process_group()


def batches(a: argparse.Namespace, session: Any, loader: list[Any]) -> Iterator[Any]:
    """So many steps; where a place is filled again, until that has happened and a few more."""
    grows = words.FULL in os.environ
    for i in itertools.count():
        joined = next((r.version for r in session.recoveries if r.joined), None)
        if i >= (len(loader) if not grows else LONGEST) or (joined is not None and session.version >= joined + FIRST):
            return
        yield loader[i % len(loader)]


def note_join(found: dict[str, Any], session: Any, is_done: bool) -> None:
    """Before and after a step: of the first one that somebody who joined takes part in."""
    r = next((r for r in session.recoveries if r.joined), None) if session else None
    if r is not None and "join" not in found and not is_done:
        found["join"] = {
            "version": r.version, "regroup_s": r.regroup_s, "move_s": r.move_s, "pause_s": r.regroup_s + r.move_s, "moved_bytes": r.moved.bytes, "began": time.time(),
        }  # fmt: skip
    elif is_done and "join" in found and "step_s" not in found["join"]:
        found["join"]["step_s"] = time.time() - found["join"]["began"]


if __name__ == "__main__":
    main()
