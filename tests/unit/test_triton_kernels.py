"""Triton kernels without a GPU: run in its interpreter against torch, compiled for GPUs that are not here without a spilled register, and left out where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from autopar._torch.cuda_code import resources
from autopar.kernels import triton as kernels
from autopar.kernels.gate_forms import GateForm
from tests.conftest import ROOT


def test_interpreted() -> None:
    """In a process of its own: triton has to be told before it is imported."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# ---- compiled for what is not here ---------------------------------------------------------------------------------

TARGETS = {"sm80": ("cuda", 80, 32), "sm90": ("cuda", 90, 32), "sm100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}


def statistics(dtype: torch.dtype) -> None:
    from autopar.kernels.triton import scores

    x, rows = torch.empty(8, 4096, dtype=dtype), [torch.empty(8) for _ in range(4)]
    target = torch.empty(8, dtype=torch.int64)
    scores.add_statistics(x, target, 4096, 1.0, 0.0, rows[0], None, *rows[2:])
    scores.add_statistics(x, target, 4096, 0.5, 30.0, *rows)


def gradient(dtype: torch.dtype) -> None:
    from autopar.kernels.triton import scores

    x, rows = torch.empty(8, 4096, dtype=dtype), [torch.empty(8) for _ in range(4)]
    target = torch.empty(8, dtype=torch.int64)
    scores.gradient(x, target, 4096, 1.0, 0.0, rows[0], rows[1], None, rows[3])
    scores.gradient(x, target, 4096, 0.5, 30.0, *rows)


def merge(dtype: torch.dtype) -> None:
    from autopar.kernels.triton import merge

    for d in (64, 128, 256):
        out, other, lse = torch.empty(2, 4, 128, d), torch.empty(2, 4, 128, d, dtype=dtype), torch.empty(2, 4, 128)
        merge.merge(out, lse, out, lse, other, lse)


def gate(dtype: torch.dtype) -> None:
    from autopar.kernels.triton import gate

    h, r, s = torch.empty(8, 4096, dtype=dtype), torch.empty(8, 2048, dtype=dtype), torch.empty(8, 1)
    for form in (GateForm("swish", True, True), GateForm("swish", False, True, 1.702, 7.0, 1.0), GateForm("gelu", True, True)):
        gate.forward(form, h)
        gate.backward(form, h, r, s)


def combine(dtype: torch.dtype) -> None:
    from autopar.kernels.triton import combine

    y, place = torch.empty(64, 4096, dtype=dtype), torch.empty(8, 8, dtype=torch.int64)
    for scores in (torch.empty(8, 8), None):
        combine.combine(y, place, scores, dtype)


CALLS: dict[str, tuple[Callable[[torch.dtype], None], int]] = {
    "statistics": (statistics, 2), "gradient": (gradient, 2), "merge": (merge, 3), "gate": (gate, 6), "combine": (combine, 2),
}  # fmt: skip


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A driver that says it has such a GPU. Kernels keep what they compiled by the number of the device."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    gpu, number = GPUTarget(*TARGETS[request.param]), list(TARGETS).index(request.param)
    driver = types.SimpleNamespace(get_current_target=lambda: gpu, get_current_device=lambda: number, get_current_stream=lambda device: 0)
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.wide)], ids=str)
@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_without_spills(name: str, target: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would be launched. Of a thread's local memory (STACK), which spilled registers take, nothing: the number of registers does not tell."""
    from autopar.kernels.triton import combine, gate, merge, scores

    made = []

    def compiled(kernel: object, grid: object, on: object, *operands: object, **options: object) -> None:
        made.append(kernel.warmup(*operands, grid=grid, **options))  # type: ignore[attr-defined]

    for module in (combine, gate, merge, scores):
        monkeypatch.setattr(module, "launch", compiled)
    call, number = CALLS[name]
    call(dtype)
    assert len(made) == number
    for kernel in made:
        if "cubin" in kernel.asm:
            found = resources(name, kernel.asm["cubin"], tmp_path)
            assert found.stack == 0 and 0 < found.registers <= 255, found
        else:
            text = kernel.asm["amdgcn"]
            for what in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
                assert [line.split()[-1] for line in text.splitlines() if line.strip().startswith(what + ":")] == ["0"], what


# ---- where they do not run -----------------------------------------------------------------------------------------


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert "cpu" in kernels.why_not(cpu, torch.float32)
    assert "float64" in kernels.why_not(gpu, torch.float64)
    monkeypatch.setattr(torch.version, "hip", None)
    kernels._unlisted.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert "7.5" in kernels.why_not(gpu, torch.float32)
    kernels._unlisted.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    kernels._missing.cache_clear()
    with mock.patch.dict(sys.modules, {"triton": None}):
        assert "cannot be imported" in kernels.why_not(gpu, torch.float32)
    for version, word in (("3.1.0", "older than 3.6"), ("3.10.0", "")):
        kernels._missing.cache_clear()
        with mock.patch.dict(sys.modules, {"triton": types.SimpleNamespace(__version__=version)}):
            assert word in kernels.why_not(gpu, torch.float32) and bool(word) == bool(kernels.why_not(gpu, torch.float32))
    monkeypatch.setenv("AUTOPAR_TRITON", "0")
    assert "AUTOPAR_TRITON" in kernels.why_not(gpu, torch.float32)
    kernels._missing.cache_clear()
    kernels._unlisted.cache_clear()


def test_imported_by_the_first_kernel() -> None:
    """Not with autopar, nor with the operators that use it."""
    code = "import sys, autopar, autopar.kernels.loss_head, autopar.kernels.experts, autopar.kernels.ring; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
