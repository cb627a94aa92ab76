"""Pieces of a micro-batch that are no more than the real ones, from those of one device: to bound what was not solved.

Whatever the strategies on w devices that share a micro-batch (those that share experts: as many micro-batches), each does at least 1/w of every kernel's
FLOPs, reads and writes at least 1/w of its bytes, launches it all the same, and holds at least 1/w of every parameter and of everything kept: its part of a tensor is never smaller than the tensor over w. Communication takes no
less than nothing, but for rows of routed experts, which are sent from one of ep devices to another whatever splits the rest: (ep - 1) / ep of
those that a device has. What kernels there are, and which results they keep, does not depend on strategies (`autopar.predict.fused_kernels`). So `shared(pieces, w)` is, quantity by
quantity, at most what any solution on w devices is. For our own runtime that is so where w devices keep what one does: of a result that is made again for about what keeping it takes,
launches may decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from autopar.predict.pieces import Piece
from autopar.predict.work import Task, Transfer, Workload

Pieces = tuple[Piece, ...]
_HELD = (
    "saved_bytes",
    "spared_bytes",
    "input_bytes",
    "scores_bytes",
    "largest_bytes",
    "params",
    "shared",
    "routed",
    "experts_bytes",
    "rows_bytes",
)


def shared(pieces: Sequence[Piece], ways: int, ep: int = 1, axes: tuple[str, ...] = ("ep",)) -> Pieces:
    """pieces: of a micro-batch on one device. ep: of the devices that share it, those that share routed experts; axes: what those are called."""

    def less(s: Workload, exchanges: Mapping[float, float]) -> Workload:
        out: dict[Task, float] = {}
        for t, n in s.tasks.items():
            small = replace(
                t, flops=t.flops / ways, moved_bytes=t.moved_bytes / ways, even_flops=t.even_flops / ways, square_flops=t.square_flops / ways,
                weights=t.weights / ways, remade_flops=t.remade_flops / ways,
            )  # fmt: skip
            out[small] = out.get(small, 0.0) + n
        sent = {Transfer("all_to_all", axes, nbytes / ways * (ep - 1) / ep): n for nbytes, n in exchanges.items()}
        return Workload(out, sent if ep > 1 else {})

    return tuple(
        _changed(p, less, {name: getattr(p, name) / ways for name in _HELD} | {"tensors": tuple((size / ways, n) for size, n in p.tensors)})
        for p in pieces
    )


def _changed(p: Piece, less: Callable[[Workload, Mapping[float, float]], Workload], held: dict[str, Any]) -> Piece:
    assert {f.name for f in fields(Piece)} == {
        "name",
        "layers",
        "forward",
        "backward",
        "recompute",
        "tensors",
        "exchanges",
        *_HELD,
    }, "a quantity that bounds do not know"
    forward, backward = ({nbytes: n for of, nbytes, n in p.exchanges if of == half} for half in ("forward", "backward"))
    return replace(p, forward=less(p.forward, forward), backward=less(p.backward, backward), recompute=less(p.recompute, {}), **held)
