"""Shared by all tests: one thread a process (ranks and xdist workers share the cores), reproducible property tests, a launcher."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["AUTOPAR_CACHE"] = "0"  # what is tested is the planner that there is now; tests of the cache name a folder

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.wide import Turn

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)
# Graphs of torch and of the planner are many small objects that live long: looking through them for garbage is an eighth of all tests' time otherwise.
gc.set_threshold(50_000, 20, 100)
# The same examples on every machine and run; a slow first call (imports, tracing) is no failure.
hypothesis.settings.register_profile("autopar", derandomize=True, deadline=None)
hypothesis.settings.load_profile("autopar")

Torchrun = Callable[..., str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", default="0/1", help="k/n: of the wide tests, the k-th of n parts, from 0 on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = Turn.of(config.getoption("--turn"))
    out = [i for i in items if i.get_closest_marker("wide") is not None and not turn.has(i.nodeid)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in set(out)]


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A process group of this process alone, gone when the file's tests are over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    """Runs a script on `processes` gloo processes as a user would, and returns what it printed; a failure shows all of it."""

    def run(script: str, *args: str, processes: int = 2, timeout_s: float = 300) -> str:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run(
            [*launcher, str(ROOT / script), *args], cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{script} {' '.join(args)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
