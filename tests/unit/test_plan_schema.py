"""A plan's file says all of the plan, in one text for one plan; whatever else is in a file is refused with a PlanError, soon."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError
from autopar.graph.placement import Placement
from autopar.plan import schema as plan_schema
from autopar.plan.checks import PlanError
from autopar.plan.decisions import CollectiveUse, OpChoice, ParamChoice
from autopar.plan.diff import diff
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps, save
from tests.plans import full, made, with_collectives, with_sections
from tests.wide import cases

MESH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "fsdp+tp"])
@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_round_trip(name: str, layout: str) -> None:
    plan = made(name, MESH, layout)
    text = dumps(plan)
    back = Plan.loads(text)
    assert back == plan and dumps(back) == text and str(back) == str(plan)
    assert list(back.params) == list(plan.params) and list(back.ops) == list(plan.ops) and list(back.mesh_axes) == list(plan.mesh_axes)


def test_round_trip_of_collectives_and_every_section() -> None:
    plan = full(with_collectives("llama", MESH, "fsdp+tp"))
    assert plan.collectives and str(Plan.loads(dumps(plan))) == str(plan)
    back = Plan.loads(dumps(plan))
    assert back.__dict__ == plan.__dict__ and dumps(back) == dumps(plan)
    assert vars(back)["solver"]["seconds"] == 12.25 and vars(back)["predicted"]["mfu"] == 1 / 3


def test_padded_parameters() -> None:
    plan = made("llama", {"dp": 7}, "fsdp")
    assert any(c.padded != c.shape for c in plan.params.values()), "nothing is padded: another mesh is needed"
    assert Plan.loads(dumps(plan)) == plan


def test_canonical_text_is_one_text() -> None:
    """Not of the order in which dictionaries that have none were filled, nor of how long planning took; of the mesh's order it is."""
    plan = full(made("tiny", MESH, "fsdp+tp"))
    ops = {n: dataclasses.replace(c, strategy=dict(reversed(c.strategy.items()))) for n, c in plan.ops.items()}
    other = copy.copy(plan)
    for name, value in [("ops", ops), *((s, dict(reversed(vars(plan)[s].items()))) for s in ("activations", "predicted", "solver"))]:
        object.__setattr__(other, name, value)
    assert dumps(other) == dumps(plan)
    slower = with_sections(plan, {"seconds": 99.0})
    assert canonical(slower) == canonical(plan) and dumps(slower) != dumps(plan) and '"seconds"' not in canonical(plan)
    assert canonical(plan) in dumps(plan)
    tiny = made("tiny", {"dp": 2, "tp": 2}, "ddp")
    assert canonical(dataclasses.replace(tiny, mesh_axes={"tp": 2, "dp": 2})) != canonical(tiny)


def test_every_field_is_in_the_schema() -> None:
    """A field that is added to a plan and forgotten in its file would be lost without a word."""
    tables = {n for n in plan_schema.PlanModel.model_fields if n.endswith("_table")}
    named_otherwise = {"mesh_axes": "mesh", "targets": "ops", "modules": "ops"}
    assert {named_otherwise.get(f.name, f.name) for f in dataclasses.fields(Plan)} == set(plan_schema.PlanModel.model_fields) - tables
    for ours, model in ((OpChoice, plan_schema.OpModel), (ParamChoice, plan_schema.ParamModel), (Placement, plan_schema.PlacementModel)):
        assert {f.name for f in dataclasses.fields(ours)} == set(model.model_fields)
    assert {f.name for f in dataclasses.fields(CollectiveUse)} == set(plan_schema.UseModel.model_fields) | {"tensor"}


def deep(plan: Plan, layers: int) -> Plan:
    """The same choices for many copies of the model's ops and parameters."""

    def copies(d: dict[str, Any]) -> dict[str, Any]:
        return {f"model.layers.{i}.{n}": c for i in range(layers) for n, c in d.items()}

    uses = tuple(dataclasses.replace(c, tensor=f"{c.tensor}_{i}") for i in range(layers) for c in plan.collectives)
    return dataclasses.replace(
        plan,
        ops=copies(plan.ops),
        params=copies(plan.params),
        targets=copies(plan.targets),
        repeated=copies(plan.repeated),
        collectives=uses,
    )


