"""The difference of two plans: empty exactly if they are equal, short though layers are many, and naming what changed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from autopar.plan.decisions import PipelineChoice
from autopar.plan.diff import LINES, diff
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.timeline.profile import Profile
from tests.plans import full, made, with_collectives, with_sections

MESH = {"dp": 2, "tp": 2}


@functools.cache
def base() -> Plan:
    return full(with_collectives("llama", MESH, "fsdp+tp"))


def changed(plan: Plan, **values: Any) -> Plan:
    """As dataclasses.replace, which forgets sections that are no fields."""
    out = Plan.loads(dumps(plan))
    for k, v in values.items():
        object.__setattr__(out, k, v)
    return out


def test_equal_plans_do_not_differ() -> None:
    for layout in ("ddp", "fsdp+tp"):
        plan = made("llama", MESH, layout)
        assert diff(plan, plan) == diff(plan, Plan.loads(dumps(plan))) == ""
    plan = base()
    assert diff(plan, Plan.loads(dumps(plan))) == ""
    assert diff(plan, with_sections(plan, {"seconds": 99.0})) == "", "how long planning took is no difference"


def test_other_layout() -> None:
    """Both layers change alike: one line for each kind of parameter and change, with the count."""
    a, b = made("llama", MESH, "ddp"), made("llama", MESH, "fsdp+tp")
    lines = diff(a, b).splitlines()
    assert "layout: ddp -> fsdp+tp" in lines and "batch split over: dp x tp -> dp" in lines
    (q,) = [x for x in lines if "q_proj.weight" in x]
    want = "stored Replicate -> Shard(0) tp, Shard(1) dp; computed with Replicate -> Shard(0) tp"
    assert q == f"  model.layers.*.self_attn.q_proj.weight: {want}  (2 x)"
    ops = lines[lines.index("ops:") + 1 :]
    assert ops[0].startswith("  aten.mm.default: ") and " over tp" in ops[0]
    assert not any(x.startswith(("  aten.view", "  aten.mul")) for x in ops[:4]), "ops that cost come first"
    assert len(lines) < 20 + 2 * LINES


def test_mesh_order_counts() -> None:
    a = made("tiny", MESH, "ddp")
    assert diff(a, dataclasses.replace(a, mesh_axes={"tp": 2, "dp": 2})) == "mesh: dp=2 x tp=2 -> tp=2 x dp=2"


def test_a_change_that_short_words_hide() -> None:
    """The same axes on the same dim, but another block of it: told digit by digit."""
    a = made("tiny", {"tp": 2}, "tp")
    name, c = next((n, c) for n, c in a.params.items() if c.compute.splits)
    (s,) = c.compute.splits
    other = c.compute.with_axis("tp", (s.dim, s.stride // 2))
    b = dataclasses.replace(a, params={**a.params, name: dataclasses.replace(c, compute=other)})
    assert f"computed with {c.compute} -> {other}" in diff(a, b)
    op, choice = next((n, c) for n, c in a.ops.items() if c.strategy)
    letter, stride = choice.strategy["tp"]
    b = dataclasses.replace(a, ops={**a.ops, op: dataclasses.replace(choice, strategy={"tp": (letter, stride * 2)})})
    assert f"tp:{letter}/{stride} [{choice.kind}] -> tp:{letter}/{stride * 2}" in diff(a, b)


def test_sections() -> None:
    a = base()
    ops = list(a.ops)
    text = diff(
        a,
        changed(
            a,
            fingerprint="0" * 64,
            activations={**{o: "save" for o in ops[:3]}, ops[3]: "offload:host"},
            recompute=frozenset(),
            predicted={"step_time_s": 0.2, "mfu": 1 / 3, "exposed_comm_s": 0.01},
            solver={**vars(a)["solver"], "status": "feasible", "seconds": 1.0},
        ),
    ).splitlines()
    assert f"fingerprint: {'f' * 64} -> {'0' * 64}" in text
    assert [x for x in text if "offload:nvme -> (none)" in x] and [x for x in text if "recompute -> save  (1 x)" in x]
    assert [x for x in text if x.endswith("yes -> (none)  (1 x)")]
    assert "  step time: 100.0 ms -> 200.0 ms  (+100.0%)" in text
    assert "  peak memory: 70.00 GB -> (none)" in text and "  exposed comm: (none) -> 10.00 ms" in text
    assert "  status: optimal -> feasible" in text
    assert not [x for x in text if "mfu" in x or "seconds" in x]


def test_collectives() -> None:
    a = base()
    first, second, *rest = a.collectives
    fewer = diff(a, changed(a, collectives=(second, *rest)))
    assert fewer.startswith(f"collectives:\n  {first.direction} {first.kind} over") and len(fewer.splitlines()) == 2
    other = changed(a, collectives=(dataclasses.replace(first, tensor="other"), second, *rest))
    assert diff(a, other) == "collectives:\n  the same in all, for other tensors"
    assert diff(a, changed(a, collectives=(second, first, *rest))) == "collectives:\n  the same, in another order"


def test_no_field_is_overlooked() -> None:
    """Whatever field of a plan changes, also one that this file does not know, shows."""
    a = base()
    name, op = next(iter(a.ops.items()))
    param, choice = next(iter(a.params.items()))
    others: dict[str, Any] = {
        "mesh_axes": {"tp": 2, "dp": 2},
        "layout": "other",
        "params": {**a.params, param: dataclasses.replace(choice, trainable=False)},
        "ops": {**a.ops, name: dataclasses.replace(op, fallback=True)},
        "inputs": a.inputs[:1],
        "outputs": (),
        "data_axes": (),
        "targets": {**a.targets, name: "other"},
        "collectives": a.collectives[:1],
        "repeated": {name: 2.0},
        "reshard_after_forward": False,
        "fingerprint": "x",
        "order": (name,),
        "modules": {name: "other"},
        "segments": {"layers": (1, 2)},
        "together": 2,
        "micro_batches": 2,
        "imbalance": 1.5,
        "pipeline": PipelineChoice("1f1b", 2, (0, 1), (("a",), ("b",)), (0.5, 0.5), (1.0, 0.0), 0.2),
        "cluster": "x",
        "activations": {},
        "recompute": frozenset(),
        "unmet": (),
        "kept": {},
        "predicted": {},
        "solver": {},
        "profile": Profile((), (), (), (), (), {}),
    }
    assert {f.name for f in dataclasses.fields(Plan)} <= set(others)
    for field, value in others.items():
        assert diff(a, changed(a, **{field: value})) and diff(changed(a, **{field: value}), a), field


@pytest.mark.parametrize("ops", [200])
def test_long_differences_are_cut(ops: int) -> None:
    a = with_sections(made("tiny", MESH, "ddp"))
    b = with_sections(a, predicted={f"figure {i}": float(i) for i in range(ops)})
    text = diff(a, b).splitlines()
    assert len(text) == LINES + 2 and text[-1] == f"  and {ops - LINES} more"
