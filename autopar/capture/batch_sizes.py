"""One program captured at two sizes of its batch -> the same program at any other size.

A number v of the graph (a size, a stride, an argument) that is v_n at n samples and v_m at m is the same at all sizes if v_n = v_m, and proportional to the batch if
v_n / n = v_m / m. Any other number is left as it is at the first size: who reads the program (`autopar.capture.samples`) finds those that differ, and judges them. So a
program of one sample has the operators of many, where torch would make another one of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def at_batch(few: fx.GraphModule, many: fx.GraphModule, n: int, m: int, samples: int, mode: Any) -> fx.GraphModule | None:
    """`few`, captured of n samples, at so many; None where `many`, of m samples, is another program, or a size is not proportional. mode: of its fake tensors."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    there: dict[fx.Node, fx.Node] = {}
    fakes: dict[int, tuple[Any, Any]] = {}
    mine, theirs = list(few.graph.nodes), list(many.graph.nodes)
    if [(a.op, a.target) for a in mine if a.op != "get_attr"] != [(b.op, b.target) for b in theirs if b.op != "get_attr"]:
        return None

    def number(v: Any, w: Any) -> Any:
        if type(v) is not int or type(w) is not int or v == w:
            return v
        return v * samples // n if v * m == w * n and v * samples % n == 0 else None

    def argument(v: Any, w: Any) -> Any:
        if isinstance(v, fx.Node):
            return env[v]
        if isinstance(v, (list, tuple)) and isinstance(w, (list, tuple)) and len(v) == len(w):
            return (
                type(v)(argument(x, y) for x, y in zip(v, w, strict=True))
                if type(v) in (list, tuple)
                else [argument(x, y) for x, y in zip(v, w, strict=True)]
            )
        if isinstance(v, dict):
            return {k: argument(x, w[k]) for k, x in v.items()}
        found = number(v, w)
        return v if found is None else found

    def fake(v: Any, w: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return type(v)(fake(x, y) for x, y in zip(v, w, strict=True))
        if not isinstance(v, torch.Tensor):
            return argument(v, w)
        if id(v) not in fakes:
            shape, strides = ([number(x, y) for x, y in zip(a, b, strict=True)] for a, b in ((v.shape, w.shape), (v.stride(), w.stride())))
            offset = number(v.storage_offset(), w.storage_offset())
            if None in shape or None in strides or offset is None:
                raise _NotProportionalError
            with mode:
                reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
                made = torch.empty(offset + reach, dtype=v.dtype, device=v.device).as_strided(shape, strides, offset)
                if not offset:
                    made = torch.empty_strided(shape, strides, dtype=v.dtype, device=v.device)
            fakes[id(v)] = v, made.requires_grad_(v.requires_grad)
        return fakes[id(v)][1]

    try:
        for a, b in zip(mine, theirs, strict=True):
            there[a] = b
            if [there[x] for x in a.all_input_nodes] != list(b.all_input_nodes):
                return None
            if a.op == "output":
                graph.output(fx.map_arg(a.args[0], env.__getitem__)).meta = dict(a.meta)
                continue
            new = env[a] = graph.node_copy(a, env.__getitem__)
            if a.op == "call_function":
                new.args, new.kwargs = tuple(argument(list(a.args), list(b.args))), argument(dict(a.kwargs), dict(b.kwargs))
            new.meta = dict(a.meta)
            if "val" in a.meta:
                new.meta["val"] = fake(a.meta["val"], b.meta["val"])
    except _NotProportionalError:
        return None
    return fx.GraphModule(few, graph)


class _NotProportionalError(Exception):
    pass


def other_size(samples: int) -> int:
    """A size that a batch of `samples` is captured at besides its own: torch makes a program of one sample a special case."""
    return 2 if samples != 2 else 3