def test_a_deep_models_file_is_small() -> None:
    plan = with_collectives("llama", MESH, "fsdp+tp")
    big = deep(plan, 20)
    assert len(big.ops) > 9_000
    text = dumps(big)
    assert Plan.loads(text) == big
    assert len(json.loads(text)["plan"]["op_table"]) == len(json.loads(dumps(plan))["plan"]["op_table"]) < 120
    assert len(text) < 80 * len(big.ops)


def test_numbers_of_numpy_are_written_as_pythons() -> None:
    import numpy as np

    plan = made("tiny", MESH, "tp")
    strange = dataclasses.replace(plan, repeated={n: np.float64(x) for n, x in plan.repeated.items()})
    assert dumps(strange) == dumps(plan)


def test_what_cannot_be_read_back_is_not_written() -> None:
    plan = made("tiny", MESH, "tp")
    name = next(iter(plan.ops))
    for bad in (
        dataclasses.replace(plan, repeated={name: float("nan")}),
        dataclasses.replace(plan, ops={**plan.ops, name: OpChoice({"nowhere": ("m", 1)})}),
        dataclasses.replace(plan, data_axes=("dp", "dp")),
        dataclasses.replace(plan, layout="a\x1b[2Jb"),
        dataclasses.replace(plan, mesh_axes={"dp": 1 << 30}),
        dataclasses.replace(plan, order=(name, name)),
        dataclasses.replace(plan, collectives=(CollectiveUse("all_reduce", ("dp",), 8.0, name, "forward", 0),)),
    ):
        with pytest.raises(PlanError):
            dumps(bad)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    plan = full(made("tiny", MESH, "fsdp"))
    file = tmp_path / "plan.json"
    save(plan, file)
    save(plan, str(file))
    assert Plan.load(file).__dict__ == plan.__dict__
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_plans_save_load_and_compare_themselves(tmp_path: Path) -> None:
    plan, other = made("tiny", MESH, "fsdp"), made("tiny", MESH, "ddp")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert str(plan.diff(other)) == str(diff(plan, other)) != str(plan.diff(plan))
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    save(made("tiny", MESH, "fsdp"), file)
    old = file.read_bytes()

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_schema.os, "fsync", full_disk)
    with pytest.raises(PlanError, match="No space left"):
        save(made("tiny", MESH, "ddp"), file)
    assert file.read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / ("x" * 5000), tmp_path / "a\0b"):
        with pytest.raises(PlanError):
            Plan.load(path)
    with pytest.raises(PlanError):
        save(made("tiny", MESH, "ddp"), tmp_path / "none" / "plan.json")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "huge.json"
    with file.open("wb") as f:
        f.truncate(1 << 40)  # a hole: takes no disk
    start = time.process_time()
    with pytest.raises(PlanError, match="more than 256 MB") as e:
        Plan.load(file)
    assert time.process_time() - start < 1 and str(file) in e.value.where


# ---- files that are no plans -----------------------------------------------------------------------------------------


