"""What a first step does meanwhile: a line on stderr for every stage that is done, where somebody looks at a terminal.

With `AUTOPAR_LOG` the log says it instead, as far as its level goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

from autopar.text import log


@contextlib.contextmanager
def told(done: str, here: bool = True) -> Iterator[None]:
    """Says `done` ("captured", "planned") and the seconds that what is within takes. here: whether this is the rank that tells."""
    start = time.perf_counter()
    yield
    line = f"{done} in {time.perf_counter() - start:.1f} s"
    if not here or logging.root.manager.disable >= logging.INFO:  # a command with -q, a program that wants no logs
        return
    if os.environ.get(log.VARIABLE) or log.log.isEnabledFor(logging.INFO):
        log.log.info(line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"autopar: {line}", file=sys.stderr, flush=True)
