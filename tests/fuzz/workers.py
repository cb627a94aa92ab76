"""A process that checks programs for another one, which outlives its crashes and ends its hangs.

One line of JSON in: a seed or a program's text, with what to do; one line out. What the program prints goes elsewhere.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.check import Outcome, check
from tests.fuzz.generate import generate
from tests.fuzz.settings import Setting, Wanted, draw
from tests.fuzz.shrink import shrink

PROGRAMS = 500  # a worker's, before a fresh one takes over: what torch caches adds up
GRACE_S = 90.0


class Worker:
    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.left = 0

    def ask(self, task: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; {"died": why} where the process ended or did not answer."""
        if self.process is None or self.left <= 0:
            self.close()
            root = Path(__file__).parents[2]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.workers"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            self.left = PROGRAMS
        self.left -= 1
        p = self.process
        assert p.stdin is not None and p.stdout is not None
        try:
            p.stdin.write(json.dumps(task) + "\n")
            p.stdin.flush()
            ready, _, _ = select.select([p.stdout], [], [], seconds + GRACE_S)
            line = p.stdout.readline() if ready else ""
        except BrokenPipeError:
            line, ready = "", [p.stdout]
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if ready:
            code = p.wait()
            self.process = None
            return {"died": f"ended with {code}"}
        self.close()
        return {"died": "did not answer"}

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Checks one program; where it fails, makes it small if asked to. eager: runs it in eager PyTorch alone. source: this text, under these settings."""
    if "source" in task:
        return _told(check(task["source"], [Setting.of(s) for s in task["settings"]], patience=5))
    seed = task["seed"]
    program, refused = generate(seed, frozenset(task["without"]))
    settings = [] if task.get("eager") else draw(random.Random(seed), Wanted(**task["wanted"]))
    found = check(program.source, settings)
    out = _told(found) | {"statements": dict(refused), "source": program.source, "settings": [s.as_dict() for s in settings]}
    if found.failure is not None and found.setting is not None:
        setting = found.setting
        small = program
        if task["shrink_s"] and found.failure.kind not in task["seen"]:
            small, setting = shrink(program, setting, found.failure.kind, task["shrink_s"])
        failure = found.failure
        if small is not program:
            failure = check(small.source, [setting]).failure or failure
        out |= {"failure": asdict(failure), "setting": setting.as_dict(), "small": small.source}
    return out


def _told(found: Outcome) -> dict[str, Any]:
    out: dict[str, Any] = {"unfit": found.unfit, "equal": found.equal, "refused": dict(found.refused), "seconds": found.seconds}
    if found.failure is not None and found.setting is not None:
        out |= {"failure": asdict(found.failure), "setting": found.setting.as_dict()}
    return out


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    gc.set_threshold(100_000, 20, 50)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            found = answer(task)
        except Exception:
            found = {"died": f"the fuzzer: {traceback.format_exc()}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
