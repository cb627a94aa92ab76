"""`make gpu-check`: runs the tests in this folder with whatever torch this interpreter has. Exits with 2 when there is no GPU to run them on."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> int:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print(f"no GPU: {sys.executable} has no torch; set GPU_PYTHON to an interpreter that has")
        return 2
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} of {sys.executable} sees none")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for name in ("autopar", "transformers", "pytest", "hypothesis"):
        importlib.import_module(name)
    import pytest

    return int(pytest.main(["-s", "-p", "no:cacheprovider", str(Path(__file__).parent)]))


if __name__ == "__main__":
    raise SystemExit(main())
