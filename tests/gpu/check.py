"""`make gpu-check`: runs the tests in this folder with whatever torch this interpreter has. Exits with 2 when there is no GPU to run them on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class AtOnce:
    """A failure is printed when it happens: where time is short, the run may be ended before its summary."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{report.nodeid} failed in {report.when}:\n{str(report.longrepr)[-4000:]}", flush=True)


def main() -> int:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print(f"no GPU: {sys.executable} has no torch; set GPU_PYTHON to an interpreter that has")
        return 2
    if os.environ.get("GPU_CHECK_DEVICE", "cuda") == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} of {sys.executable} sees none")
        return 2
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: a rehearsal"
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for name in ("autopar", "transformers", "pytest", "hypothesis"):
        importlib.import_module(name)
    import pytest

    from tests.gpu import branches

    branches.main()
    several = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    folder = Path(__file__).parent
    from autopar.kernels import triton

    reason = triton.why_not(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16)
    print(f"Triton kernels run: {'no, ' + reason if reason else 'yes'}")
    files = [
        folder,
        folder.parent / "kernels",
        *(folder.parent / "unit" / f"test_{name}.py" for name in ("attention", "loss_head")),
    ]  # which run on both
    return int(
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not wide", *several, *map(str, files), *sys.argv[1:]], plugins=[AtOnce()])
    )


if __name__ == "__main__":
    raise SystemExit(main())
