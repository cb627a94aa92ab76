"""Runs passes over a local graph in order, checks their contracts, and verifies the graph after each.

A pass is `graph -> graph` with a statement of what it requires of the graph and provides, and whether it keeps results bitwise. The
verifier holds what every later stage relies on: fx lint; every node has a value and a direction; no forward node reads a backward
one; every collective is waited for, once, and its result used (none without a user); every group name is rank-neutral, so
that the one text is the same order of collectives on every rank. With AUTOPAR_DEBUG set it also runs every node again
on fake tensors and compares shapes and dtypes with what is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from autopar import _torch
from autopar.passes.deduplicate import deduplicate
from autopar.passes.defer import defer
from autopar.passes.lay_out import lay_out
from autopar.passes.nodes import is_issue, is_wait
from autopar.passes.overlap import inputs_of
from autopar.passes.partition import Parts
from autopar.passes.prefetch import prefetch
from autopar.passes.shard import Sharded


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


def run_passes(sharded: Sharded, prefix: str, passes: Sequence[Pass] = joint_passes()) -> Sharded:
    """`sharded` after `passes`; raises AssertionError naming the pass that broke the graph."""
    have = {"local"}
    verify(sharded.gm, sharded.fake_mode, prefix, "shard", live=False)
    gm = sharded.gm
    for p in passes:
        missing = p.requires - have
        assert not missing, f"pass {p.name!r} requires {sorted(missing)}, which no pass before it provides"
        gm = p.run(gm)
        have |= p.provides
        verify(gm, sharded.fake_mode, prefix, p.name, live="live" in have)
    return Sharded(gm, sharded.inputs, sharded.outputs, sharded.collectives, sharded.fake_mode)


def verify(gm: fx.GraphModule, fake_mode: object, prefix: str, after: str, *, live: bool) -> None:
    """Raises AssertionError that names the node and the pass."""
    gm.graph.lint()
    for n in gm.graph.nodes:
        where = f"after {after}: {n.format_node()}"
        if n.op == "output":
            continue
        assert "val" in n.meta and n.meta.get("direction") in ("forward", "backward"), f"no value or direction {where}"
        if n.op != "call_function":
            continue
        if n.meta["direction"] == "forward":
            assert all(a.meta["direction"] == "forward" for a in n.all_input_nodes), f"forward reads backward {where}"
        verify_collective(n, prefix, where, live)
    if os.environ.get("AUTOPAR_DEBUG"):
        _torch.check_recorded_values(gm, fake_mode)


def verify_collective(n: fx.Node, prefix: str, where: str, live: bool) -> None:
    if is_issue(n):
        groups = [a for a in n.args if isinstance(a, str) and "." in a]
        assert all(g.startswith(prefix + ".") for g in groups), f"a group name that may differ between ranks {where}"
        assert len(n.users) == 1 and all(is_wait(u) for u in n.users), f"a collective without its one wait {where}"
    if is_wait(n) and live:
        assert n.users, f"a collective without a user {where}"


def overlap(parts: Parts, prefix: str) -> Parts:
    """`parts` with parameters gathered ahead of their use and gradients reduced behind it; the same nodes in another order. Bitwise."""
    inputs = inputs_of(parts, False)
    forward = _same_calls(parts.forward, prefetch(parts.forward, inputs), prefix, "prefetch")
    if parts.backward is None:
        return replace(parts, forward=forward)
    inputs = inputs_of(parts, True)
    backward = _same_calls(parts.backward, prefetch(parts.backward, inputs), prefix, "prefetch")
    return replace(parts, forward=forward, backward=_same_calls(backward, defer(backward, inputs), prefix, "defer"))


def _same_calls(before: fx.GraphModule, gm: fx.GraphModule, prefix: str, after: str) -> fx.GraphModule:
    """`gm`, checked to have every call of `before` once, its collectives whole, its nodes in a legal order."""
    gm.graph.lint()
    calls = [sorted(n.format_node() or "" for n in g.graph.nodes if n.op == "call_function") for g in (before, gm)]
    assert calls[0] == calls[1], f"other calls after {after}"
    for n in gm.graph.nodes:
        verify_collective(n, prefix, f"after {after}: {n.format_node()}", True)
    return gm
