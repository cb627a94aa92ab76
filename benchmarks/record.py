"""What a kept result says of where it was measured."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any


def write(out: Path | None, command: str, result: dict[str, Any]) -> None:
    """`result` with the command, versions and machine, as JSON in `out` (nothing when None)."""
    import torch

    if out is None:
        return
    where = {
        "command": f"{command} {shlex.join(sys.argv[1:])}".strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    out.write_text(json.dumps({**where, **result}, indent=1) + "\n")
