"""What `progress=` callables are called with, besides the names of stages that are done: kinds of text, so that who only wants seconds need not know them.

on_progress("capture", 2.4)               a stage is done, and took so long
on_progress(Begun("formulate"), 0.0)      a stage begins
on_progress(Note("bound 24.8 ms"), 0.0)   what is known by now
"""

from __future__ import annotations


class Begun(str):
    """The name of a stage that begins."""

    __slots__ = ()


class Note(str):
    """What a stage knows by now."""

    __slots__ = ()
