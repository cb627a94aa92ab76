"""README's plan, printed anew by the command that stands above it.

python -m benchmarks.readme
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
# The command, a blank line, and what it printed: all indented, as far as that goes.
PLAN = re.compile(r"^    \$ (autopar plan .+)\n\n((?:    .*\n)+)", re.M)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = README.read_text(encoding="utf-8")
    README.write_text(renewed(text, printed(command(text))), encoding="utf-8")


def command(text: str) -> str:
    return _found(text)[1]


def shown(text: str) -> str:
    """The plan that README shows."""
    return re.sub(r"^    ", "", _found(text)[2], flags=re.M)


def printed(command: str) -> str:
    """What the command prints now; it runs in an empty folder."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", *words], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def renewed(text: str, plan: str) -> str:
    start, end = _found(text).span(2)
    return text[:start] + "".join(f"    {line}\n" for line in plan.splitlines()) + text[end:]


def _found(text: str) -> re.Match[str]:
    found = PLAN.search(text)
    assert found, "README has no plan behind its command"
    return found


if __name__ == "__main__":
    main()
