"""The programs of a module: steps that were captured and compiled, and which of them a call is.

A call's kind is all that its program depends on besides sizes and Python state. Of a kind there are programs for one size and programs for all sizes of some dims
(`autopar.runtime.general`). Both are bounded: those for one size that were not used for longest are released.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.capture.capture import Call, Shapes
from autopar.runtime.python_state import Content
from autopar.runtime.sizes import SizesSeen, units_of
from autopar.runtime.step import Step

FIXED = 16  # programs of one kind that are for one size each
GENERAL = 4  # programs of one kind for all sizes of some dims
SIZED = 256  # of a general program


@dataclass
class Program:
    """A step, and the Python state it was captured with; version: the latest state that is the same to it. shapes: of the call, or those that stand for all."""

    step: Step
    content: Content
    version: int
    shapes: Shapes
    sized: dict[tuple[int, ...], Step] = field(default_factory=dict)

    @property
    def is_general(self) -> bool:
        return self.step.general is not None

    def at(self, shapes: Shapes) -> Step | None:
        """The step for a call of these shapes; None where this is no program of it."""
        general = self.step.general
        if general is None:
            return self.step if shapes == self.shapes else None
        units = units_of(general.family.varying, self.shapes, shapes)
        if units is None or not self.step.holds(units):
            return None
        if units not in self.sized:
            self.sized[units] = self.step.sized(units)
            while len(self.sized) > SIZED:
                del self.sized[next(iter(self.sized))]
        return self.sized[units]


@dataclass(frozen=True)
class Counts:
    """captured: how often a model's call was captured; general: of those, programs for all sizes of some dims; fixed: programs for one size that are kept; released: that were
    given up for others."""

    captured: int = 0
    general: int = 0
    fixed: int = 0
    released: int = 0


class Programs:
    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic
        self.kinds: dict[Any, list[Program]] = {}
        self.sizes: dict[Any, SizesSeen] = {}
        self.captured, self.released = 0, 0
        self.told = False

    def clear(self) -> None:
        """Forgets all programs, but not which sizes vary."""
        self.kinds.clear()

    def steps(self) -> Iterator[Step]:
        return (p.step for programs in self.kinds.values() for p in programs)

    def counts(self) -> Counts:
        there = [p for programs in self.kinds.values() for p in programs]
        general = sum(p.is_general for p in there)
        return Counts(self.captured, general, len(there) - general, self.released)

    def of(self, kind: Any, shapes: Shapes) -> list[Program]:
        """Those of calls of this kind and size, whatever Python state they were captured with."""
        return [p for p in self.kinds.get(kind, ()) if p.at(shapes) is not None]

    def used(self, kind: Any, program: Program) -> None:
        programs = self.kinds[kind]
        programs.remove(program)
        programs.append(program)

    def seen(self, call: Call, constants: Any) -> SizesSeen:
        """What is known of the sizes of such calls, in training and in evaluation."""
        key = (call.spec, constants, tuple((t.dim(), t.dtype) for t in call.tensors))
        return self.sizes.setdefault(key, SizesSeen(self.dynamic))

    def may_generalize(self, kind: Any) -> bool:
        return sum(p.is_general for p in self.kinds.get(kind, ())) < GENERAL

    def add(self, kind: Any, program: Program, say: Callable[[], str]) -> None:
        """say: what to tell, once, when programs are given up."""
        programs = self.kinds.setdefault(kind, [])
        programs.append(program)
        self.captured += 1
        fixed = [p for p in programs if not p.is_general]
        if len(fixed) > FIXED:
            programs.remove(fixed[0])
            self.released += 1
            if not self.told:
                self.told = True
                warnings.warn(say(), stacklevel=5)
