"""A program captured for all sizes of some dims of its inputs, which is an ordinary captured program at any of them.

dynamo and AOTAutograd trace it once, with symbols for the sizes that vary (`Varying`); what they assume of the symbols on the way, they note. Planner and passes see the
program at one size, without symbols (`at`): the sizes that stand for all are primes, so that a size that varies is taken for no constant, and no mesh axis divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import fx

from autopar import _torch
from autopar.graph.varying import Varying, others

C = TypeVar("C")
KEPT = 4  # programs at one size that are kept ready


class Family(Generic[C]):
    """finish: makes a captured program of the graph at some sizes, its fake mode and the numbers of units. constants: sizes of the program that do not vary.
    traced: what dynamo assumed of sizes (`_torch.TracedSizes`)."""

    def __init__(
        self,
        gm: fx.GraphModule,
        symbols: Any,
        varying: tuple[Varying, ...],
        constants: frozenset[int],
        traced: Any,
        finish: Callable[[fx.GraphModule, Any, tuple[int, ...]], C],
    ) -> None:
        self.gm, self.symbols, self.varying, self.constants, self._finish = gm, symbols, varying, constants, finish
        self._traced = traced
        self._made: dict[tuple[int, ...], C] = {}

    @property
    def units(self) -> tuple[int, ...]:
        """What stands for the sizes."""
        return tuple(v.units for v in self.varying)

    def holds(self, units: tuple[int, ...]) -> bool:
        """Whether the program is the user's at these sizes, too."""
        sizes = {dim: v.step * n for v, n in zip(self.varying, units, strict=True) for dim in v.dims}
        return bool(self.symbols.hold(units) and self._traced.hold(lambda i, d: sizes[i, d]))

    def then(self, change: Callable[[C], C]) -> Family[C]:
        """The family of what `change` makes of this one's programs, at any sizes."""
        finish = self._finish
        return Family(
            self.gm, self.symbols, self.varying, self.constants, self._traced, lambda gm, mode, units: change(finish(gm, mode, units))
        )

    def others(self, number: int) -> Iterator[tuple[int, ...]]:
        """Up to so many further numbers of units that could stand for the sizes."""
        return (u for u in others(self.varying, self.constants, 4 * number) if self.holds(u))

    def at(self, units: tuple[int, ...]) -> C:
        """The program at these sizes, as if it had been captured for them alone."""
        if units not in self._made:
            mode = _torch.new_fake_mode()
            self._made[units] = self._finish(_torch.concrete(self.gm, self.symbols.at(units), mode), mode, units)
            while len(self._made) > KEPT:
                del self._made[next(iter(self._made))]
        return self._made[units]

    @cached_property
    def expressions(self) -> list[Any]:
        """Sizes in the captured graph that vary, as sympy expressions of the symbols."""
        return _torch.expressions(self.gm)

    def outputs(self, roles: Sequence[Any]) -> list[tuple[int, Any]]:
        """(position, recorded value) of what is returned to the user."""
        results = _torch.results_of(self.gm.graph)
        values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in results]
        return [(r.index, v) for r, v in zip(roles, values, strict=True) if r.kind == "output"]

    def output_shapes(self, roles: Sequence[Any], units: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """(position, shape at these sizes) of the tensors that are returned."""
        there = self.symbols.at(units)
        found = [(i, v) for i, v in self.outputs(roles) if hasattr(v, "shape")]
        return [(i, tuple(_torch.number(n, there) for n in v.shape)) for i, v in found]

    def output_numbers(self, roles: Sequence[Any], units: Sequence[int], constants: Mapping[int, Any]) -> dict[int, Any]:
        """What is returned and is no tensor, at these sizes."""
        there = self.symbols.at(units)
        return {i: _torch.number(v, there) for i, v in self.outputs(roles) if i in constants}

    def size_at(self, expr: Any, units: Sequence[int]) -> Any:
        """A size that is a number, or an expression of the symbols, at these numbers of units."""
        return expr if isinstance(expr, (int, float)) else _plain(expr.xreplace(self.symbols.at(units)))


def _plain(x: Any) -> Any:
    return int(x) if x.is_Integer else float(x)
