"""`AUTOPAR_LOG=info`: how long each stage takes and what it decides, on stderr.

The logger is `logging.getLogger("autopar")`: a program that sets up logging of its own sees the same lines without the variable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

VARIABLE = "AUTOPAR_LOG"
log = logging.getLogger("autopar")


def set_up() -> None:
    """As the variable says; nothing without it."""
    level = os.environ.get(VARIABLE, "").upper()
    if level and level in logging.getLevelNamesMapping() and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s autopar %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(level)


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Says how long what is within takes."""
    start = time.perf_counter()
    yield
    log.info("%s: %.2f s", stage, time.perf_counter() - start)


set_up()
