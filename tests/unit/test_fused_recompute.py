"""What backward's kernels make again for nothing: the same gradients to the bit, less that is saved and read, nothing heavy again."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from autopar.capture.capture import Role
from autopar.cost.compute import HEAVY
from autopar.graph.calls import is_collective
from autopar.hardware.cluster import Cluster
from autopar.passes.fused_recompute import _maker
from autopar.passes.partition import Parts, partition
from autopar.passes.recompute import from_parameters
from benchmarks.baselines.measure import lowered, tensors
from benchmarks.baselines.program import Program, capture_program
from tests.models import ZOO
from tests.wide import cases

MODELS = ("llama", "gpt2", "bert", "t5")


@functools.cache
def captured(name: str, fuses: bool = True) -> Program:
    torch.manual_seed(0)
    return capture_program(
        ZOO[name].build(2).train(), ZOO[name].inputs(4, 16), {"dp": 1}, Cluster.of("h100:1"), "ddp", "bfloat16", fuses=fuses
    )


def halves(name: str, fuses: bool, pinned: frozenset[str] = frozenset()) -> Parts:
    p = captured(name)
    with mock.patch("autopar.passes.fused_recompute.LEAST_BYTES", 1):
        return partition(p.marked(p.base), fuses=fuses, pinned=pinned)


def calls(gm: fx.GraphModule | None) -> list[str]:
    assert gm is not None
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def gradients(name: str, fuses: bool) -> dict[Role, Any]:
    p = captured(name)
    torch.manual_seed(1)
    values = tensors(p)
    values |= {r: torch.randint(0, 64, t.shape) for r, t in values.items() if r.kind == "input"}
    with mock.patch.object(Program, "parts", lambda self, plan: halves(name, fuses)):
        return lowered(p, p.base, values)()


@pytest.mark.parametrize("name", cases(MODELS, ["llama", "gpt2"]))
def test_same_gradients_of_less(name: str) -> None:
    plain, free = halves(name, False), halves(name, True)
    gone = set(plain.saved) - set(free.saved)
    assert gone and len(calls(free.backward)) > len(calls(plain.backward)), "nothing is made again"
    assert not Counter(calls(free.forward)) - Counter(calls(plain.forward)), "more in forward"
    want, got = gradients(name, False), gradients(name, True)
    assert want.keys() == got.keys()
    assert all(g is None or torch.equal(g, want[r]) for r, g in got.items())


@pytest.mark.parametrize("name", cases(MODELS, ["llama", "gpt2"]))
def test_only_what_is_cheap_runs_again(name: str) -> None:
    """As many products, attentions, random numbers and collectives as before."""
    p = captured(name)
    heavy = {op.target for op in p.graph.ops if p.rules[op.name].kind in {*HEAVY, "attention", "random"}}

    def count(parts: Parts) -> list[str]:
        assert parts.backward is not None
        kept = [n for n in parts.backward.graph.nodes if str(n.target) in heavy or n.meta.get("random") or is_collective(n)]
        return sorted(str(n.target) for n in kept)

    assert count(halves(name, True)) == count(halves(name, False))


@pytest.mark.parametrize("name", cases(MODELS, ["llama", "gpt2"]))
def test_faster_and_smaller_as_compiled(name: str) -> None:
    p = captured(name)
    with mock.patch("autopar.passes.fused_recompute.LEAST_BYTES", 1):
        plain, free = (p.point(p.base, "compiled", ours) for ours in (False, True))
    assert free.step_s <= plain.step_s and free.saved_bytes < plain.saved_bytes and free.peak_bytes <= plain.peak_bytes * (1 + 1e-3)


def test_what_users_want_saved_stays() -> None:
    """All pinned: as if nothing were compiled. One value: that one."""
    plain, free = halves("gpt2", False), halves("gpt2", True)
    p = captured("gpt2")
    assert halves("gpt2", True, frozenset(op.name for op in p.graph.ops)).saved == plain.saved
    nodes = {n.name: n for n in p.marked(p.base).gm.graph.nodes}
    gone = next(x for x in plain.saved if x not in free.saved and "tanh" in str(_maker(nodes[x]).target))
    assert gone in halves("gpt2", True, frozenset({_maker(nodes[gone]).meta["op"]})).saved


def test_what_follows_from_parameters_is_left_to_its_own_rule() -> None:
    p = captured("llama")
    sharded = p.marked(p.base)
    roles = dict(zip(sharded.gm.graph.find_nodes(op="placeholder"), sharded.inputs, strict=True))
    known = {n.name for n in from_parameters(sharded.gm.graph.nodes, roles)}
    plain, free = halves("llama", False), halves("llama", True)
    assert not ({*plain.saved} & known) and not ({*free.saved} & known)