def raw() -> Any:
    return json.loads(dumps(full(made("tiny", MESH, "fsdp+tp"))))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ends in the middle"),
        (b'{"plan":{', "ends in the middle"),
        (b'{"schema_version":1,"pl', "ends in the middle"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"[" + b"[]," * 4_000_000 + b"[]]", "values"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}", "keys"),
        (b'{"schema_version":1,"plan":{' + b",".join(b'"%d":1' % i for i in range(90_000)) + b"}}", "and 90"),
        (b'{"schema_version":1,"plan":[' + b"{}," * 1_000_000 + b"{}]}", "plan: Input"),
        (b'{"schema_version":1,"schema_version":1}', "given twice"),
        (b'{"schema_version":NaN}', "NaN"),
        (b'{"schema_version":-Infinity}', "Infinity"),
        (b'{"schema_version":1e999}', "too large"),
        (b'{"schema_version":' + b"9" * 1_000_000 + b"}", "digits"),
        (b'{"schema_version":1.' + b"0" * 1_000_000 + b"}", "does not fit"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"PK\x03\x04", "not JSON"),
        (b"\x80\x04cos\nsystem\n", "UTF-8"),
        (b"[]", "schema_version"),
        (b"null", "schema_version"),
        (b"{}", "schema_version"),
        (b'{"schema_version":2,"plan":{}}', "version 2; this autopar reads version 1"),
        (b'{"schema_version":true}', "version True"),
        (b'{"schema_version":[1]}', "version"),
        (b'{"schema_version":1}', "does not fit"),
        (b'{"schema_version":1,"plan":{},"exec":"x"}', "does not fit"),
    ],
)
def test_hostile_text(data: bytes, said: str) -> None:
    start = time.process_time()
    with pytest.raises(PlanError, match=said) as e:
        Plan.loads(data, "some/plan.json")
    assert "some/plan.json" in e.value.where and e.value.fix and len(str(e.value)) < 1500
    assert time.process_time() - start < 5


def set_at(path: str, value: Any) -> bytes:
    """The plan's file with `value` at "params.0.1"."""
    root = raw()
    *keys, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    at = root["plan"]
    for k in keys:
        at = at[k]
    at[last] = value
    return json.dumps(root).encode()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("mesh", [], "mesh"),
        ("mesh", [["dp", 0]], "mesh"),
        ("mesh", [["dp", -2]], "mesh"),
        ("mesh", [["dp", 2.0]], "mesh"),
        ("mesh", [["dp", True]], "mesh"),
        ("mesh", [["dp", 1 << 21]], "devices"),
        ("mesh", [[f"a{i}", 1 << 60] for i in range(60)], "devices"),
        ("mesh", [["dp", 2], ["dp", 2]], "one name"),
        ("mesh", [["dp", 4], ["dp.0", 2]], "share a name"),
        ("mesh", [["dp", 2], ["tp", 2]], "no axis .tp.1"),
        ("data_axes", ["dp", "dp"], "twice"),
        ("data_axes", ["tp"], "no axis 'tp'"),
        ("inputs.0.splits", [["dp", 0, 3]], "does not divide"),
        ("inputs.0.splits", [["dp", 7, 1]], "does not divide"),
        ("inputs.0.splits", [["dp", 0, 4], ["dp", 1, 4]], "twice"),
        ("inputs.0.splits", [["dp", 0, 4], ["tp.0", 0, 4]], "does not divide"),
        ("inputs.0.partial", [["tp.0", "lse"]], "partial"),
        ("inputs.0.shape", [1 << 62, 1 << 62], "64 bits"),
        ("inputs.0.shape", [-8, 8], "shape"),
        ("inputs.0.shape", [1] * 65, "shape"),
        ("op_table.0.strategy", [["nowhere", "m", 1]], "no axis 'nowhere'"),
        ("op_table.0.strategy", [["dp", "m", 0]], "strategy"),
        ("op_table.0.strategy", [["dp", "m", 1], ["dp", "n", 1]], "twice"),
        ("op_table.0.kind", "a\x1b[2J", "kind"),
        ("op_table.0.kind", "\ud800", "kind"),
        ("op_table.0.kind", "k" * 10_000, "kind"),
        ("op_table.0.code", "import os", "code"),
        ("ops.0.1", 100_000, "entry 100000"),
        ("ops.0.1", -1, "ops"),
        ("params.0.1", 10**18, "entry"),
        ("param_table.0.padded", [1], "other shapes"),
        ("repeated", [["nothing", 2.0]], "no op"),
        ("recompute", ["nothing"], "no op"),
        ("order", ["nothing"], "no op"),
        ("order", ["mm", "mm"], "twice"),
        ("order", "mm", "order"),
        ("collective_table.0.count", 0, "count"),
        ("collective_table.0.count", 1.5, "count"),
        ("recompute", ["mm", "mm"], "twice"),
        ("kept", [["mm", 99]], "entry 99"),
        ("kept", [["mm", 0], ["mm", 0]], "twice"),
        ("kept_table.0.splits", [["dp", 0, 7]], "does not divide"),
        ("activations", {"burn": []}, "activations"),
        ("activations", {"save": ["a"], "recompute": ["a"]}, "twice"),
        ("predicted", {"mfu": "fast"}, "predicted"),
        ("solver", {"seconds": [1]}, "solver"),
        ("solver", {"seconds": 1.0}, "both"),
    ],
)
def test_contradictions_and_misfits(path: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said) as e:
        Plan.loads(set_at(path, value))
    assert len(str(e.value)) < 1500


