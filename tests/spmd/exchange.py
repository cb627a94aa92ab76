"""Operators that exchange rows inside (`autopar.kernels.experts`), on simulated ranks: they run side by side, as far as each exchange.

with LocalTensorMode(n), Exchanges(lambda group: ranks of every group of that name):
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.graph.mesh import Mesh
from autopar.kernels.exchange import Body
from autopar.kernels.exchanging import BODIES

Groups = Sequence[Sequence[int]]


class Exchanges(TorchDispatchMode):
    def __init__(self, groups: Callable[[str], Groups]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups = groups

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body, at = BODIES.get(str(func), (None, 0))
        if body is None or not args[at]:
            return func(*args, **(kwargs or {}))
        groups = self.groups(args[at])
        ranks = sorted(r for g in groups for r in g)
        with _disable_current_modes():
            given = [[a._local_tensors[r] if isinstance(a, LocalTensor) else a for a in args] for r in ranks]
            results = side_by_side([body(*mine) for mine in given], groups)
        if isinstance(results[0], torch.Tensor):
            return LocalTensor(dict(enumerate(results)))
        return tuple(LocalTensor(dict(enumerate(part))) for part in zip(*results, strict=True))


def exchanges(mesh: Mesh) -> Exchanges:
    """For the groups of a simulated world, whose names end in their axes."""
    return Exchanges(lambda name: groups_over(tuple(name.split(".", 1)[1].split("+")), mesh))


def groups_over(axes: tuple[str, ...], mesh: Mesh) -> Groups:
    """The ranks of every group over `axes`, the first of which is the major one."""
    groups: dict[Any, list[tuple[Any, int]]] = {}
    for r in range(mesh.size):
        at = mesh.coordinates(r)
        rest = tuple(at[a] for a in at if a not in axes)
        groups.setdefault(rest, []).append((tuple(at[a] for a in axes), r))
    return [[r for _, r in sorted(g)] for g in groups.values()]


def side_by_side(bodies: Sequence[Body], groups: Groups) -> list[Any]:
    """What every rank's body gives, where what one asks to be exchanged is answered by the others of its group."""
    answers: list[Any] = [None] * len(bodies)
    while True:
        asks, results = [], []
        for body, answer in zip(bodies, answers, strict=True):
            try:
                asks.append(next(body) if answer is None else body.send(answer))
            except StopIteration as e:
                results.append(e.value)
        if results:
            assert not asks, "a rank is done and another still exchanges"
            return results
        for group in groups:
            for i, r in enumerate(group):
                parts = [asks[s].rows.split(asks[s].send)[i] for s in group]
                assert [len(p) for p in parts] == asks[r].receive, "what is sent is not what is expected"
                got = torch.cat(parts)
                answers[r] = (lambda got=got: got) if asks[r].is_later else got
