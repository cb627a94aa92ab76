"""Progress on stderr: a line for every stage that is done, and what is done now beside a spinner."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from autopar.cli.voice import voice
from autopar.text.stages import Begun, Note


class Screen:
    """Used as `with Screen("planning") as screen`, it is what `progress=` of the planner takes: called with a stage's name and its seconds."""

    def __init__(self, doing: str) -> None:
        self.doing, self.began = doing, time.monotonic()
        self.console = Console(stderr=True, highlight=False, quiet=not voice().tells)
        self.now, self.since = doing, self.began
        self.status = self.console.status(_Now(self))

    def __enter__(self) -> Screen:
        self.status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.status.stop()

    def __call__(self, stage: str, seconds: float) -> None:
        if isinstance(stage, Begun):
            self.now, self.since = f"{self.doing}: {stage}", time.monotonic()
        else:
            self.line(f"  {stage}" if isinstance(stage, Note) else f"{stage}: {seconds:.1f} s")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def timed(self, text: str) -> None:
        """With the seconds since it began."""
        self.line(f"{time.monotonic() - self.began:5.1f} s  {text}")


class _Now:
    """What is done now and for how long: looked at whenever the spinner turns, since the solver tells nothing while it runs."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def __rich__(self) -> str:
        return f"{self.screen.now}, {time.monotonic() - self.screen.since:.0f} s"
