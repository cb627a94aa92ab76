"""The state of a program that is being drawn: its values, alive, and what productions of the grammar ask for.

Statements are run as they are drawn. So a production need not know what torch allows: what eager refuses is taken back.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tests.fuzz import names
from tests.fuzz.program import Line

LARGEST = 30.0  # values stay near one, so that rounding does
SIZES = (2, 3, 4, 4, 6, 8, 8)
T = TypeVar("T")


class Unable(Exception):
    """A production has nothing to work on."""


class Draw:
    def __init__(self, rng: random.Random, features: frozenset[str], dtype: torch.dtype = torch.float64) -> None:
        self.rng, self.features, self.dtype = rng, features, dtype
        self.members: list[Line] = []
        self.inputs: list[tuple[str, str]] = []
        self.grads: set[str] = set()
        self.body: list[Line] = []
        self.module = nn.Module()
        self.module.train()
        self.space: dict[str, Any] = {n: getattr(names, n) for n in names.__all__}
        self.space |= {"self": self.module, "D": dtype}
        self.values: dict[str, torch.Tensor] = {}
        self.count = 0
        self.refused: Counter[str] = Counter()
        self.hidden: set[str] = set()
        self.rough = False
        self.batch = rng.choice((4, 8, 8, 8, 6, 3, 12))

    # ---- names and numbers -----------------------------------------------------------------------------------

    def fresh(self, kind: str = "v") -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def one_of(self, xs: Sequence[T]) -> T:
        if not xs:
            raise Unable
        return self.rng.choice(list(xs))

    def constant(self) -> float:
        return self.one_of((0.5, 1.25, -0.7, 2.0, 0.1, -1.3))

    def seed(self) -> int:
        return self.rng.randrange(1000)

    def size(self) -> int:
        return self.one_of(SIZES)

    # ---- values ----------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def some(self, want: Callable[[torch.Tensor], bool]) -> str:
        """A value; later ones and those with a gradient more often."""
        found = [n for n, t in self.values.items() if n not in self.hidden and want(t)]
        if not found:
            raise Unable
        weights = [(2.0 if self.values[n].requires_grad else 1.0) * (1 + i) for i, n in enumerate(found)]
        return self.rng.choices(found, weights)[0]

    def float(self, want: Callable[[torch.Tensor], bool] = lambda t: True, rank: int | None = None) -> str:
        return self.some(lambda t: t.is_floating_point() and (rank is None or t.dim() == rank) and want(t))

    def beside(self, name: str) -> str:
        """A float that `name` broadcasts with: a value, or a new parameter."""
        shape = self.shape(name)
        try:
            if self.chance(0.2):
                raise Unable
            return self.some(lambda t: t.is_floating_point() and _broadcasts(tuple(t.shape), shape))
        except Unable:
            k = self.rng.randrange(len(shape) + 1)
            return self.parameter([n if self.chance(0.7) else 1 for n in shape[k:]])

    def alike(self, name: str) -> str:
        shape = self.shape(name)
        return self.some(lambda t: t.is_floating_point() and tuple(t.shape) == shape)

    def mask(self, name: str) -> str:
        """Bools that broadcast with `name`."""
        shape = self.shape(name)
        try:
            if self.chance(0.4):
                raise Unable
            return self.some(lambda t: t.dtype == torch.bool and _broadcasts(tuple(t.shape), shape) and t.dim() <= len(shape))
        except Unable:
            return self.input(f"bools({self.seed()}, {self.dims(shape)})")

    def indices(self, high: int, *shape: int) -> str:
        """Integers below `high` of that shape: an input's, a buffer's or a constant's."""
        text = f"ints({self.seed()}, {high}, {self.dims(shape)})"
        if self.chance(0.6):
            return self.input(text)
        return self.buffer(text)

    def dim(self, name: str) -> int:
        n = len(self.shape(name))
        if not n:
            raise Unable
        return self.rng.randrange(-n, n)

    @staticmethod
    def dims(shape: Sequence[int]) -> str:
        return ", ".join(map(str, shape))

    # ---- members and inputs ----------------------------------------------------------------------------------

    def member(self, name: str, text: str, effect: bool = False) -> str:
        """Adds to `__init__`, and gives "self.name"."""
        self.members.append(Line(text, (name,), effect))
        exec(text, self.space)
        names.fill(self.module, self.dtype)
        return f"self.{name}"

    def parameter(self, shape: Sequence[int]) -> str:
        found = [n for n, p in self.module._parameters.items() if p is not None and tuple(p.shape) == tuple(shape)]
        if found and self.chance(0.3):
            return f"self.{self.one_of(found)}"
        name = self.fresh("w")
        frozen = ", requires_grad=False" if self.chance(0.08) else ""
        return self.member(name, f"self.{name} = nn.Parameter(torch.zeros({self.dims(shape) or '()'}){frozen})")

    def submodule(self, text: str, again: Callable[[nn.Module], bool] | None = None) -> str:
        """`again`: whether a module that is there may be used once more."""
        found = [n for n, m in self.module._modules.items() if m is not None and again is not None and again(m)]
        if found and self.chance(0.35):
            return f"self.{self.one_of(found)}"
        name = self.fresh("m")
        return self.member(name, f"self.{name} = {text}")

    def buffer(self, text: str) -> str:
        name = self.fresh("b")
        return self.member(name, f'self.register_buffer("{name}", {text})')

    def input(self, text: str, grad: bool = False) -> str:
        name = self.fresh("x")
        t = eval(text, self.space)
        if grad:
            t.requires_grad_()
            self.grads.add(name)
        self.inputs.append((name, text))
        self.space[name] = self.values[name] = t
        return name

    # ---- statements ------------------------------------------------------------------------------------------

    def attempt(self, production: Callable[[Draw], Sequence[Line] | None], what: str) -> bool:
        """Whether the production's statements could be added."""
        state = len(self.members), len(self.inputs), dict(self.values), set(self.grads), self.rough
        try:
            lines = production(self)
            if not lines:
                raise Unable
            for line in lines:
                exec(line.text, self.space)
                for n in line.makes:
                    if n[0] == "v":
                        self.values[n] = _checked(self.space[n])
            if any(line.effect for line in lines):
                for t in self.values.values():
                    _checked(t)
            self.body += lines
            return True
        except Unable:
            self._back(*state)
            return False
        except Exception as e:
            self.refused[f"{what}: {type(e).__name__}"] += 1
            self._back(*state)
            return False

    def _back(self, members: int, inputs: int, values: dict[str, torch.Tensor], grads: set[str], rough: bool) -> None:
        for m in self.members[members:]:
            for n in m.makes:
                for kind in (self.module._parameters, self.module._modules, self.module._buffers):
                    kind.pop(n, None)
                self.module.__dict__.pop(n, None)
        del self.members[members:], self.inputs[inputs:]
        self.values, self.grads, self.rough = values, grads, rough


class Refused(Exception):
    """Not what eager refuses: what the fuzzer does."""


def _checked(t: Any) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise Refused("no tensor")
    if not 0 < t.numel() <= 4096 or t.dim() > 6 or t.is_complex():
        raise Refused("size")
    if t.is_floating_point() and not (bool(t.detach().isfinite().all()) and float(t.detach().abs().max()) <= LARGEST):
        raise Refused("large")
    return t


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return (
        all(n == m or 1 in (n, m) for n, m in zip(reversed(a), reversed(b), strict=False))
        and math.prod(max(n, m) for n, m in zip(reversed(a), reversed(b), strict=False)) <= 4096
    )
