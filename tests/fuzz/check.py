"""One program, under a few settings: the outcome of each."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError
from tests.fuzz.judge import Failure, Reference, Unfit, failure_of
from tests.fuzz.run import Trial, eager
from tests.fuzz.settings import Setting

SECONDS = {"aot_eager": 40, "inductor": 150}


class Hang(Exception):
    """A step did not end."""


@dataclass
class Outcome:
    """Of one program. failure, training: the first that failed."""

    source: str = ""
    unfit: str = ""
    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None
    setting: Setting | None = None
    seconds: float = 0.0


def check(source: str, settings: Sequence[Setting], reference: Reference | None = None, patience: int = 1) -> Outcome:
    """patience: how many times as long as a small program a step may take."""
    out, start = Outcome(source), time.perf_counter()
    try:
        with _limit(SECONDS["aot_eager"] * patience):
            reference = reference or Reference.of(source)
    except Unfit as e:
        out.unfit = str(e)
        return out
    trial = Trial(source)
    for s in settings:
        try:
            with _limit(SECONDS[s.backend] * patience * (3 if s.layout == "plan" else 1)):
                out.failure = reference.compare(trial.run(s))
        except AutoparError as e:
            out.refused[message_class(e)] += 1
            if trial.captured is None:
                break
            continue
        except Exception as e:
            out.failure = failure_of(e)
        finally:
            _tidy()
        if out.failure is not None and out.failure.kind.endswith("value") and _depends_on_layout(reference, source):
            out.failure, out.unfit = None, "eager's numbers depend on how operands lie"
            break
        if out.failure is not None and out.failure.kind.endswith("value") and _right_in_double(source, s, patience):
            out.failure, out.unfit = None, "rounds otherwise in single precision, and is right in double"
            break
        if out.failure is not None:
            out.setting = s
            break
        out.equal += 1
    out.seconds = time.perf_counter() - start
    return out


def _right_in_double(source: str, s: Setting, patience: int) -> bool:
    """Of a program in single precision: the formulas are eager's, or as good (attention by its log-sum-exp)."""
    double = re.sub(r"^D = torch\.float32$", "D = torch.float64", source, flags=re.M)
    if double == source or ".float()" in source:
        return False
    try:
        with _limit(SECONDS[s.backend] * patience * 3):
            return Reference.of(double).compare(Trial(double).run(s)) is None
    except Exception:
        return False
    finally:
        _tidy()


def _depends_on_layout(reference: Reference, source: str) -> bool:
    """Whether eager is wrong by itself."""
    with _limit(SECONDS["aot_eager"]):
        return reference.compare(eager(source, dense=True)) is not None


def message_class(e: AutoparError) -> str:
    """The kind of message: without names and numbers."""
    text = re.sub(r"\b(M|v\d+|x\d+|\d[\d.e+-]*)\b|'[^']*'", "_", e.what.splitlines()[0] if e.what else "")
    return f"{type(e).__name__}: {text[:110]}"


def _tidy() -> None:
    """What failed may have left its world open."""
    if dist.is_initialized():
        _torch.unalias_process_groups()
        dist.destroy_process_group()


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Of seconds on a machine of one's own: where others take the processor, up to five times as long."""
    began, used = time.perf_counter(), time.process_time()

    def late(*_: Any) -> None:
        if time.process_time() - used < seconds / 2 and time.perf_counter() - began < 5 * seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    # Whoever set the timer before (pytest's timeout does) gets it back.
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
