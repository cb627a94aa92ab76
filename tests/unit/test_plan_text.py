"""A plan as people read it: a block for every kind of layer, each row once."""

from __future__ import annotations

import dataclasses

from autopar.graph.placement import Placement
from autopar.plan.decisions import CollectiveUse, OpChoice, ParamChoice
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps

MESH = {"dp": 4, "tp": 2}
AXES = ("dp.0", "dp.1", "tp")


def param(shape: tuple[int, ...], where: dict[str, tuple[int, int]] | None = None) -> ParamChoice:
    whole = Placement.of(shape)
    return ParamChoice(shape, "float32", shape, Placement.of(shape, where or {}), whole)


def heavy(letters: str) -> OpChoice:
    return OpChoice(dict(zip(AXES, ((x, 1) for x in letters), strict=True)), kind="matmul")


def plan() -> Plan:
    split = {"dp.0": (0, 4), "dp.1": (0, 2)}
    params = {"embed.weight": param((16, 8))}
    for i in range(6):
        params[f"layers.{i}.up.weight"] = param((8, 8), split if i < 4 else None)
        params |= {f"layers.{i}.experts.{e}.weight": param((4, 8)) for e in range(2)}
    ops = {
        "mm": heavy("mmn"),
        "mul": OpChoice({"dp.0": ("a", 1)}),
        "mm_1": heavy("mmn"),
        "mm_4": heavy("mmn"),
        "mm_2": heavy("mkk"),
        "mm_3": heavy("nnm"),
    }
    return Plan(
        MESH, "planned", params, ops, (), (), ("dp.0", "dp.1"),
        targets={n: "aten.mul.Tensor" if n == "mul" else "aten.mm.default" for n in ops},
        modules={"mm": "layers.0.up", "mul": "layers.1", "mm_1": "layers.1.up", "mm_4": "layers.2.up", "mm_2": "head"},  # mm_3 is of backward
        collectives=(
            CollectiveUse("all_gather", ("dp.0", "dp.1"), 1e6, "layers.*.up.weight", "forward", 6),
            CollectiveUse("all_gather", ("dp.0", "dp.1"), 5e6, "embed.weight", "forward"),
            CollectiveUse("slice", ("tp",), 0.0, "mm", "forward"),
        ),
        activations={"mul": "save", "mm_1": "recompute", "mm": "save", "mm_4": "recompute", "mm_1~0": "save"},
        segments={"layers": (2, 4)},
        predicted={"forward_s": 0.1, "step_time_s": 0.25, "peak_memory_bytes": 2e9, "blocking_collectives": 3.0, "budget_bytes": 3e9, "passes": 2.0,
                   "exposed_s": 0.025, "tokens_per_s": 524288.0, "mfu": 0.412},
        cluster="h100:1x8",
        solver={"gap": 0.004, "stopped_by": "gap", "capture": "folded from captures of 2 and 3 layers"},
    )  # fmt: skip


def test_text() -> None:
    assert plan().text().splitlines() == [
        "plan: layout planned on mesh dp=4 x tp=2, batch split 4 ways",
        "outside of layers",
        "  embed.weight            128  stored Replicate    computed with Replicate",
        "  head  mm  dp.0:tokens, dp.1:in, tp:in",
        "layers.0-3  (4 layers)",
        "  up.weight                64  stored Shard(0) dp  computed with Replicate",
        "  experts.*.weight (2 x)   64  stored Replicate    computed with Replicate",
        "  up    mm  dp:tokens, tp:out",
        "  2 of 6 layers: kept for backward: up",
        "  4 of 6 layers: kept for backward: aten.mul.Tensor",
        "  4 of 6 layers: made again in backward: up",
        "layers.4-5  (2 layers)",
        "  up.weight                64  stored Replicate    computed with Replicate",
        "  experts.*.weight (2 x)   64  stored Replicate    computed with Replicate",
        "collectives: 7, 3 of them block",
        "  forward  all_gather      over dp               7 x, 11.00 MB sent a rank",
        "  forward  slice           over tp               1 x, 0 B sent a rank",
        "fallbacks (ops without a rule, replicated): none",
        "predicted on h100:1x8: step time 250.0 ms, 524,288 tokens/s (65,536 a device), MFU 41.2%",
        "  forward 100.0 ms, exposed communication 25.00 ms (10.0% of the step)",
        "  peak memory 2.00 GB of 3.00 GB",
        "  passes 2",
        "solver: within 0.40% of the bound, stopped by gap",
        "capture: folded from captures of 2 and 3 layers",
    ]  # fmt: skip


def test_text_of_buckets() -> None:
    """What is expected, until the plan was compiled and they are known; the same plan either way."""
    expected = dataclasses.replace(plan(), predicted={"bucketed_collectives": 12.0, "buckets": 3.0, "bucket_saved_s": 0.009})
    compiled = dataclasses.replace(expected, solver={"buckets": "6 collectives in 2, which takes 4.000 ms off the links"})
    off = dataclasses.replace(expected, solver={"buckets": ""})
    said = [[line for line in p.text().splitlines() if "buckets" in line] for p in (plan(), expected, compiled, off)]
    assert said == [
        [],
        ["  buckets: 12 collectives in 3, which takes 9.000 ms off the links"],
        ["  buckets: 6 collectives in 2, which takes 4.000 ms off the links"],
        [],
    ]
    assert canonical(dataclasses.replace(compiled, solver={})) == canonical(dataclasses.replace(expected, solver={})) == canonical(compiled)
    assert Plan.loads(dumps(compiled)).text() == compiled.text()


def test_text_is_the_files() -> None:
    assert (
        Plan.loads(dumps(dataclasses.replace(plan(), activations={"mm": "save"}))).text()
        == dataclasses.replace(plan(), activations={"mm": "save"}).text()
    )


def test_modules_that_are_no_layers() -> None:
    """A sequence of different modules has a row for each."""
    some = dataclasses.replace(
        plan(), params={"0.weight": param((8, 8)), "2.weight": param((4, 8), {"tp": (0, 2)})}, ops={}, activations={}
    )
    lines = some.text().splitlines()
    assert lines[1:4] == [
        "outside of layers",
        "  0.weight  64  stored Replicate    computed with Replicate",
        "  2.weight  32  stored Shard(0) tp  computed with Replicate",
    ]
