"""A rank that is killed, or stops: the others say so, with the phase, the collective and the rank; nobody hangs.

The processes are children of this test's own, since those of `launch` may not die.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import _torch, checkpoint
from autopar.checkpoint import dcp
from autopar.distributed import presence
from autopar.errors import AutoparError
from autopar.runtime import build, compile_cache, pipeline
from autopar.runtime.init import distribute
from autopar.runtime.step import Step
from tests.dist.test_init import mixed
from tests.dist.test_split_sequences import split
from tests.models import ZOO
from tests.wide import cases

PATIENCE_S = 3.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.relu(self.a(x))) ** 2).mean()


def _die(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    time.sleep(60)


def _at(module: Any, name: str, how: str) -> None:
    """This rank is lost when it gets to `module.name`."""

    def lost(*_: Any, **more: Any) -> Any:
        _die(how)

    setattr(module, name, lost)


def _work(phase: str, victim: bool, how: str, folder: str) -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    dist.barrier()
    if phase.startswith("checkpoint"):
        model = Net()
        distribute(model, mesh, mixed(1))
        checkpoint.save(folder, model)
        if victim:
            _at(dcp.dcp, phase.removeprefix("checkpoint "), how)
        checkpoint.save(folder, model) if phase.endswith("save") else checkpoint.load(folder, model)
    if phase == "compile" and victim:
        _at(build.Builder, "arguments", how)
    if phase == "compile: parameters being spread" and victim:
        _at(build, "distribute", how)
    if phase.endswith("of a ring"):
        _ring(mesh, phase, victim, how)
        return
    planned: dict[str, Any] = (
        {"cluster": "h100:8"} if phase == "planning" else {"layout": "ddp" if phase == "gradient reduction" else "fsdp"}
    )
    compiled = autopar.compile(Net(), mesh, backend="aot_eager", **planned)
    if phase == "capture" and victim:
        _at(pipeline, "capture", how)
    if phase == "planning" and victim:
        _at(build, "from_first" if dist.get_rank() else "make_plan", how)
    if phase == "forward" and victim:
        _at(Step, "forward", how)
    if phase == "compilation":
        compile_cache.LATE_S = 30.0
        _die(how) if victim else compile_cache.CompileOnce(compiled._builder.groups.id, list(range(n))).run(lambda: 1)
    loss = compiled(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)))
    if phase in ("backward", "gradient reduction") and victim:
        _die(how)
    loss.backward()


def _ring(mesh: Any, phase: str, victim: bool, how: str) -> None:
    """Attention whose keys go round; a rank is lost at its first hop."""
    one, inputs = ZOO["llama"].build(1), ZOO["llama"].inputs(1, 32)
    with split(2, "s", 1):
        model = autopar.compile(one, mesh, backend="aot_eager", cluster="h100:8")
        loss = model(**inputs).loss
        loss.backward()
    if victim and phase.startswith("forward"):
        _at(_torch, "exchanged", how)
    loss = model(**inputs).loss
    if victim:
        _at(_torch, "exchanged", how)
    loss.backward()


def _child(rank: int, n: int, store: Any, phase: str, victim: int, how: str, folder: str, results: Any, ready: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    torch.set_num_threads(1)
    presence.GRACE_S, presence.STORE_S = 2.0, 1.0
    patience = timedelta(seconds=PATIENCE_S)
    ready.wait()  # patience is for what is tested
    kept: Any = (
        dist.FileStore(store, n) if isinstance(store, str) else dist.TCPStore("127.0.0.1", store, n, rank == 0, patience, use_libuv=True)
    )
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=n, timeout=patience)
    try:
        _work(phase, rank == victim, how, folder)
        results.put((rank, "no error", None))
    except Exception as e:
        said = {k: getattr(e, k, None) for k in ("phase", "collective", "ended", "silent")}
        results.put((rank, f"{type(e).__name__}: {e}", said if isinstance(e, AutoparError) else None))
    results.close()
    results.join_thread()
    os._exit(0)  # what follows would wait for those that are gone


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def lose(n: int, phase: str, victim: int, how: str, tcp: bool = False, limit_s: float = 60) -> dict[int, tuple[str, dict[str, Any]]]:
    """What the others say, by rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.ready"])
    results, ready = context.Queue(), context.Barrier(n)
    with tempfile.TemporaryDirectory() as folder:
        store: Any = free_port() if tcp else os.path.join(folder, "store")
        children = [
            context.Process(target=_child, args=(r, n, store, phase, victim, how, os.path.join(folder, "c"), results, ready), daemon=True)
            for r in range(n)
        ]
        for c in children:
            c.start()
        out: dict[int, tuple[str, dict[str, Any]]] = {}
        end = time.monotonic() + limit_s
        try:
            while len(out) < n - 1:
                rank, text, said = results.get(timeout=max(end - time.monotonic(), 0.01))
                out[rank] = (text, said)
        finally:
            for c in children:
                c.kill()
                c.join()
    return out


