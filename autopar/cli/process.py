"""What a process that is the command's own does, and one that the commands are called in does not: Ctrl-C, garbage, devices, streams."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from autopar.cli import options
from autopar.cli.options import INTERRUPTED


@contextlib.contextmanager
def of_its_own() -> Iterator[None]:
    """What is within has the process to itself."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    _heed_interrupts()
    options.alone = True
    if sys.argv[1:2] not in (["calibrate"], ["compile"]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no other command needs a device, and CUDA would not survive a fork
    with _little_collecting():
        yield


def _heed_interrupts() -> None:
    """Ends the process at Ctrl-C from a thread of its own: the solver and torch's compiler run long outside of Python, where the main thread learns of a
    signal only when they return, and in the middle of an import it may lose it. Nothing else is lost: files appear whole or not at all."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    ending = threading.Lock()

    def end(*_: Any) -> None:
        ending.acquire(timeout=1)  # never released: the main thread, if it too learns of it, waits here for the end
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the progress display hides it
        os.write(2, f"{show_cursor}interrupted\n".encode())
        os._exit(INTERRUPTED)

    def watch() -> None:
        while signals := os.read(read, 1):
            if signals[0] == signal.SIGINT:
                end()

    threading.Thread(target=watch, daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def _little_collecting() -> Iterator[None]:
    """Python's collector would look through torch's modules again and again, while they come, while they are used and once more at the end: for two of
    the eleven seconds that a plan used to take. What it frees of them is nothing."""
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.freeze()
