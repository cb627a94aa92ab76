"""Runs passes over a local graph in order, checks their contracts, and holds the graph against the specification after each.

A pass is `graph -> graph` with a statement of what it requires of the graph and provides, and whether it keeps results bitwise. What a legal graph is, is a table
(specification.py). With AUTOPAR_DEBUG set, rules that cost time are checked too, and every node runs once more on fake tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from autopar import _torch
from autopar.cost import Cost
from autopar.passes.beside import beside
from autopar.passes.bucket import bucket
from autopar.passes.deduplicate import deduplicate
from autopar.passes.defer import defer
from autopar.passes.lay_out import lay_out
from autopar.passes.overlap import computes, inputs_of
from autopar.passes.partition import Parts
from autopar.passes.pool_offsets import pool_offsets
from autopar.passes.prefetch import prefetch
from autopar.passes.row_statistics import row_statistics
from autopar.passes.shard import Sharded
from autopar.passes.specification import check, check_values


@dataclass(frozen=True)
class Pass:
    """requires/provides: properties such as "local", "deduplicated"; bitwise: results are unchanged bit for bit."""

    name: str
    run: Callable[[fx.GraphModule], fx.GraphModule]
    requires: frozenset[str]
    provides: frozenset[str]
    bitwise: bool


def joint_passes(fuses: bool = True) -> tuple[Pass, ...]:
    """fuses: whether what runs the graph makes one kernel of memory-bound neighbours."""
    return (
        Pass("lay out", lay_out, frozenset({"local"}), frozenset({"laid out"}), True),
        Pass("deduplicate", partial(deduplicate, share_counters=fuses), frozenset({"local"}), frozenset({"deduplicated"}), True),
        Pass("drop dead collectives", _torch.without_dead_code, frozenset({"local"}), frozenset({"live"}), True),
    )


def run_passes(
    sharded: Sharded,
    prefix: str,
    passes: Sequence[Pass] = joint_passes(),
    see: Callable[[str, fx.GraphModule], None] = lambda name, gm: None,
) -> Sharded:
    """`sharded` after `passes`; raises AssertionError naming the pass that broke the graph. see: shown the graph after each."""
    have = {"local", "joint"}
    _verify(sharded.gm, sharded.fake_mode, prefix, "shard", have)
    see("shard", sharded.gm)
    gm = sharded.gm
    for p in passes:
        missing = p.requires - have
        assert not missing, f"pass {p.name!r} requires {sorted(missing)}, which no pass before it provides"
        gm = p.run(gm)
        have |= p.provides
        _verify(gm, sharded.fake_mode, prefix, p.name, have)
        see(p.name, gm)
    return Sharded(gm, sharded.inputs, sharded.outputs, sharded.collectives, sharded.fake_mode)


def for_kernels(sharded: Sharded, prefix: str, recompute: Set[str]) -> Sharded:
    """`sharded`, of the whole program or of a stage, with what is only worth it where kernels are made of neighbours. recompute: operators that backward makes again. Not
    bitwise."""
    row_statistics(sharded.gm, sharded.fake_mode, recompute)
    _verify(sharded.gm, sharded.fake_mode, prefix, "row statistics", {"local", "joint"})
    pool_offsets(sharded.gm, sharded.fake_mode)
    _verify(sharded.gm, sharded.fake_mode, prefix, "offsets of pools", {"local", "joint"})
    return sharded


def _verify(gm: fx.GraphModule, fake_mode: object, prefix: str, after: str, have: set[str]) -> None:
    debug = bool(os.environ.get("AUTOPAR_DEBUG"))
    check(gm, prefix, after, have, int(debug))
    if debug:
        check_values(gm, fake_mode)


def overlap(parts: Parts, prefix: str, cost: Cost | None = None, joins: bool = True) -> Parts:
    """`parts` with parameters gathered ahead of their use and gradients reduced behind it, the same nodes in another order: bitwise. cost: of the cluster, whose prices
    say which products go beside collectives that layers wait for, and, if `joins`, which collectives are joined into buckets; None: none."""
    inputs = inputs_of(parts, False)
    forward = parts.forward
    if cost is not None:
        forward = _same_calls(forward, beside(forward, inputs, prefix, cost), prefix, "beside")
    forward = _same_calls(forward, prefetch(forward, inputs), prefix, "prefetch")
    backward = parts.backward
    if backward is not None:
        inputs = inputs_of(parts, True)
        if cost is not None:
            backward = _same_calls(backward, beside(backward, inputs, prefix, cost), prefix, "beside")
        backward = _same_calls(backward, prefetch(backward, inputs), prefix, "prefetch")
        backward = _same_calls(backward, defer(backward, inputs), prefix, "defer")
    if cost is not None and joins:
        forward = _same_results(forward, bucket(forward, prefix, cost), prefix, "bucket")
        backward = None if backward is None else _same_results(backward, bucket(backward, prefix, cost), prefix, "bucket")
    return replace(parts, forward=forward, backward=backward)


def _same_results(before: fx.GraphModule, gm: fx.GraphModule, prefix: str, after: str) -> fx.GraphModule:
    """`gm`, checked to take and give what `before` does, by shape and dtype, and to do the same work on the way."""
    for told in (_given, _results, _work):
        assert told(before) == told(gm), f"other {told.__name__[1:]} after {after}"
    check(gm, prefix, after, {"local", "live"})
    if os.environ.get("AUTOPAR_DEBUG"):
        check_values(gm, _torch.fake_mode_of(gm))
    return gm


def _given(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def _results(gm: fx.GraphModule) -> list[tuple[object, ...] | None]:
    values = [n.meta["val"] if isinstance(n, fx.Node) else None for n in _torch.results_of(gm.graph)]
    return [None if v is None else (tuple(v.shape), v.dtype) if hasattr(v, "shape") else (v,) for v in values]


def _work(gm: fx.GraphModule) -> list[str]:
    """The calls that compute, in order."""
    return [n.name for n in gm.graph.nodes if computes(n)]


def _same_calls(before: fx.GraphModule, gm: fx.GraphModule, prefix: str, after: str) -> fx.GraphModule:
    """`gm`, checked to have every call of `before` once, its collectives whole, its nodes in a legal order."""
    calls = [sorted(n.format_node() or "" for n in g.graph.nodes if n.op == "call_function") for g in (before, gm)]
    assert calls[0] == calls[1], f"other calls after {after}"
    check(gm, prefix, after, {"local", "live"})
    return gm
