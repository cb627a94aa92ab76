"""A rewritten step as records for `autopar.timeline.replay`, which replays them on streams. Torch-free.

What a collective reads is in use until its wait. A view has the storage of what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.graph.calls import (
    collective_of,
    is_collective,
    is_issue,
    is_transfer,
    is_wait,
    nbytes,
    part_bytes,
    shares_storage,
    transferred,
    wire_bytes,
)
from autopar.timeline.replay import COMPUTE, Record

Price = Callable[[Any], "tuple[str, float]"]
Sizes = Callable[[Any], "list[int]"]


def records(parts: Any, price: Price, sizes: Sizes = part_bytes) -> tuple[list[Record], int]:
    """A step's forward and backward graph (`partition.Parts`) as records, and the bytes of the graph's inputs, which live throughout.

    price: (stream, seconds) of a call; sizes: bytes of every part of its result (all of it, as in an eager run; `stored`: what is left of it after
    fusion). Views are no records. What backward reads of forward lives until its last use there; results live on.
    """
    size: dict[str, int] = {}  # of every storage, by the node that makes it
    roots: dict[Any, list[str]] = {}  # the storages of a node's result, one for each part of a tuple
    made_by: dict[Any, tuple[str, ...]] = {}
    drafts: list[tuple[str, str, float, tuple[str, ...], list[str]]] = []
    last: dict[str, int] = {}
    start_bytes = 0
    saved: list[Any] = []
    for half, gm in (("forward", parts.forward), ("backward", parts.backward)):
        if gm is None:
            continue
        handed = iter(saved)
        for n in gm.graph.nodes:
            if n.op == "output":
                results = list(n.args[0])
                own = len(results) - len(parts.saved) if half == "forward" else len(results)
                saved = results[own:]
                for a in results[:own]:
                    last.update(dict.fromkeys(roots[a] if a is not None else (), -1))
            elif n.op != "call_function":
                source = next(handed, None) if n.op == "placeholder" else None
                roots[n] = roots[source] if source is not None else []
                made_by[n] = made_by[source] if source is not None else ()
                start_bytes += nbytes(n) if n.op == "placeholder" and half == "forward" else 0
            elif not is_wait(n) and (base := shares_storage(n)) is not None:
                parted = isinstance(base.meta.get("val"), (list, tuple)) and len(roots[base]) > 1
                roots[n] = [roots[base][n.args[1]]] if parted else roots[base]
                made_by[n] = made_by[base]
            else:
                name = f"{half}.{n.name}"
                made_by[n] = (name,)
                read = list(n.all_input_nodes)
                new: list[str] = []
                if is_wait(n):
                    roots[n] = roots[read[0]]
                    read += read[0].all_input_nodes
                else:
                    size |= {f"{name}.{i}": b for i, b in enumerate(sizes(n))}
                    roots[n] = new = [f"{name}.{i}" for i in range(len(part_bytes(n)))]
                for key in [*new, *(k for a in read for k in roots[a])]:
                    if last.get(key) != -1:
                        last[key] = len(drafts)
                inputs = tuple(dict.fromkeys(i for a in n.all_input_nodes for i in made_by[a]))
                drafts.append((name, *((COMPUTE, 0.0) if is_wait(n) else price(n)), inputs, new))
    freed: dict[int, int] = {}
    for key, i in last.items():
        freed[i] = freed.get(i, 0) + size[key]
    out = [
        Record(name, stream, seconds, inputs, sum(size[k] for k in new), freed.get(i, 0))
        for i, (name, stream, seconds, inputs, new) in enumerate(drafts)
    ]
    return out, start_bytes


def price_ops(
    parts: Any,
    prefix: str,
    width: Callable[[tuple[str, ...]], int],
    op_seconds: Callable[[str], float],
    collective: Callable[[str, tuple[str, ...], float], tuple[str, float]],
    transfer: Callable[[str, float], float] = lambda resource, nbytes: 0.0,
) -> Price:
    """Rough prices from those of whole ops: the last call that bears an op's name in a half bears its time. `price.charges` tells an op's own calls
    from the copies that bring its operands.

    prefix: of group names; width: ranks of axes; collective: (link, seconds) by kind, axes and bytes on the wire;
    transfer: seconds by link ("d2h", ...) and bytes.
    """
    bearer = set()
    for gm in (parts.forward, parts.backward):
        if gm is not None:
            of_op = {n.meta["op"]: n for n in gm.graph.nodes if n.op == "call_function" and not is_issue(n) and shares_storage(n) is None}
            bearer |= set(of_op.values())

    def price(n: Any) -> tuple[str, float]:
        if is_collective(n):
            kind, axes = collective_of(n, prefix)
            return collective(kind, axes, wire_bytes(n, width(axes)))
        if is_transfer(n):  # a chain of copies moves as fast as its slowest
            _, resources, sent = transferred(n)
            return max(((r, transfer(r, sent)) for r in resources), key=lambda x: x[1])
        return COMPUTE, op_seconds(n.meta["op"]) if n in bearer else 0.0

    return price