COLLECTIVES = {
    "compile": "the making of a group",
    "compile: parameters being spread": "broadcast",
    "capture": "all_gather_object",
    "planning": "broadcast_object_list",
    "forward": "all_gather_into_tensor over dp",
    "backward": "all_gather_into_tensor over dp",
    "gradient reduction": "all_reduce over dp",
}


@pytest.mark.parametrize("phase", cases(COLLECTIVES, ["compile", "capture", "planning", "forward"]))
def test_a_killed_rank(phase: str) -> None:
    """In planning the rank is lost that plans."""
    victim = 0 if phase == "planning" else 1
    ((_, (text, said)),) = lose(2, phase, victim, "killed").items()
    assert text.startswith(f"LostRankError: rank {victim} ended during {phase}\n"), text
    assert said == {"phase": phase, "collective": COLLECTIVES[phase], "ended": (victim,), "silent": ()}, text


@pytest.mark.parametrize(
    ("half", "how"), cases([(h, w) for h in ("forward", "backward") for w in ("killed", "stopped")], [("backward", "killed")])
)
def test_a_rank_lost_in_a_ring(half: str, how: str) -> None:
    ((_, (text, said)),) = lose(2, f"{half} of a ring", 1, how).items()
    assert text.startswith(f"LostRankError: rank 1 {'ended' if how == 'killed' else 'did not answer'} during {half}\n"), text
    assert said["collective"] == ("ring_attention over dp" if half == "forward" else "ring_attention_backward over dp"), text


@pytest.mark.parametrize("phase", ["checkpoint save", "checkpoint load"])
def test_a_rank_killed_in_a_checkpoint(phase: str) -> None:
    ((_, (text, said)),) = lose(2, phase, 1, "killed").items()
    assert text.startswith(f"LostRankError: rank 1 ended during {phase}\n"), text
    assert said["collective"] and said["ended"] == (1,), text


def test_a_rank_that_stops() -> None:
    """One of three; the two others say the same at their timeout."""
    phase = "gradient reduction"
    for text, said in lose(3, phase, 1, "stopped").values():
        assert text.startswith(f"LostRankError: rank 1 did not answer during {phase}\n"), text
        assert said == {"phase": phase, "collective": COLLECTIVES[phase], "ended": (), "silent": (1,)}, text


@pytest.mark.parametrize("how", cases(["killed", "stopped"], ["killed"]))
def test_the_rank_that_keeps_the_store(how: str) -> None:
    """What is known without it is said; a store whose host is stopped would not answer at all."""
    for text, said in lose(3, "forward", 0, how, tcp=True).values():
        assert said is not None and said["phase"] == "forward", text
        assert said["collective"] == "all_gather_into_tensor over dp" and "the job's store" in text, text
        assert 0 in said["ended"] if how == "killed" else not said["ended"], text


def test_a_rank_that_ends_while_others_wait_for_its_compilation() -> None:
    ((_, (text, _)),) = lose(2, "compilation", 0, "killed").items()
    assert "compiling failed on the first rank of this node: its process has ended" in text, text
