"""Sizes that vary from call to call, and the sizes that stand for them while a program is planned and rewritten.

A size that varies is counted in units of `step`: what the mesh may split of it (the batch) comes in whole units, the rest (a sequence) in units of one. The number of
units is a **prime** that divides no constant size of the program. So no mesh axis divides it, and it stays whole without being told to; and in any size that the program
makes of it and of constants, the part that varies can be read off the factors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LEAST = 11  # a smaller prime is a factor of too many constants


@dataclass(frozen=True)
class Varying:
    """dims: (input, dim), all of which have this size. step: it is a multiple of that. most: the largest size seen or stated. units: how many stand for it."""

    dims: tuple[tuple[int, int], ...]
    step: int
    most: int
    units: int = 0

    @property
    def size(self) -> int:
        """The size that the plan is made for."""
        return self.units * self.step

    def counted(self, size: int) -> int:
        """How many units `size` is; 0 where it is no whole number of them."""
        return 0 if size % self.step else size // self.step

    def said(self, names: Iterable[str]) -> str:
        """For people. names: of the call's tensors."""
        named = list(names)
        dims = ", ".join(f"{named[i]} dim {d}" for i, d in self.dims[:3]) + (
            f" and {len(self.dims) - 3} more" if len(self.dims) > 3 else ""
        )
        return f"{dims} of {self.size} (sizes up to {self.most} were seen or stated)"


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes_about(most: int) -> Iterator[int]:
    """Primes to stand for sizes of at most `most`: the largest of them first, down to a half, then those above."""
    top = max(most, LEAST)
    below = range(top, max(top // 2, LEAST - 1), -1)
    return filter(is_prime, itertools.chain(below, itertools.count(top + 1)))


def with_units(varying: Iterable[Varying], constants: Iterable[int]) -> tuple[Varying, ...]:
    """Each with a prime of its own that divides none of `constants`."""
    avoid = {n for n in constants if n > 1}
    out: list[Varying] = []
    for v in varying:
        units = next(p for p in primes_about(v.most // v.step) if all(n % p for n in avoid))
        avoid.add(units)
        out.append(Varying(v.dims, v.step, v.most, units))
    return tuple(out)


def others(varying: tuple[Varying, ...], constants: Iterable[int], number: int) -> Iterator[tuple[int, ...]]:
    """Further numbers of units, `number` times, that could stand for the sizes as well."""
    avoid = {n for n in constants if n > 1} | {v.units for v in varying}
    for _ in range(number):
        found = []
        for v in varying:
            units = next(p for p in primes_about(v.units) if all(n % p for n in avoid))
            avoid.add(units)
            found.append(units)
        yield tuple(found)
