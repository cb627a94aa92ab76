"""Inductor's code for a CUDA GPU, and what ptxas makes of its Triton kernels, on a machine that has none. Needs triton, and no driver.

Inductor is told of an H100: the code that it writes is taken before it would be loaded. Products and attention are calls of libraries, and stay such.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# What Inductor asks of a device's properties.
_H100 = {
    "name": "NVIDIA H100 80GB HBM3", "multi_processor_count": 132, "total_memory": 80 << 30, "warp_size": 32, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 50 << 20, "gcnArchName": "", "uuid": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """In the configuration that spills least. stack: bytes of a thread's local memory, which spilled registers take (and sines of large numbers); error: of the compiler,
    in any configuration: a GPU compiles all of them before it tries which is fastest."""

    name: str
    registers: int = 0
    stack: int = 0
    shared: int = 0
    error: str = ""


class _TakenError(Exception):
    """The code is there; nothing is to be loaded."""


@contextlib.contextmanager
def codes_for_cuda(capability: int = 90) -> Iterator[list[str]]:
    """While open, graphs on fake CUDA tensors that Inductor compiles end in `_TakenError`, and their code is in the list. capability: 80, 90 or 100."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    triton, target = (
        importlib.import_module("triton"),
        importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32),
    )
    card = types.SimpleNamespace(major=capability // 10, minor=capability % 10, **_H100)
    _guard()
    known: dict[str, Any] = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1, "get_device_properties": lambda device=None: card,
        "get_compute_capability": lambda device=None: capability, "get_raw_stream": lambda device: 0, "synchronize": lambda device=None: None,
        "is_bf16_supported": lambda including_emulation=False: True, "memory_allocated": lambda *_: 0,
        "is_triton_capable": lambda device=None: True, "raise_if_triton_unavailable": lambda device=None: None,
    }  # fmt: skip
    asked: dict[str, Any] = {
        "get_device_properties": lambda device=None: card, "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name, "current_device": lambda: 0, "device_count": lambda: 1, "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
    }  # fmt: skip
    driver = types.SimpleNamespace(
        get_current_target=lambda: target, get_active_torch_device=lambda: torch.device("cuda", 0), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, get_device_interface=lambda: torch.cuda,
        utils=types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}),
    )  # fmt: skip
    found: list[str] = []

    def taken(lowering: Any, *_: Any, **__: Any) -> Any:
        wrapper, _kernels = lowering.codegen()
        found.append(wrapper.value if hasattr(wrapper, "value") else wrapper[0])
        raise _TakenError

    launchers = {n: False for n in ("use_static_cuda_launcher", "use_static_triton_launcher") if hasattr(config, n)}
    helpers = importlib.import_module("torch._inductor.runtime.triton_helpers")
    with contextlib.ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(known[name])))
        for name, value in asked.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", taken))
        stack.enter_context(mock.patch.object(helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(config.patch({**launchers, "fx_graph_cache": False, "compile_threads": 1, "worker_start_method": "subprocess"}))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        yield found


@functools.cache
def _guard() -> None:
    """Methods of Tensor (copy_, contiguous) on fake CUDA tensors enter a device guard, of which torch's CPU build has none, and refuses. Decompositions call them.

    silu_backward, whose CUDA kernel is missing there, is decomposed in C++ to such. For the rest of the process, as torch does where it has CUDA but no device.
    """
    if torch.backends.cuda.is_built():
        if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            torch._C._ensureCUDADeviceGuardSet()
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths

    text = """#include <c10/core/impl/DeviceGuardImplInterface.h>
        C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)"""
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "guard.so")
        include = [f"-I{path}" for path in include_paths()]
        command = [get_cpp_compiler(), "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", *include, f"-L{libraries}", "-lc10", "-o", made]
        subprocess.run(command, input=text, text=True, check=True)
        ctypes.CDLL(made)  # stays loaded when the file is gone


def is_taken(error: BaseException | None) -> bool:
    """Whether a compilation ended because its code was taken, however that was wrapped on the way."""
    while error is not None:
        if isinstance(error, _TakenError) or "_TakenError" in repr(error):
            return True
        error = error.__cause__
    return False


def kernels_of(code: str, folder: Path) -> list[Kernel]:
    """The Triton kernels of Inductor's `code`, compiled in every configuration that a GPU would try. folder: for their sources. While `codes_for_cuda` is open."""
    sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)
    return [_compiled(name, source, folder) for name, source in dict(sources).items()]


def _compiled(name: str, source: str, folder: Path) -> Kernel:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel, tried = getattr(module, name), list[Kernel]()
    for config in kernel.configs:
        try:
            made = kernel._precompile_config(config).kernel
        except Exception as e:
            return Kernel(name, error=str(e).strip().splitlines()[-1])
        tried.append(resources(name, made.asm["cubin"], folder))
    return min(tried, key=lambda k: k.stack)


def resources(name: str, cubin: bytes, folder: Path) -> Kernel:
    """As cuobjdump says, which comes with triton."""
    path = folder / f"{name}.cubin"
    path.write_bytes(cubin)
    tool = os.path.join(os.path.dirname(importlib.import_module("triton").__file__ or ""), "backends", "nvidia", "bin", "cuobjdump")
    said = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    registers, stack, shared = (int(x) for x in re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)[0])
    return Kernel(name, registers, stack, shared)
