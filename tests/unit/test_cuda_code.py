"""Without a GPU: Inductor's CUDA code of a rewritten step is made, and every Triton kernel in it compiles. Where triton is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kernels_compile(name: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_code", "--models", name, "--dtype", "float32"], cwd=ROOT, capture_output=True, text=True
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith(name)]
    assert len(lines) == 2, done.stdout + done.stderr
    assert all(int(x.split()[2]) > 3 for x in lines), "kernels were counted"
    assert done.returncode == 0, done.stdout
