"""Saves over an earlier checkpoint whose processes are killed: what is loaded afterwards is the earlier checkpoint or the new one, whole.

    python -m tests.dist.kill_saves --saves 100 --processes 2
    python -m tests.dist.kill_saves --operations            # one process, killed before each of its file operations

A state is a number: all tensors of model and optimizer follow from it. Every save is of another state than what is there; it is killed at a moment drawn
evenly from the time that a save takes, on one rank or on all; then the folder is loaded by a process of its own and compared with the state it says it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.checkpoint import dcp as checkpoint
from autopar.distributed import presence
from autopar.errors import CheckpointError, LostRankError
from autopar.runtime.init import distribute
from tests.dist.test_init import mixed
from tests.models import ZOO

LIMIT_S = 60.0


def build(name: str) -> nn.Module:
    """name: of `tests.models`, or a number: so many values in each of four layers' weights."""
    if not name.isdigit():
        return ZOO[name].build()
    width = int(int(name) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, state: int) -> None:
    """The state of that number."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for i, (_, p) in enumerate(model.named_parameters()):
        p.detach().fill_(state + i / 64)
        for j, v in enumerate(optimizer.state[p].values()):
            v.fill_(state + i / 64 + (j + 1) / 1024)
    for i, b in enumerate(b for b in model.buffers() if b.is_floating_point()):
        b.fill_(-state - i / 64)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [*model.state_dict().values(), *(v for p in model.parameters() for v in optimizer.state[p].values())]
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in held]


def _made(name: str, state: int, sizes: tuple[int, ...] = ()) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build(name)
    if sizes:
        distribute(model, init_device_mesh("cpu", sizes), mixed(len(sizes)))
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, state)
    return model, optimizer


# ---- processes ---------------------------------------------------------------------------------------------------


def _save(rank: int, n: int, store: str, folder: str, name: str, state: int, ready: Any, said: Any) -> None:
    torch.set_num_threads(1)
    presence.GRACE_S = 2.0
    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(seconds=LIMIT_S))
    model, optimizer = _made(name, state, (n,))
    dist.barrier()
    ready.wait()
    start = time.monotonic()
    try:
        checkpoint.save(folder, model, optimizer, step=state)
        said.put((rank, "saved", time.monotonic() - start))
    except Exception as e:
        kind = f"{type(e).__name__} in {e.phase}" if isinstance(e, LostRankError) else f"{type(e).__name__}: {e}"
        said.put((rank, kind, time.monotonic() - start))
    said.close()
    said.join_thread()
    os._exit(0)  # the group's end would wait for the dead


def found(folder: str, name: str) -> Any:
    """The number of the state that is there, or what is wrong."""
    model, optimizer = _made(name, 10**6)
    try:
        state = checkpoint.load(folder, model, optimizer)["step"]
    except CheckpointError as e:
        return e.what
    assert state is not None, "saves of here say which state they are of"
    want = whole(*_made(name, state))
    return state if all(torch.equal(a, b) for a, b in zip(whole(model, optimizer), want, strict=True)) else "MIXED"


def _load(folder: str, name: str, said: Any) -> None:
    torch.set_num_threads(1)
    said.put(found(folder, name))


def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.ready", "tests.dist.test_init", "tests.models"])
    return context


def loaded(folder: str, name: str) -> Any:
    """`found` in a process of its own."""
    context = _context()
    said = context.Queue()
    child = context.Process(target=_load, args=(folder, name, said), daemon=True)
    child.start()
    out = said.get(timeout=LIMIT_S)
    child.join()
    return out


@dataclass
class Killed:
    """What came of one save. at_s: when it was killed; told: what ranks that were left said, and after how long."""

    at_s: float
    ranks: tuple[int, ...]
    told: list[tuple[str, float]] = field(default_factory=list)


def save(n: int, folder: str, name: str, state: int, kill: Callable[[], tuple[float, tuple[int, ...]]] | None) -> Killed:
    """Saves on `n` processes. kill: when, and which."""
    context = _context()
    ready, said = context.Barrier(n + 1), context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        args = (n, os.path.join(scratch, "store"), folder, name, state, ready, said)
        children = [context.Process(target=_save, args=(r, *args), daemon=True) for r in range(n)]
        for c in children:
            c.start()
        ready.wait(LIMIT_S)
        out = Killed(*(kill() if kill is not None else (0.0, ())))
        if out.ranks:
            time.sleep(out.at_s)
            for r in out.ranks:
                with contextlib.suppress(ProcessLookupError):  # done before it was killed
                    os.kill(children[r].pid, signal.SIGKILL)
        left = {r for r in range(n) if r not in out.ranks}
        end = time.monotonic() + LIMIT_S
        while left:
            try:
                rank, text, took_s = said.get(timeout=0.2)
            except queue.Empty:
                assert time.monotonic() < end, f"ranks {sorted(left)} said nothing in {LIMIT_S:.0f} s"
                continue
            if rank in left:
                left.remove(rank)
                out.told.append((text, took_s))
        for c in children:
            c.join(LIMIT_S)
    return out


def left_over(folder: str) -> int:
    """Folders of saves beside the one in use."""
    return sum(checkpoint.DATA.fullmatch(n) is not None for n in os.listdir(folder)) - 1


# ---- many saves --------------------------------------------------------------------------------------------------


@dataclass
class Report:
    found: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    left_over: int = 0
    save_s: float = 0.0

    def __str__(self) -> str:
        rows = [f"a save takes {self.save_s:.2f} s"]
        rows += [f"{count:5}  {what}" for what, count in sorted(self.found.items())]
        rows += [f"{count:5}  of the ranks that were left: {what}" for what, count in sorted(self.told.items())]
        rows += [f"longest until those were told: {self.longest_s:.2f} s; most folders left over at a time: {self.left_over}"]
        return "\n".join(rows)


def _sometime(draw: random.Random, save_s: float, which: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    return draw.uniform(0, save_s), which


def hammer(saves: int, n: int, folder: str, name: str, seed: int, show: Callable[[str], None] = lambda line: None) -> Report:
    draw, report = random.Random(seed), Report()
    for _ in range(2):  # the first one of a process is slower
        report.save_s = max(t for _, t in save(n, folder, name, 0, None).told)
    old = loaded(folder, name)
    assert old == 0, old
    for state in range(1, saves + 1):
        which = (draw.randrange(n),) if draw.random() < 0.5 else tuple(range(n))
        killed = save(n, folder, name, state, partial(_sometime, draw, report.save_s, which))
        got = loaded(folder, name)
        what = "the earlier one, whole" if got == old else "the new one, whole" if got == state else f"NEITHER: {got}"
        report.found[f"{'one rank' if len(which) < n else 'all ranks'} killed: {what}"] += 1
        report.told.update(text for text, _ in killed.told)
        report.longest_s = max([report.longest_s, *(t - killed.at_s for _, t in killed.told)])
        report.left_over = max(report.left_over, left_over(folder))
        show(f"{state:4}  at {killed.at_s:.3f} s  ranks {which}  {what}  {killed.told}")
        if got not in (old, state):
            break
        old = got
    save(n, folder, name, saves + 1, None)
    assert loaded(folder, name) == saves + 1 and left_over(folder) == 0, "what was cut short is not cleaned up"
    return report


# ---- every operation ---------------------------------------------------------------------------------------------


_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def _save_until(folder: str, name: str, state: int, operation: int) -> None:
    torch.set_num_threads(1)
    model, optimizer = _made(name, state)
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _OPERATIONS and isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).startswith(folder):
            count += 1
            if count == operation:
                os._exit(9)

    sys.addaudithook(hook)
    checkpoint.save(folder, model, optimizer, step=state)
    os._exit(0)


def flatten(folder: str) -> None:
    """The checkpoint in the format before: DCP's files beside the manifest."""
    at = Path(folder)
    manifest = json.loads((at / checkpoint.MANIFEST).read_text())
    data = at / manifest.pop("data")
    del manifest["replaces"]
    for file in data.iterdir():
        file.rename(at / file.name)
    data.rmdir()
    (at / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": checkpoint.FLAT}))


def at_every_operation(scratch: str, name: str, flat: bool) -> list[Any]:
    """The states that are loaded after a save over state 0 was killed before its first file operation, its second, ... flat: state 0 has the format before."""
    context, out = _context(), []
    before = os.path.join(scratch, "before")
    model, optimizer = _made(name, 0)
    checkpoint.save(before, model, optimizer, step=0)
    if flat:
        flatten(before)
    for operation in range(1, 200):
        folder = os.path.join(scratch, str(operation))
        shutil.copytree(before, folder)
        child = context.Process(target=_save_until, args=(folder, name, 1, operation), daemon=True)
        child.start()
        child.join(LIMIT_S)
        out.append(found(folder, name))
        checkpoint.save(folder, *_made(name, 2), step=2)
        assert len(os.listdir(folder)) == 2 and left_over(folder) == 0 and found(folder, name) == 2, "the next save does not clean up"
        if child.exitcode == 0:
            return out
    raise AssertionError("a save has no end")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--saves", type=int, default=100)
    a.add_argument("--processes", type=int, default=2)
    a.add_argument("--model", default="250000", help="of tests.models, or how many values each of four weights has")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--folder", help="where to save; default: a temporary folder")
    a.add_argument("--operations", action="store_true")
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = o.folder or os.path.join(scratch, "checkpoint")
        if o.operations:
            for flat in (False, True):
                states = at_every_operation(os.path.join(scratch, str(flat)), o.model, flat)
                print(f"over the {'former' if flat else 'present'} format:", states)
        else:
            report = hammer(o.saves, o.processes, folder, o.model, o.seed, lambda line: print(line, flush=True))
            print(report)
            sys.exit(any("NEITHER" in what for what in report.found))


if __name__ == "__main__":
    main()
