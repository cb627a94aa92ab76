"""What is done only because a value is kept for backward: by forward to write it, by backward's kernels to read it.

A result that no other kernel of forward reads is written only where it is kept, and read by backward's kernels only there; made again, it is in no memory. What forward makes for
backward alone does not even run in forward where it is made again: then what it is made of is read only to keep it, too. So none of this is in the price of an op, but of keeping:

    price of an op of forward      what its kernel reads and writes if nothing is kept (`Halves.ahead`)
    price of an op of backward     without reads of what is written only to be kept
    keeping a value                the write, the reads, and what making it takes if that is for backward alone

Products, attention and other ops that are no kernel with their neighbours write, and read, what they do in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.cost.fusion import Share, Storages, fused, is_fusible, kernels
from autopar.cost.memory import reads
from autopar.graph.graph import Graph
from autopar.rules.grammar import Rule


@dataclass
class Aside:
    """Of a result that forward writes only to keep it, by its own bytes. made_of: what is read to make it, if it is made for backward alone; launches: whether that is a kernel of its
    own; read: ops of backward whose kernels read it, and how much of it that is."""

    made_of: float = 0.0
    launches: float = 0.0
    read: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptOnly:
    """ahead: shares of forward's ops if nothing is kept; asides: by tensor; reads: by op of backward, the names under which it reads those."""

    ahead: Mapping[str, Share] = field(default_factory=dict)
    asides: Mapping[str, Aside] = field(default_factory=dict)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)


NO_SHARE = Share(frozenset(), frozenset(), False)


def kept_only(graph: Graph, rules: Mapping[str, Rule], whole: Mapping[str, Share]) -> KeptOnly:
    """whole: `fused` of the graph."""
    storages, tensors = Storages(graph, rules), graph.tensors
    forward = tuple(op for op in graph.ops if op.direction == "forward")
    returned = {storages.root.get(t, t) for t in (*graph.outputs, *graph.buffer_updates.values()) if t}
    for_backward = _for_backward(graph, rules, returned)
    group = kernels(graph, rules)
    alone = fused(replace(graph, ops=tuple(op for op in forward if op.name not in for_backward), grads={}, buffer_updates={}), rules)
    ahead = dict.fromkeys(for_backward & whole.keys(), NO_SHARE) | _launched_alike(alone, whole, group)
    joined = [op for op in graph.ops if op.name in whole and is_fusible(op, rules[op.name])]
    asides = {
        t.name: Aside()
        for op in joined
        for t in (op.outputs if op.direction == "forward" else ())
        if t is not None and t.name not in ahead[op.name].writes and t.name not in returned
    }
    live = {group[op.name] for op in forward if op.name in group and op.name not in for_backward}
    made_of: dict[str, dict[str, float]] = {}  # what is made for backward alone -> what else it is made of, in bytes
    for op in joined:
        if op.name in for_backward:
            sources: dict[str, float] = {}
            for t in reads(op):
                root = storages.root.get(t.name, t.name)
                sources |= (
                    made_of[root]
                    if root in made_of
                    else {}
                    if storages.is_expanded(t)
                    else {root: float(min(t.nbytes, tensors[root].nbytes))}
                )
            for made in op.outputs:
                if made is not None:
                    made_of[made.name] = sources
                    if made.name in asides:
                        asides[made.name].made_of = sum(sources.values()) / max(1, made.nbytes)
                        asides[made.name].launches = float(group[op.name] not in live)
    names: dict[str, frozenset[str]] = {}
    for op in joined:
        for name in sorted(whole[op.name].reads) if op.direction == "backward" else ():
            root = storages.root.get(name, name)
            if root in asides:
                part = min(1.0, tensors[name].numel / max(1, tensors[root].numel))
                asides[root].read[op.name] = asides[root].read.get(op.name, 0.0) + part
                names[op.name] = names.get(op.name, frozenset()) | {name}
    return KeptOnly(ahead, asides, names)


def _launched_alike(ahead: Mapping[str, Share], whole: Mapping[str, Share], group: Mapping[str, str]) -> dict[str, Share]:
    """`ahead` with a kernel's launch put down to the op that bears it if all is kept: so it does not move from one layer to the next, whose share of it may be another."""
    by_kernel: dict[str, list[str]] = {}
    for name, share in ahead.items():
        if share.launches:
            by_kernel.setdefault(group[name], []).append(name)
    out = dict(ahead)
    for name, share in whole.items():
        here = by_kernel.get(group[name], [])
        if share.launches and name in ahead and len(here) == 1:
            out[here[0]] = out[here[0]]._replace(launches=False)
            out[name] = out[name]._replace(launches=True)
    return out


def _for_backward(graph: Graph, rules: Mapping[str, Rule], returned: set[str]) -> set[str]:
    """Fusible ops of forward that nothing of forward follows from, and views of what they make."""
    found: set[str] = set()
    wanted = set(returned)  # by what does not wait for backward
    for op in reversed(graph.ops):
        if op.direction == "forward":
            if is_fusible(op, rules[op.name]) and not any(t is not None and t.name in wanted for t in op.outputs):
                found.add(op.name)
            else:
                wanted |= {t.name for t in op.inputs}
    return found
