"""`python -m autopar.run --nproc-per-node 4 train.py ...`: starts a program so that its workers can survive each other (`autopar.elastic.supervisor`).

On several nodes, each runs it with its own --node-rank and the same --coordinator, which is a port of the first node.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from autopar.elastic.agent import Agent
from autopar.elastic.supervisor import Supervisor, started
from autopar.errors import AutoparError

WHERE = "python -m autopar.run"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m autopar.run", description="Starts workers of a training program that may lose some of them."
    )
    p.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True, metavar="N", help="workers on this node")
    p.add_argument("--nnodes", type=int, default=1, metavar="M", help="how many nodes there are (default: 1)")
    p.add_argument("--node-rank", "--node_rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    p.add_argument("--coordinator", default=None, metavar="HOST:PORT", help="a port of node 0 that all nodes reach")
    p.add_argument("--min-procs", type=int, default=None, metavar="K", help="how many must be left for the run to go on (default: 1)")
    p.add_argument("--rejoin", type=int, default=0, metavar="N", help="how often a lost process is started again, to join (default: 0)")
    p.add_argument("--limit-s", type=float, default=None, metavar="S", help="end the run after so many seconds")
    p.add_argument("-m", "--module", action="store_true", help="the program is a module, as with python -m")
    p.add_argument("program", help="a Python file, or with -m a module")
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all workers that were left trained to the end."""
    asked = parser().parse_args(arguments)
    least = 1 if asked.min_procs is None else asked.min_procs
    if least < 1 or asked.nproc_per_node < 1 or (asked.nnodes == 1 and least > asked.nproc_per_node):
        raise AutoparError(
            f"--min-procs {least} of --nproc-per-node {asked.nproc_per_node}",
            where=WHERE,
            fix="both from 1, the first no larger than there are processes on all nodes",
        )
    if not 0 <= asked.node_rank < asked.nnodes:
        raise AutoparError(
            f"--node-rank {asked.node_rank} of --nnodes {asked.nnodes}", where=WHERE, fix=f"a number from 0 to {max(0, asked.nnodes - 1)}"
        )
    if asked.rejoin < 0:
        raise AutoparError(f"--rejoin {asked.rejoin}", where=WHERE, fix="a number from 0: how often a lost process is started again")
    host, port = coordinator(asked.coordinator, asked.nnodes)
    command = [*(["-m"] if asked.module else []), asked.program, *asked.arguments]

    def tell(line: str) -> None:
        print(f"autopar.run: {line}", file=sys.stderr, flush=True)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # ends the workers, by `Supervisor.run`

    signal.signal(signal.SIGTERM, end)
    if asked.node_rank:
        return Agent(started(command), asked.nproc_per_node, asked.node_rank, host, port, tell).run()
    return Supervisor(started(command), asked.nproc_per_node, least, tell, host, port, asked.nnodes, rejoin=asked.rejoin).run(asked.limit_s)


def coordinator(given: str | None, nodes: int) -> tuple[str, int]:
    """Where the supervisor's store listens. Raises AutoparError."""
    if given is None and nodes == 1:
        return "127.0.0.1", 0
    host, colon, port = (given or "").rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise AutoparError(
            f"--coordinator {given}" if given else f"--nnodes {nodes} without --coordinator",
            where=WHERE,
            fix="give the name of node 0 and a free port there, the same on every node: --coordinator node0:29400",
        )
    return host, int(port)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except AutoparError as e:
        raise SystemExit(f"autopar.run: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
