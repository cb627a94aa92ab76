"""Triton kernels against their torch forms: on a GPU, by `make gpu-check`; else in Triton's interpreter, which has to be asked for before triton is imported, so in a process of its own
(`tests/unit/test_triton_kernels.py`). Elsewhere there is nothing here to run."""

from __future__ import annotations

from tests.kernels.where import INTERPRETED, RUNS

collect_ignore_glob = [] if RUNS else ["test_*.py"]

if INTERPRETED:
    from tests.kernels.interpreter import repair

    repair()
