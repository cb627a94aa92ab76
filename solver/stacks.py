"""Finds the repeated layers of a graph: which operators of one layer correspond to which of the next.

1. Every operator is hashed by what it is: target, constants, shapes, dtypes, names of its parameters without their numbers. A stretch
   of the forward sequence that equals itself shifted by p is a tandem repeat, a run of copies of p operators. Of the places where a run
   may be cut into copies, the one is taken at which a copy mixes the fewest layer numbers, then the one that the fewest values cross.
2. Copies that look alike may read different shared values (masks of Gemma-3's sliding layers): they are equal when they read the same,
   and the period is then several copies of the run (m, the smallest that leaves the most saved).
3. The backward sequence is hashed with the class of the forward values that it reads (but for layers' results: the first layer
   reads the embedding in their place), and cut so that a copy reads one forward copy.
   Copy k of a stack is its forward and its backward; a layer with only one of the two folded is not folded.
4. Correspondence is checked, not assumed. Let in(k, i) be what input i of an operator in copy k reads, written as (slot, distance in
   copies) if it lies in the stack and as its name otherwise. It must be equal in all copies, except where copy k - distance does not
   exist: there the stack reads from its surroundings (the first copy in forward, the last in backward). Copies that differ are cut off.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph.graph import Graph, Op, Tensor

TRIES = 20  # runs, or stretches of a run, looked at before operators are left unfolded
PLACES = {"device", "pin_memory", "layout"}  # keyword arguments that say where, not what
DIGITS: re.Pattern[str] = re.compile(r"\d+")

Copies = tuple[tuple[str, ...], ...]
Token = tuple[Any, ...]


@dataclass(frozen=True)
class Stack:
    """Corresponding operators (by name) and leaves of `copies` copies; copy k's backward is backward[k], () where there is none.

    leaves: tensors that only one copy reads: its parameters, buffers and constants.  layers: layers a copy.
    """

    forward: Copies
    backward: Copies
    leaves: Copies
    layers: int = 1
    name: str = ""

    @property
    def copies(self) -> int:
        return len(self.forward)

    def part(self, lo: int, hi: int) -> Stack:
        return replace(self, forward=self.forward[lo:hi], backward=self.backward[lo:hi], leaves=self.leaves[lo:hi])


@dataclass(frozen=True)
class Home:
    """Where a result of an operator or a leaf belongs: `slot` of `part` (f, b, or l for leaves) of copy `copy`."""

    stack: int
    part: str
    slot: int
    copy: int
    output: int = 0

    @property
    def anywhere(self) -> tuple[int, str, int, int]:
        """The same in any copy."""
        return self.stack, self.part, self.slot, self.output


class Program:
    """The graph's operators in order, what each reads and who makes what."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = {op.name: op for op in graph.ops}
        self.inputs = {op.name: tuple(t.name for t in op.inputs) for op in graph.ops}
        self.maker = {t.name: (op.name, i) for op in graph.ops for i, t in enumerate(op.outputs) if t is not None}
        self.leaf_names = {t.name: f"param {n}" for n, t in graph.params.items()}
        self.leaf_names |= {t.name: f"buffer {n}" for n, t in graph.buffers.items()}
        given = {t.name for t in (*graph.inputs, *graph.tangents)}
        self.leaf_names |= {n: "constant" for n in graph.tensors if n not in self.maker and n not in given and n not in self.leaf_names}
        self.directions = {d: [op for op in graph.ops if op.direction == d] for d in ("forward", "backward")}


def constant_text(x: Any, tensor: Any) -> str:
    """An argument as text, tensors written by `tensor`."""
    if isinstance(x, Tensor):
        return str(tensor(x))
    if isinstance(x, (list, tuple)):
        return "(" + ",".join(constant_text(y, tensor) for y in x) + ")"
    if isinstance(x, dict):
        return "{" + ",".join(f"{k}={constant_text(v, tensor)}" for k, v in x.items() if k not in PLACES) + "}"
    return repr(x)


def starred(name: str) -> str:
    return DIGITS.sub("*", name)


def shape_text(t: Tensor | None) -> str:
    return "-" if t is None else f"{t.dtype}{list(t.shape)}"


def tag_text(op: Op) -> str:
    """Operators are alike if their users want the same of them: a layer that is checkpointed is not one that is not."""
    return f" {'/'.join(op.binding)}" if op.binding else ""


def op_hash(program: Program, op: Op, homes: Mapping[str, Home]) -> str:
    def tensor(t: Tensor) -> str:
        home = homes.get(t.name)
        place = f"{home.stack}{home.part}{home.slot}.{home.output}" if home else starred(program.leaf_names.get(t.name, ""))
        return f"<{shape_text(t)}{place}>"

    results = "".join(map(shape_text, op.outputs))
    text = f"{op.target}{constant_text(op.args, tensor)}{constant_text(op.kwargs, tensor)}{results}{tag_text(op)}"
    return hashlib.sha256(text.encode()).hexdigest()
