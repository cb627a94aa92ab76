"""Replays a rewritten step on streams: when each call runs, how long compute waits for communication, how much memory lives. Torch-free.

Streams are "compute", the links ("intra" and "inter" a node) and the copies to and from the host ("d2h", "h2d"). Calls are issued in
program order, as a training process does:

    on compute         it starts when compute is free and everything it reads is there; the gap is exposed communication
    on another stream  it starts when compute has reached the point of issue, its stream is free and what it reads is there

A wait is a call of no length on compute that reads what was sent. Several ranks need no several replays: they run one text.

Memory is counted in program order, as a caching allocator's is: a call's result is there from its issue, and free for the next call behind its
last use. What a collective reads is in use until its wait. A view has the storage of what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPUTE = "compute"
STREAMS = (COMPUTE, "intra", "inter", "d2h", "h2d")


@dataclass(frozen=True)
class Record:
    """One call. inputs: names of earlier records; alloc_bytes: of its result; free_bytes: of what nothing reads any more behind it."""

    name: str
    stream: str
    seconds: float
    inputs: tuple[str, ...] = ()
    alloc_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """When a record ran. waited_s: how long compute stood idle before it."""

    name: str
    stream: str
    start_s: float
    end_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Replay:
    """seconds: until the last stream is done; busy_s: by stream; exposed_s: compute idle for what other streams do, to the end;
    peak_bytes: most memory at once, at the record `peak_at`; end_bytes: what is left."""

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: float
    peak_bytes: int
    peak_at: str
    end_bytes: int
    timeline: tuple[Span, ...]


def replay(records: Sequence[Record], start_bytes: int = 0) -> Replay:
    """start_bytes: what is alive before the first record."""
    free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    busy: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    done: dict[str, float] = {}
    spans = []
    exposed = 0.0
    live = peak = start_bytes
    peak_at = ""
    for r in records:
        ready = max((done[i] for i in r.inputs), default=0.0)
        start = max(free[r.stream], free[COMPUTE], ready)
        waited = start - free[COMPUTE] if r.stream == COMPUTE else 0.0
        exposed += waited
        end = start + r.seconds
        free[r.stream] = done[r.name] = end
        busy[r.stream] += r.seconds
        spans.append(Span(r.name, r.stream, start, end, waited))
        live += r.alloc_bytes
        if live > peak:
            peak, peak_at = live, r.name
        live -= r.free_bytes
    total = max(free.values())
    return Replay(total, busy, exposed + total - free[COMPUTE], peak, peak_at, live, tuple(spans))


# ---- graphs --------------------------------------------------------------------------------------------------------

# Ops that share their operand's memory though their schema does not say so.
_UNDECLARED_VIEWS = ("aten._unsafe_view", "_c10d_functional.wait_tensor")
_C10D = "_c10d_functional."
_KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}

Price = Callable[[Any], "tuple[str, float]"]


def records(parts: Any, price: Price) -> tuple[list[Record], int]:
    """A step's forward and backward graph (`partition.Parts`) as records, and the bytes of the graph's inputs, which live throughout.

    price: (stream, seconds) of a call. Views are no records. What backward reads of forward lives until its last use there; results live on.
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
                    vals = n.meta.get("val")
                    new = [f"{name}.{i}" for i in range(len(vals) if isinstance(vals, (list, tuple)) else 1)]
                    for key, v in zip(new, vals if isinstance(vals, (list, tuple)) else [vals], strict=True):
                        size[key] = v.numel() * v.element_size() if hasattr(v, "element_size") else 0
                    roots[n] = new
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
) -> Price:
    """Prices from those of whole ops: the last call that an op has in a half bears its time. prefix: of group names; width: ranks of axes;

    collective: (link, seconds) by kind, axes and bytes on the wire.
    """
    bearer = set()
    for gm in (parts.forward, parts.backward):
        if gm is not None:
            of_op = {n.meta["op"]: n for n in gm.graph.nodes if n.op == "call_function" and not _is_sent(n) and shares_storage(n) is None}
            bearer |= set(of_op.values())

    def price(n: Any) -> tuple[str, float]:
        if _is_sent(n):
            kind, axes = collective_of(n, prefix)
            return collective(kind, axes, wire_bytes(n, width(axes)))
        return COMPUTE, op_seconds(n.meta["op"]) if n in bearer else 0.0

    return price


def is_wait(n: Any) -> bool:
    return n.op == "call_function" and _C10D + "wait_tensor" in str(n.target)


def _is_sent(n: Any) -> bool:
    return _C10D in str(n.target)


def shares_storage(n: Any) -> Any:
    """The operand whose storage the call's result is a part of; None where it makes its own."""
    if n.op != "call_function":
        return None
    if getattr(n.target, "__name__", "") == "getitem" or any(v in str(n.target) for v in _UNDECLARED_VIEWS):
        return n.args[0]
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    for given, declared in zip(n.args, schema.arguments, strict=False):
        if declared.alias_info is not None and hasattr(given, "all_input_nodes"):
            return given
    return None


def nbytes(n: Any) -> int:
    """Bytes of a node's result, all of a tuple's."""
    val = n.meta.get("val")
    return sum(v.numel() * v.element_size() for v in (val if isinstance(val, (list, tuple)) else [val]) if hasattr(v, "element_size"))


def collective_of(n: Any, prefix: str) -> tuple[str, tuple[str, ...]]:
    """(kind, axes) of a collective's node; a group is named by prefix, dot, axes joined by plus."""
    name = str(n.target).split(_C10D)[1].split(".")[0]
    group = next(a for a in reversed(n.args) if isinstance(a, str))
    return _KINDS.get(name, name), tuple(group[len(prefix) + 1 :].split("+"))


def wire_bytes(n: Any, width: int) -> float:
    """Bytes a rank sends, ring algorithms: (W-1)/W of the whole for gather and scatter, twice that for all-reduce."""
    whole = max(nbytes(n), nbytes(n.all_input_nodes[0]))
    return whole * (width - 1) / width * (2 if "all_reduce" in str(n.target) else 1)
