"""From two sizes to an expression: what number of a program is a function of the sizes that vary, and which.

A program that was rewritten at one size has numbers for sizes. Rewritten at another size as well, what is the same in both is a constant. What is not is one of the
expressions that were captured, a part of one (a mesh axis has split the rest of it), a multiple of one, or a constant times a product of symbols. A candidate counts only
where it gives both numbers; and since primes stand for the sizes, a product says which symbols it is made of.
"""

from __future__ import annotations

import math
from typing import Any

import sympy

from autopar.capture.family import Family


class Lift:
    """first, second: numbers of units at which the two programs were rewritten."""

    def __init__(self, family: Family[Any], first: tuple[int, ...], second: tuple[int, ...]) -> None:
        self.names, self.first, self.second = list(family.symbols.names), first, second
        self.family = family
        self._known: dict[tuple[Any, Any], Any] = {}
        for e in family.expressions:
            self._known.setdefault((family.size_at(e, first), family.size_at(e, second)), e)

    def __call__(self, a: Any, b: Any) -> Any:
        """The expression that is `a` at the first size and `b` at the second; None where there is none."""
        if a == b:
            return sympy.sympify(a)
        found = self._known.get((a, b))
        if found is None and isinstance(a, int) and isinstance(b, int):
            found = self._product(a, b) or self._of_known(a, b) or self._shifted(a, b)
            if found is not None:
                self._known[a, b] = found
        return found

    def _product(self, a: int, b: int) -> Any:
        """A constant times powers of symbols."""
        expr = sympy.Integer(1)
        for name, p, q in zip(self.names, self.first, self.second, strict=True):
            while a and b and a % p == 0 and b % q == 0:
                a, b, expr = a // p, b // q, expr * name
        return expr * a if a == b and expr.free_symbols else None

    def _of_known(self, a: int, b: int) -> Any:
        """A multiple of what was captured, or an even part of it."""
        for (x, y), e in list(self._known.items()):
            if not (isinstance(x, int) and isinstance(y, int) and x and y and a and b):
                continue
            if a % x == 0 and b % y == 0 and a // x == b // y:
                return e * (a // x)
            if x % a == 0 and y % b == 0 and x // a == y // b and (part := divided(e, x // a)) is not None:
                return part
        return None

    def _shifted(self, a: int, b: int) -> Any:
        """One more or less than a size of its own: an index of its last element, a pad."""
        for by in (-1, 1, -2, 2):
            if (found := self._known.get((a - by, b - by)) or self._product(a - by, b - by)) is not None:
                return found + by
        return None


def divided(e: Any, by: int) -> Any:
    """`e / by`, where that is a whole number at every size; else None."""
    terms = sympy.expand(e).as_coefficients_dict()
    if all(c.is_Integer and int(c) % by == 0 for c in terms.values()):
        return sympy.Add(*(term * (int(c) // by) for term, c in terms.items()))
    return None


def unsplit_sizes(family: Family[Any]) -> frozenset[int]:
    """Sizes, at those that stand for all, which no mesh axis may split though it may divide them: s + 1, which is even by accident."""
    found = set()
    for e in family.expressions:
        terms = sympy.expand(e).as_coefficients_dict()
        is_product = len(terms) == 1 and all(x.is_Symbol or x.is_Integer for t in terms for x in t.as_powers_dict())
        if not is_product and math.gcd(*(int(c) if c.is_Integer else 1 for c in terms.values())) == 1:
            found.add(family.size_at(e, family.units))
    return frozenset(n for n in found if isinstance(n, int))
