"""Overlap and recomputation on simulated ranks: a model's step stays that of one device, and stays bit for bit what it is without them."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.mesh import Mesh
from autopar.passes.manager import overlap
from autopar.passes.overlap import blocking, marked, overlapped
from autopar.passes.partition import Parts, partition
from autopar.passes.recompute import recomputable, saved_bytes
from autopar.passes.shard import Sharded
from autopar.runtime.lower import lower
from autopar.simulate.simulator import price_ops, records
from autopar.timeline.replay import COMPUTE, replay
from tests.spmd import simulate
from tests.spmd.simulate import Simulated, fake_world, one_device
from tests.spmd.test_models import assert_equal_gradients, prepared
from tests.wide import cases

SEED = (7, 1)
CASES = [
    ("llama", {"dp": 4}, "fsdp"),
    ("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
    ("gpt2", {"dp": 4}, "fsdp"),
    ("gpt2", {"dp": 2, "tp": 2}, "fsdp+tp"),
]
SMALL = ("toy-dropout", {"dp": 2, "tp": 2}, "fsdp+tp")


class _Case:
    """A model's step on a mesh: what partitioning began with, and how to run its halves."""

    def __init__(self, name: str, axes: dict[str, int], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.p, self.kwargs = prepared(name, 4, 8, 3)
        self.mesh = Mesh.of(axes)
        given: list[Sharded] = []

        def remember(sharded: Sharded, **kwargs: Any) -> Parts:
            given.append(sharded)
            return partition(sharded, **kwargs)

        monkeypatch.setattr(simulate, "partition", remember)
        self.sim: Simulated = simulate.simulated(self.p, axes, layout)
        (self.sharded,) = given

    def run(self, parts: Parts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = self.p.model
        outputs, grads, _ = replace(self.sim, parts=parts).run(
            dict(model.named_parameters()), dict(model.named_buffers()), self.p.tensors, SEED
        )
        return outputs[0], grads

    def seconds(self, parts: Parts) -> tuple[float, float]:
        """(the step's, exposed) where an op takes 10 us and a collective 20."""
        price = price_ops(parts, "sim", self.mesh.sizes_product, lambda op: 1e-5, lambda kind, axes, wire: ("intra", 2e-5))
        table, start = records(parts, price)
        r = replay(table, start)
        return r.seconds, r.exposed_s


def _equal(a: tuple[torch.Tensor, dict[str, torch.Tensor]], b: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize(("name", "axes", "layout"), cases(CASES, CASES[:1] + CASES[3:]))
def test_overlap(name: str, axes: dict[str, int], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(Mesh.of(axes).size):
        case = _Case(name, axes, layout, monkeypatch)
        parts = case.sim.parts
        moved = overlap(parts, "sim")
        got = case.run(moved)
        assert _equal(got, case.run(parts))
    model = copy.deepcopy(case.p.model)
    loss = one_device(model, case.kwargs, SEED)
    loss.backward()
    torch.testing.assert_close(got[0], loss.detach(), rtol=2e-6, atol=2e-6)
    assert_equal_gradients(model, got[1], False)
    for before, after in ((parts.forward, moved.forward), (parts.backward, moved.backward)):
        assert blocking(before) == len(overlapped(before)), "a collective is overlapped without the passes"
        shown = [n for n, window in overlapped(after) if window == 0 and marked(n)]
        # The first gather has nothing before it, nor a first gather of a chain of two; the last reduction nothing after.
        assert len(shown) <= (2 if layout == "fsdp" else 8), shown
    for seconds, exposed in [case.seconds(moved)]:
        before_s, before_exposed_s = case.seconds(parts)
        assert seconds < before_s and exposed < before_exposed_s


@pytest.mark.parametrize(("name", "axes", "layout"), cases([SMALL, *CASES], [SMALL]))
def test_recompute(name: str, axes: dict[str, int], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ops at once, then every third in turn."""
    with fake_world(Mesh.of(axes).size):
        case = _Case(name, axes, layout, monkeypatch)
        want = case.run(case.sim.parts)
        base = case.sim.parts
        ops = recomputable(case.sharded)
        assert len(ops) > 50
        for again in (ops, *(frozenset(sorted(ops)[i::3]) for i in range(2))):
            for reshard in (True, False):
                parts = partition(case.sharded, reshard_after_forward=reshard, recompute=again)
                assert _equal(case.run(parts), want) and _equal(case.run(overlap(parts, "sim")), want)
                if reshard and again is ops:  # of some, what they read may be more than what they make
                    assert saved_bytes(parts.forward, len(parts.saved)) < saved_bytes(base.forward, len(base.saved))
            if again is ops:
                # Only the batch and constants are left, none of which forward computes.
                places = [n for n in partition(case.sharded, recompute=ops).forward.graph.nodes if n.op == "placeholder"]
                assert set(partition(case.sharded, recompute=ops).saved) <= {n.name for n in places}


# ---- memory --------------------------------------------------------------------------------------------------------


class _Allocated(_torch.TorchDispatchMode):
    """Bytes of all storages that are alive, and the most there were."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.peak = 0
        for t in tensors:
            self.add(t)

    def add(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.remove(key)
        self.now -= size

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor):
                self.add(t)
        return out


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_replayed_memory_is_what_eager_allocates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: plain, with layers recomputed between their residual sums, and with all recomputed at once."""
    with fake_world(1):
        case = _Case(name, {"dp": 1}, "ddp", monkeypatch)
    model = case.p.model
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    calls = [n for n in case.sharded.gm.graph.nodes if n.op == "call_function" and n.meta["direction"] == "forward"]
    shape = (4, 8, model.config.hidden_size)
    sums = {n.meta["op"] for n in calls if n.target is torch.ops.aten.add.Tensor and tuple(n.meta["val"].shape) == shape}
    ops = recomputable(case.sharded)
    peaks = []
    for again in (frozenset(), ops - sums, ops):
        parts = partition(case.sharded, recompute=again)
        values: dict[Role, torch.Tensor] = {}
        for role in {*parts.forward_inputs, *parts.backward_inputs}:
            if role.kind in ("param", "buffer"):
                values[role] = tensors[role.name].detach().clone()
            elif role.kind == "input":
                values[role] = case.p.tensors[role.index].clone()
            else:
                values[role] = {"seed": torch.tensor([3, 5]), "tangent": torch.ones(())}[role.kind]
        forward, backward = (lower(g, backend="aot_eager", fake_mode=None).fn for g in (parts.forward, parts.backward))
        given = [values[r] for r in parts.forward_inputs]
        with _Allocated(given) as allocated:
            results = forward(given)
            flat = [*results[len(parts.forward_outputs) :], *(values[r] for r in parts.backward_inputs)]
            del results[len(parts.forward_outputs) :]
            grads = backward(flat)
        table, start = records(parts, lambda n: (COMPUTE, 1.0))
        replayed = replay(table, start)
        assert (replayed.peak_bytes, replayed.end_bytes) == (allocated.peak, allocated.now)
        assert all(g is not None for g in grads)
        peaks.append(replayed.peak_bytes)
    assert peaks[1] < 0.75 * peaks[0], peaks
