"""Parts of docs/benchmarks.md: tables, sizes, and where numbers are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(results: dict[str, Result], *names: str) -> str:
    """Where numbers are from, and the commands that make them again."""
    lines = ["Measured again by:", "", *(f"    {results[n]['command']}" for n in names), ""]
    machines = sorted({(results[n]["device"], results[n]["torch"], results[n]["python"]) for n in names})
    files = listed([f"`benchmarks/results/{n}.json`" for n in names])
    where = listed([f"{device}, torch {torch}, Python {python}" for device, torch, python in machines])
    return "\n".join([*lines, f"Results: {files}. Machine: {where}."])


def share(x: float) -> str:
    return f"{x:.1%}"


def size(n: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:,.2f} {name}"
    return f"{n:.0f} B"


def listed(words: Sequence[str]) -> str:
    words = list(words)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def case(text: str) -> str:
    """ "llama3-8b,h100:8x8,64,64" for people."""
    model, cluster, mesh, batch, *more = text.split(",")
    return ", ".join([model, cluster, mesh, batch, *more])
