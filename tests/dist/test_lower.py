"""Inductor end to end on gloo processes: one-device gradients, one rank of four compiles, a second start compiles nothing, nobody hangs."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.kernels.random import EagerRandom
from autopar.runtime import compile_cache
from autopar.runtime.compile_cache import CompileOnce
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import wide

BATCH, SEQ, LAYERS = 4, 8, 4


def _step(name: str, sizes: tuple[int, ...], layout: str, cache: str) -> list[dict[str, Any]]:
    """One training step under Inductor against eager on one device; what lowering says of forward and backward."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    zoo = ZOO[name]
    torch.manual_seed(0)
    one = zoo.build(LAYERS).train()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    model = autopar.compile(zoo.build(LAYERS).train(), mesh, layout=layout, backend="inductor")
    batch = zoo.inputs(BATCH, SEQ)
    torch.manual_seed(7)
    loss = model(**batch).loss
    loss.backward()
    with EagerRandom(7, 0):
        want = one(**batch).loss
    want.backward()
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-5, atol=0)
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None))
    ours = dict(model.named_parameters())
    for n, p in one.named_parameters():
        assert (p.grad is None) == (ours[n].grad is None), n
        if p.grad is not None:
            d = float((ours[n].grad.full_tensor() - p.grad).norm())
            assert d <= 1e-5 * float(p.grad.norm()) + 1e-7 * total, (n, d, float(p.grad.norm()))
    (step,) = model._programs.steps()
    (backward,) = [lowered for _, lowered in step.backwards.values()]
    return [step.lowered.stats, backward.stats]


def _counts(stats: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(s["hit"], s["miss"], s["bypass"]) for s in stats]


@wide
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Gradients are checked in both: by what was compiled and by what came out of the cache. GPT-2: dropout, whose counters are operands of the layers."""
    n, sizes = 2, (2,)
    for seen in (0, 1):
        got = run(_step, n, "gpt2", sizes, "fsdp", str(tmp_path), timeout=500)
        assert [_counts(s) for s in got] == [[(seen, 1 - seen, 0)] * 2] + [[(1, 0, 0), (1, 0, 0)]] * (n - 1)
        for s in got[0]:
            assert s["layers"] >= LAYERS - 2 and s["distinct_layers"] == 1, s


def _fails_on_first() -> str:
    def work() -> int:
        raise RuntimeError("no compiler here")

    try:
        CompileOnce("here", list(range(dist.get_world_size()))).run(work)
    except (AutoparError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_a_failure_reaches_every_rank() -> None:
    first, *others = run(_fails_on_first, 3, timeout=60)
    assert first == "RuntimeError: no compiler here"
    for o in others:
        assert o.startswith("AutoparError: compiling failed on the first rank") and "no compiler here" in o


def _first_never_comes(late_s: float, done: str) -> tuple[str, float]:
    compile_cache.LATE_S = late_s
    if dist.get_rank() == 0:
        while not Path(done).exists():
            time.sleep(0.05)
        return "", 0.0
    start = time.monotonic()
    try:
        CompileOnce("here", list(range(dist.get_world_size()))).run(lambda: 1)
    except AutoparError as e:
        return str(e), time.monotonic() - start
    finally:
        Path(done).touch()
    return "no error", 0.0


def test_nobody_waits_for_a_rank_that_never_comes(tmp_path: Path) -> None:
    _, (problem, waited_s) = run(_first_never_comes, 2, 1.0, str(tmp_path / "done"), timeout=60)
    assert "no sign of life for 1 s" in problem and waited_s >= 1.0


def test_nobody_waits_for_a_rank_that_dies_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "SILENCE_S", 1.0)
    store = dist.HashStore()
    store.add("k.alive", 3)
    assert compile_cache._wait(store, "k") == "it has given no sign of life for 1 s"


def test_a_slow_compilation_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the silence that counts as death: the heartbeat keeps the others waiting."""
    monkeypatch.setattr(compile_cache, "SILENCE_S", 1.0)
    monkeypatch.setattr(compile_cache, "BEAT_S", 0.1)
    store = dist.HashStore()

    def compiles() -> None:
        with compile_cache._beating(store, "k.alive"):
            time.sleep(2.5)
            store.set("k", "")

    thread = threading.Thread(target=compiles)
    thread.start()
    assert compile_cache._wait(store, "k") == ""
    thread.join()
