"""How much memory of this machine can be had."""

from __future__ import annotations

import os
from pathlib import Path

_MEMORY, _GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Of the machine, and of the limits of this process's control groups (cgroup v2), the least. Where there is no /proc, pages that nothing is in."""
    if not _MEMORY.exists():
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [int(line.split()[1]) * 1024 for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:")]
    return min([*found, *_left_of_groups()], default=1 << 62)


def _left_of_groups() -> list[int]:
    found: list[int] = []
    try:
        path = next((line[3:] for line in _GROUP.read_text().splitlines() if line.startswith("0::")), "").strip("/")
        for folder in (_GROUPS / path, *(_GROUPS / path).parents):
            most, used = folder / "memory.max", folder / "memory.current"
            if most.exists() and (limit := most.read_text().strip()) != "max":
                cache = [
                    int(line.split()[1]) for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")
                ]
                found.append(int(limit) - int(used.read_text()) + sum(cache))
    except (OSError, ValueError):
        return found
    return found
