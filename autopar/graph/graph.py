"""The torch-free graph: what the planner, the rules and the solver see of a captured model.

`describe.py` builds it from an fx graph. Names are the fx node names, so a plan made on it can be applied to
the fx graph. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


TAGS = (MUST_SAVE, MUST_RECOMPUTE, PREFER_SAVE, PREFER_RECOMPUTE) = ("must_save", "must_recompute", "prefer_save", "prefer_recompute")


@dataclass(frozen=True)
class Tensor:
    """A value: `name` of the fx node (with `.i` for output i of a multi-output op), global shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class Op:
    """One call in the captured graph.

    target: e.g. "aten.mm.default" or "autopar.attention.default".
    args, kwargs: as in the fx node, with every tensor replaced by its `Tensor` (also inside lists).
    outputs: one entry per output; None where the op returns no tensor there.
    direction: "forward" or "backward".  module: the module path it came from, "" if unknown.
    tags: what the user wants of each output, one of TAGS ("": nothing); () where there is no tag (`autopar.planner.tags`).
    unsplit: sizes that vary, so that they only seem to be divided by a mesh axis (`autopar.capture.lift`).
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor | None, ...]
    direction: str = "forward"
    module: str = ""
    tags: tuple[str, ...] = ()
    unsplit: frozenset[int] = frozenset()

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensor inputs in order of appearance (args, then kwargs), repeats included."""
        return tuple(_tensors((self.args, self.kwargs)))

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """The argument at `index`, or by keyword `name`, or `default` when it was not given."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def tag(self, index: int) -> str:
        """What the user wants of output `index`."""
        return self.tags[index] if self.tags else ""

    @property
    def binding(self) -> tuple[str, ...]:
        """The tags that a plan has to keep to: part of what the op is."""
        kept = tuple(t if t in (MUST_SAVE, MUST_RECOMPUTE) else "" for t in self.tags)
        return kept if any(kept) else ()

    @property
    def out(self) -> Tensor:
        """The first output (for the many ops that have one)."""
        first = self.outputs[0]
        assert first is not None
        return first


@dataclass(frozen=True)
class Graph:
    """A captured step: inputs by role, ops in execution order, outputs by role."""

    params: dict[str, Tensor]  # parameter name -> tensor
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]  # user inputs (tensors only), in flattened order
    tangents: tuple[Tensor, ...]
    tangent_of: tuple[int, ...]  # for every tangent, the position of its output
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]  # names of tensors returned to the user, "" for what is no tensor
    grads: dict[str, str]  # parameter name -> name of the tensor that is its gradient
    buffer_updates: dict[str, str]  # buffer name -> name of its new value
    tensors: dict[str, Tensor] = field(default_factory=dict)  # every tensor by name


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _tensors(y)
