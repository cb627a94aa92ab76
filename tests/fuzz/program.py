"""A program: a module and its inputs as text, in parts that can be taken away one by one."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

HEAD = "from tests.fuzz.names import *"
_NAME = re.compile(r"\b(?:self\.(?!training\b)(\w+)|([vxr]\d+))\b")


@dataclass(frozen=True)
class Line:
    """A statement (of several lines of text, if need be). makes: the names it binds; effect: it changes something that is there already."""

    text: str
    makes: tuple[str, ...] = ()
    effect: bool = False

    @property
    def uses(self) -> frozenset[str]:
        return names_in(self.text) - frozenset(self.makes)


def names_in(text: str) -> frozenset[str]:
    """Values (v1), inputs (x1) and members (self.w1, as w1)."""
    return frozenset(a or b for a, b in _NAME.findall(text))


@dataclass(frozen=True)
class Program:
    """members: name -> its lines of `__init__`; inputs: name -> expression; grads: inputs that get gradients.

    form: how inputs come and results go: "args" | "kwargs" | "dict"; returned: text of the result, in terms of leaves.
    rough: rounded to bfloat16 somewhere, so compared loosely.
    """

    members: tuple[Line, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    grads: frozenset[str] = frozenset()
    body: tuple[Line, ...] = ()
    leaves: tuple[str, ...] = ()
    container: str = "tuple"
    form: str = "args"
    dtype: str = "float64"
    train: bool = True
    rough: bool = False
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def source(self) -> str:
        out = [HEAD, "", f"D = torch.{self.dtype}", "", "", "class M(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for m in self.members:
            out += _indented(m.text, 8)
        out += ["        fill(self, D)", ""]
        names = [n for n, _ in self.inputs]
        if self.form == "dict":
            out += ["    def forward(self, batch):"]
            out += [f'        {n} = batch["{n}"]' if i % 2 == 0 else f'        {n} = batch["rest"][{i // 2}]' for i, n in enumerate(names)]
        else:
            out += [f"    def forward(self{''.join(', ' + n for n in names)}):"]
        for line in self.body:
            out += _indented(line.text, 8)
        out += [f"        return {self.result}", "", "", "def make_inputs():"]
        for n, text in self.inputs:
            out += _indented(f"{n} = {text}", 4)
            if n in self.grads:
                out.append(f"    {n}.requires_grad_()")
        if self.form == "dict":
            even, odd = names[::2], names[1::2]
            rest = f'"rest": [{", ".join(odd)}]'
            inside = ", ".join([*(f'"{n}": {n}' for n in even), rest])
            out.append(f"    return ({{{inside}}},), {{}}")
        elif self.form == "kwargs":
            given = ", ".join(f'"{n}": {n}' for n in names)
            out.append(f"    return (), {{{given}}}")
        else:
            out.append(f"    return ({''.join(n + ', ' for n in names)}), {{}}")
        if self.rough:
            out += ["", "", "ROUGH = True"]
        if not self.train:
            out += ["", "", "TRAIN = False"]
        return "\n".join(out) + "\n"

    @property
    def result(self) -> str:
        if self.container == "one":
            return self.leaves[0]
        if self.container == "dict":
            return "{" + ", ".join(f'"{i}": {v}' for i, v in enumerate(self.leaves)) + "}"
        if self.container == "nested":
            first, rest = self.leaves[0], ", ".join(self.leaves[1:])
            return f'{{"first": {first}, "rest": [{rest}], "none": None, "three": 3}}'
        if self.container == "dataclass":
            return f"Pair({self.leaves[0]}, ({''.join(v + ', ' for v in self.leaves[1:])}))"
        if self.container == "list":
            return "[" + ", ".join(self.leaves) + "]"
        return "(" + "".join(v + ", " for v in self.leaves) + ")"

    def without(self, **parts: Any) -> Program:
        return replace(self, **parts)


def _indented(text: str, n: int) -> list[str]:
    return [" " * n + t if t else "" for t in text.split("\n")]


@dataclass
class Loaded:
    """A program that can be run. rough, train: as the text says."""

    make: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    rough: bool
    train: bool
    settings: list[dict[str, Any]]


def load(source: str, dtype: str | None = None) -> Loaded:
    """dtype: compute in this one instead."""
    if dtype is not None:
        source = re.sub(r"^D = torch\.\w+", f"D = torch.{dtype}", source, flags=re.M)
    name = f"<program {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    # Dynamo looks up the module that a class is of.
    module = types.ModuleType("fuzzed")
    sys.modules["fuzzed"] = module
    space = module.__dict__
    exec(compile(source, name, "exec"), space)
    return Loaded(space["M"], space["make_inputs"], space.get("ROUGH", False), space.get("TRAIN", True), space.get("SETTINGS", []))


def dtype_of(source: str) -> torch.dtype:
    found = re.search(r"^D = torch\.(\w+)", source, flags=re.M)
    assert found is not None
    dtype = getattr(torch, found[1])
    assert isinstance(dtype, torch.dtype)
    return dtype
