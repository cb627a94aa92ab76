"""`python -m autopar.run --nproc-per-node 4 train.py ...`: starts a program on this node so that its workers can survive each other (`autopar.elastic.supervisor`)."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from autopar.elastic.supervisor import Supervisor, started
from autopar.errors import AutoparError


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m autopar.run", description="Starts workers of a training program that may lose some of them."
    )
    p.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True, metavar="N", help="workers on this node")
    p.add_argument("--min-procs", type=int, default=None, metavar="K", help="how many must be left for the run to go on (default: 1)")
    p.add_argument("--limit-s", type=float, default=None, metavar="S", help="end the run after so many seconds")
    p.add_argument("-m", "--module", action="store_true", help="the program is a module, as with python -m")
    p.add_argument("program", help="a Python file, or with -m a module")
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all workers that were left trained to the end."""
    asked = parser().parse_args(arguments)
    least = 1 if asked.min_procs is None else asked.min_procs
    if not 1 <= least <= asked.nproc_per_node:
        raise AutoparError(
            f"--min-procs {least} of --nproc-per-node {asked.nproc_per_node}",
            where="python -m autopar.run",
            fix="both from 1, the first no larger",
        )
    command = [*(["-m"] if asked.module else []), asked.program, *asked.arguments]

    def tell(line: str) -> None:
        print(f"autopar.run: {line}", file=sys.stderr, flush=True)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # ends the workers, by `Supervisor.run`

    signal.signal(signal.SIGTERM, end)
    return Supervisor(started(command), asked.nproc_per_node, least, tell).run(asked.limit_s)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except AutoparError as e:
        raise SystemExit(f"autopar.run: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