def test_an_op_without_rule_or_repeated_has_a_target() -> None:
    """`Plan.text` looks it up."""
    root = raw()
    for row in root["plan"]["ops"]:
        row[2] = None
    root["plan"]["repeated"] = []
    assert Plan.loads(json.dumps(root)).targets == {}
    for choice in root["plan"]["op_table"]:
        choice["fallback"] = True
    with pytest.raises(PlanError, match="no target"):
        Plan.loads(json.dumps(root))


# ---- random damage -------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 1 << 40, 1 << 70, 0.5, -1e300, "", "dp", "tp.0", "dp.0", "mm", "sum", "save", "\x00", "x" * 2000, "\ud800",
    [], [[]], [None], {}, {"": 0}, [["dp", 2]], [["dp", 0, 1]], ["dp"], [1, 2], [8, 8],
]  # fmt: skip


def spots(x: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    if isinstance(x, (dict, list)):
        for k in list(x) if isinstance(x, dict) else range(len(x)):
            yield x, k
            yield from spots(x[k])


def mutate(root: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = list(spots(root))
        if not places:
            return root
        at, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            at[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 1:
            del at[key]
        elif kind == 2:
            other, k = rng.choice(places)
            at[key] = copy.deepcopy(other[k]) if k in (other if isinstance(other, dict) else range(len(other))) else None
        elif kind == 3 and isinstance(at, list):
            at.insert(key, copy.deepcopy(at[key]))
        elif kind == 4 and isinstance(at, dict):
            at[rng.choice(["extra", "shape", "splits", "mesh"])] = at.pop(key)
        elif kind == 5 and isinstance(at, list):
            rng.shuffle(at)
        elif isinstance(at[key], int):
            at[key] = rng.choice([at[key] + 1, at[key] - 1, at[key] * 2, -at[key], float(at[key])])
    return root


def damaged(text: str, rng: random.Random) -> bytes:
    data = bytearray(text.encode())
    kind = rng.randrange(10)
    if kind < 3:
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[rng.randrange(len(data)) :]
    elif kind == 4:  # a digit for a digit: still JSON
        digits = [i for i, c in enumerate(data) if 48 <= c <= 57]
        data[rng.choice(digits)] = rng.randrange(48, 58)
    else:
        return json.dumps(mutate(json.loads(text), rng)).encode()
    return bytes(data)


@pytest.mark.parametrize("files", cases([1500, 10_000], [1500]))
def test_damaged_files(files: int) -> None:
    """Each is refused with an AutoparError, or is a plan with which everything that can be done to a plan can be done."""
    plan = full(made("tiny", MESH, "fsdp+tp"))
    text = dumps(plan)
    assert len(text) < 8000
    rng = random.Random(0)
    refused = slowest = 0.0
    start = time.process_time()
    for _ in range(files):
        data = damaged(text, rng)
        began = time.process_time()
        try:
            found = Plan.loads(data)
        except AutoparError as e:
            refused += 1
            assert e.fix and len(str(e)) < 2000
        else:
            again = dumps(found)
            back = Plan.loads(again)
            assert back.__dict__ == found.__dict__ and dumps(back) == again
            str(found), found.data_size, found.fallbacks, diff(plan, found)
        slowest = max(slowest, time.process_time() - began)
    assert 0.3 * files < refused < 0.99 * files, "the damage is too mild or too harsh to show anything"
    assert slowest < 2 and time.process_time() - start < 60
