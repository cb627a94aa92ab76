"""How much a command says besides its result: progress on stderr, and what the libraries below it print.

Usually stages and their seconds, where somebody looks at a terminal; nothing where stderr goes to a file. `-v` says them anyway, with all that libraries
print: HiGHS's own lines, torch's and transformers' warnings. `-q` leaves only the result and errors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Annotated, Any

import typer

from autopar.cli import options
from autopar.errors import AutoparError
from autopar.text import log


class Voice(Enum):
    QUIET = "quiet"
    USUAL = "usual"
    LOUD = "loud"

    @property
    def tells(self) -> bool:
        """Whether progress is told."""
        return self is Voice.LOUD or (self is Voice.USUAL and sys.stderr.isatty())


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="tell progress also where stderr is no terminal, and all that libraries print")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="tell no progress")]
_voice: ContextVar[Voice] = ContextVar("voice", default=Voice.USUAL)


def voice() -> Voice:
    """Of the command that runs."""
    return _voice.get()


def voiced(run: Callable[..., None]) -> Callable[..., None]:
    """The command `run` with -v and -q, and without what libraries print."""

    @functools.wraps(run)
    def command(*args: Any, verbose: bool = False, quiet: bool = False, **kwargs: Any) -> None:
        if verbose and quiet:
            raise AutoparError("--verbose and --quiet ask for opposite things", where="-v -q", fix="give one of them")
        token = _voice.set(Voice.LOUD if verbose else Voice.QUIET if quiet else Voice.USUAL)
        try:
            with _libraries(verbose), _stdout_of_ours(verbose) if options.alone else contextlib.nullcontext():
                run(*args, **kwargs)
        finally:
            _voice.reset(token)

    signature = inspect.signature(run, eval_str=True)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("verbose", Verbose), ("quiet", Quiet))
    ]
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])  # type: ignore[attr-defined]
    command.__annotations__ = {**{p.name: p.annotation for p in signature.parameters.values()}, "verbose": Verbose, "quiet": Quiet}
    del command.__wrapped__  # whose options would be taken for this one's
    return command


@contextlib.contextmanager
def _libraries(loud: bool) -> Iterator[None]:
    """Their warnings and loggers. What they warn of is a matter between them and us: nothing that the user wrote."""
    if loud and options.alone and not os.environ.get(log.VARIABLE):
        os.environ[log.VARIABLE] = "info"  # processes that are started see it too
        log.set_up()
    if loud or os.environ.get(log.VARIABLE):
        yield
        return
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _stdout_of_ours(loud: bool) -> Iterator[None]:
    """Python's stdout stays what it is; what C libraries print there (HiGHS does, whatever its options) goes to stderr or nowhere: the result, which a
    program may read, is alone."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    theirs = os.dup(2) if loud else os.open(os.devnull, os.O_WRONLY)
    ours, before = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors), sys.stdout
    os.dup2(theirs, 1)
    os.close(theirs)
    sys.stdout = ours
    try:
        yield
    finally:
        sys.stdout = before
        with contextlib.suppress(BrokenPipeError):
            ours.flush()
        os.dup2(kept, 1)
        with contextlib.suppress(BrokenPipeError):
            ours.close()
