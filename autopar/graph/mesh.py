"""The mesh the planner works on: named axes with sizes, torch-free.

The user's mesh axes are refined into prime factors: an axis `tp` of 8 becomes `tp.0`, `tp.1`,
`tp.2` of 2 each, major first. Then "2 key/value heads on 4 ranks" needs no special case: the heads are
split over `tp.0` and replicated over `tp.1`. Collectives over several refined axes are one collective
over the merged group, so refinement costs nothing at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Axis:
    """A refined mesh axis: `name`, its `size`, and the user's axis (`parent`) it is a factor of."""

    name: str
    size: int
    parent: str


@dataclass(frozen=True)
class Mesh:
    """Refined axes in rank order, major first: rank = sum of coordinate x stride."""

    axes: tuple[Axis, ...]

    @staticmethod
    def of(sizes: dict[str, int]) -> Mesh:
        """Refines the user's axes (name -> size, major first) into prime factors."""
        axes: list[Axis] = []
        for name, size in sizes.items():
            factors = primes(size)
            if len(factors) <= 1:
                axes.append(Axis(name, size, name))
            else:
                axes += [Axis(f"{name}.{i}", p, name) for i, p in enumerate(factors)]
        return Mesh(tuple(axes))

    @property
    def size(self) -> int:
        return math.prod(a.size for a in self.axes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {a.name: a.size for a in self.axes}

    @cached_property
    def widths(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def parents(self) -> dict[str, int]:
        """The user's axes: name -> size, in order."""
        out: dict[str, int] = {}
        for a in self.axes:
            out[a.parent] = out.get(a.parent, 1) * a.size
        return out

    def axis_size(self, name: str) -> int:
        return self.sizes[name]

    def sizes_product(self, names: tuple[str, ...]) -> int:
        return math.prod(self.axis_size(n) for n in names)

    def children(self, parent: str) -> tuple[str, ...]:
        """The refined axes of a user's axis, major first."""
        return tuple(a.name for a in self.axes if a.parent == parent)

    def sort(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """`names` in mesh order (major first)."""
        return tuple(a.name for a in self.axes if a.name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every refined axis."""
        out: dict[str, int] = {}
        for a in reversed(self.axes):
            rank, out[a.name] = divmod(rank, a.size)
        return out

    def groups(self, names: tuple[str, ...]) -> list[list[int]]:
        """Rank lists of the groups that vary along `names` only, each in ascending (mesh) order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            c = self.coordinates(rank)
            found.setdefault(tuple(v for k, v in c.items() if k not in names), []).append(rank)
        return list(found.values())


def primes(n: int) -> list[int]:
    """Prime factors, largest first, so that the first refined axis takes the largest share."""
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return sorted(out, reverse=True)
