"""A folded program at two sizes of its batch -> the same program at any other size, without capturing it.

A number of the graph (a size, an argument) that is v at n samples and w at m is the same at all sizes where v = w, proportional to the batch where v / n = w / m, and
inversely where v n = w m (a mean over the batch). Where any other number differs, or an operator, the program is not known at another size.

As `autopar.capture.batch_sizes`, of graphs without torch: that one leaves such numbers as they are, for `samples` to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.graph.graph import Graph, Op, Tensor
from autopar.solver.fold import Folded


class _UnknownError(Exception):
    pass


def at_batch(few: Folded, many: Folded, n: int, m: int, samples: int) -> Folded | None:
    """`few`, of n samples, at so many; None where `many`, of m samples, does not tell. One sample is a special case to torch, so n and m are from 2."""
    assert 1 < n < m, (n, m)
    alike = ("rep", "count", "tensor_rep", "tensor_count", "stacks", "copies", "unfolded", "note", "together")
    if any(getattr(few, name) != getattr(many, name) for name in alike):
        return None
    try:
        return replace(few, graph=_Sizes(n, m, samples).graph(few.graph, many.graph))
    except _UnknownError:
        return None


class _Sizes:
    def __init__(self, n: int, m: int, samples: int) -> None:
        self.n, self.m, self.samples = n, m, samples
        self.known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def graph(self, a: Graph, b: Graph) -> Graph:
        same = ("tangent_of", "outputs", "grads", "buffer_updates")
        if any(getattr(a, x) != getattr(b, x) for x in same) or len(a.ops) != len(b.ops):
            raise _UnknownError
        named = {x: self.value(getattr(a, x), getattr(b, x)) for x in ("params", "buffers", "inputs", "tangents", "tensors")}
        return replace(a, ops=tuple(self.op(x, y) for x, y in zip(a.ops, b.ops, strict=True)), **named)

    def op(self, a: Op, b: Op) -> Op:
        same = ("name", "target", "direction", "module", "tags", "unsplit")
        if any(getattr(a, x) != getattr(b, x) for x in same):
            raise _UnknownError
        args, kwargs, outputs = (self.value(getattr(a, x), getattr(b, x)) for x in ("args", "kwargs", "outputs"))
        return replace(a, args=args, kwargs=kwargs, outputs=outputs)

    def value(self, v: Any, w: Any) -> Any:
        if type(v) is not type(w):
            raise _UnknownError
        if isinstance(v, Tensor):
            return self.tensor(v, w)
        if isinstance(v, Mapping):
            if list(v) != list(w):
                raise _UnknownError
            return {k: self.value(x, w[k]) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            if len(v) != len(w):
                raise _UnknownError
            return type(v)(self.value(x, y) for x, y in zip(v, w, strict=True))
        if v == w:
            return v
        if isinstance(v, int) and not isinstance(v, bool):
            return self.size(v, w)
        if isinstance(v, float) and v * self.m == w * self.n:
            return v * self.samples / self.n
        if isinstance(v, float) and v * self.n == w * self.m:
            return v * self.n / self.samples
        raise _UnknownError

    def tensor(self, v: Tensor, w: Tensor) -> Tensor:
        if (v.name, v.dtype, len(v.shape)) != (w.name, w.dtype, len(w.shape)):
            raise _UnknownError
        mine, theirs, made = self.known.get(v.name) or (v, w, replace(v, shape=tuple(map(self.size, v.shape, w.shape))))
        if (mine, theirs) != (v, w):
            raise _UnknownError
        self.known[v.name] = v, w, made
        return made

    def size(self, v: int, w: int) -> int:
        if v == w:
            return v
        found, rest = divmod(v * self.samples, self.n)
        if v * self.m != w * self.n or rest:
            raise _UnknownError
        return found
