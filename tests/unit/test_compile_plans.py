"""What `autopar.compile` plans with, and what ranks tell each other: everything that needs no process group."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.distributed import agreement as agree
from autopar.distributed.agreement import agreed, difference, from_first
from autopar.distributed.shards import dtensor_placements
from autopar.errors import AutoparError, InputError, MeshError
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware import detect as machine
from autopar.hardware.cluster import ClusterError
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps, save
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.request import PlanRequest, following, refuse_other_mesh, storable, training_config
from tests.models import ZOO
from tests.plans import made

# ---- arguments ---------------------------------------------------------------------------------------------------


def test_a_plan_or_its_file(tmp_path: Path) -> None:
    plan = made("tiny", {"dp": 2}, "fsdp")
    save(plan, tmp_path / "p.json")
    assert PlanRequest.of(plan, None, None, None).plan is plan
    assert (
        PlanRequest.of(tmp_path / "p.json", None, None, None).plan
        == PlanRequest.of(str(tmp_path / "p.json"), None, None, None).plan
        == plan
    )


def test_the_rest_of_what_is_planned_with() -> None:
    request = PlanRequest.of(None, 6e10, "h100:2x8", {"seconds": 5, "gap": 0.1})
    assert request.memory_bytes == 6e10 and request.cluster is not None and request.cluster.size == 16
    assert (request.limits.seconds, request.limits.gap) == (5, 0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, None, None, None), "path of a plan file"),
        (("no/such/plan.json", None, None, None), "plan cannot be read"),
        ((None, 0, None, None), "memory=0"),
        ((None, float("nan"), None, None), "memory=nan"),
        ((None, None, "h1000", None), "h1000"),
        ((None, None, None, {"minutes": 1}), "minutes"),
        ((None, None, None, {"gap": "small"}), "gap"),
        ((None, None, None, {"seconds": -1}), "seconds"),
    ],
)
def test_arguments_that_mean_nothing(arguments: Any, says: str) -> None:
    with pytest.raises(AutoparError, match=says) as e:
        PlanRequest.of(*arguments)
    assert e.value.fix


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(made("tiny", {"dp": 2}, "fsdp"), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(AutoparError, match="cannot be read"):
        autopar.compile(nn.Linear(2, 2), plan=path)


def test_layout_and_plan_together() -> None:
    with pytest.raises(AutoparError, match="pass one of them"):
        autopar.compile(nn.Linear(2, 2), layout="fsdp", plan="p.json")


@pytest.mark.parametrize("axes", [{"dp": 4}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2, "pp": 1}])
def test_another_mesh(axes: dict[str, int]) -> None:
    plan = made("tiny", {"dp": 2, "tp": 2}, "fsdp+tp")
    refuse_other_mesh(plan, {"dp": 2, "tp": 2})
    with pytest.raises(MeshError, match="dp=2 x tp=2") as e:
        refuse_other_mesh(plan, axes)
    assert " x ".join(f"{n}={s}" for n, s in axes.items()) in e.value.what and "(2, 2)" in e.value.fix


def test_setting() -> None:
    """Moments and masters are as wide as what is stored; 8-bit moments a byte and their scales; an unknown optimizer is Adam in single precision."""
    stored, trained = {"a": torch.float32, "b": torch.bfloat16}, frozenset("a")
    s = training_config(stored, trained, torch.float32, "adamw", 1e9)
    assert (s.trainable, s.reduce, s.state_bytes, s.master_bytes, s.budget_bytes) == (trained, "float32", 8.0, 4.0, 1e9)
    assert training_config(stored, trained, None, torch.optim.SGD, math.inf).state_bytes == 0
    assert training_config(stored, trained, None, type("Unknown", (torch.optim.Optimizer,), {}), 1.0).state_bytes == 8.0
    half = training_config({"b": torch.bfloat16}, trained, None, "adamw", 1.0, grad_accumulation=4)
    assert (half.state_bytes, half.step_bytes, half.master_bytes, half.micro_batches) == (4.0, 2.0, 2.0, 4)
    assert training_config(stored, trained, None, "adamw8bit", 1.0).state_bytes == pytest.approx(2.03, abs=0.01)
    assert (
        training_config(stored, trained, None, "adamw", 1.0).step_bytes,
        training_config(stored, trained, None, "adamw-fused", 1.0).step_bytes,
    ) == (
        4,
        0,
    )
    assert training_config({"b": torch.bfloat16}, trained, None, "sgd-momentum", 1.0).master_bytes == 2.0


# ---- this machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_known_devices(device: str, kind: str) -> None:
    assert machine.kind_of(device) == kind


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Tesla T4", "cpu"]
)
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ClusterError, match="does not know the device") as e:
        machine.kind_of(device)
    assert "cluster=" in e.value.fix and 'layout="fsdp"' in e.value.fix


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert machine.here(cpu, 4).name == "cpu:1x4"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine.here(cpu, 4).name == "cpu:2x2"
    assert machine.here(cpu, 1).name == "cpu:1x1"
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    gpu = machine.here(torch.device("cuda", 0), 4)
    assert gpu.name == "h100:2x2" and gpu.device.memory_bytes == found.total_memory > gpu.device.usable_bytes


# ---- what is stored, what follows a plan -------------------------------------------------------------------------


def test_padding_over_two_axes_is_not_stored() -> None:
    """DTensor cuts (2, 1, 2, 1) rows of 6 over 2 x 2; one even cut with padding has (2, 2, 2, 0)."""
    axes = {"dp": 2, "tp": 2}
    plan = made("tiny", axes, "fsdp")
    name, c = next((n, c) for n, c in plan.params.items() if len(c.shape) == 1)
    odd = replace(c, shape=(6,), padded=(8,), storage=Placement.of((8,), {"dp": (0, 4), "tp": (0, 2)}), compute=Placement.of((6,)))
    one = storable(replace(plan, params={**plan.params, name: odd})).params[name]
    assert one.padded == (6,) and one.storage == Placement.of((6,), {"dp": (0, 3)}) and one.compute == odd.compute
    five = replace(odd, shape=(5,), compute=Placement.of((5,)))
    padded = storable(replace(plan, params={name: five})).params[name]
    assert padded.padded == (6,) and [str(p) for p in dtensor_placements(padded.storage, Mesh.of(axes))] == ["S(0)", "R"]
    assert storable(plan) == plan
    alone = replace(c, shape=(7,), padded=(8,), storage=Placement.of((8,), {"dp.0": (0, 4), "dp.1": (0, 2)}), compute=Placement.of((7,)))
    flat = replace(plan, mesh_axes={"dp": 4}, params={name: alone})
    assert storable(flat) == flat


def test_what_a_plan_does_not_cover_follows_it() -> None:
    plan = made("tiny", {"dp": 2, "tp": 4}, "fsdp+tp")
    layout = following(plan)
    assert layout.data == layout.shard == ("dp",) and layout.tensor == ("tp.0", "tp.1") and layout.name == plan.layout


# ---- what ranks tell each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        InfeasibleError("memory, forward at mm", 5, "buy more", where="here"),
        AutoparError("what", where="where", fix="fix"),
        InputError("what"),
        KeyboardInterrupt(),
        IndexError("a", 3),
    ],
)
def test_errors_travel(error: BaseException) -> None:
    told = agree._packed(error).error(2)
    assert type(told) is type(error) and str(told) == str(error) and told.args == error.args
    assert {k: v for k, v in vars(told).items() if k != "__notes__"} == {k: v for k, v in vars(error).items() if k != "__notes__"}
    assert "raised on rank 2" in told.__notes__[0]


def test_an_error_that_cannot_travel() -> None:
    class Own(Exception):
        pass

    told = agree._packed(Own("mine")).error(1)
    assert type(told) is AutoparError and "rank 1 failed: Own: mine" in str(told)


def test_the_first_line_that_differs() -> None:
    assert difference({0: "a\nb\nc", 3: "a\nx\nc"}) == "rank 0 has 'b', rank 3 has 'x'"
    assert difference({0: "a", 1: "a\nmore"}) == "rank 0 has nothing more, rank 1 has 'more'"
    long = difference({0: "a" * 1000, 1: "b"})
    assert len(long) < 300


def _everyone(monkeypatch: pytest.MonkeyPatch, ranks: list[int], others: list[dict[str, str]]) -> Any:
    """Rank `ranks[0]` of a mesh whose other ranks have these facts."""

    def gather(groups: Any, mine: Any) -> list[Any]:
        if isinstance(mine, str):
            return [mine, *(next(iter(o.values())) for o in others)]
        return [mine, *({k: agree.hashlib.sha256(v.encode()).hexdigest() for k, v in o.items()} for o in others)]

    monkeypatch.setattr(agree, "_gather", gather)
    return SimpleNamespace(ranks=ranks, talks=len(ranks) > 1)


def test_the_odd_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is the first; by its rank in the world, not in the mesh."""
    for mine, others, says in (
        ("a", ["a", "b", "a"], "rank 6 disagrees with rank 4 about the model"),
        ("b", ["a", "a", "a"], "rank 4 disagrees with rank 5 about the model"),
        ("a", ["b", "c", "a"], "ranks 5, 6 disagree with rank 4 about the model"),
    ):
        groups = _everyone(monkeypatch, [4, 5, 6, 7], [{"the model": o} for o in others])
        with pytest.raises(agree.DisagreementError, match=says):
            agreed(groups, lambda mine=mine: (1, {"the model": mine}))
    groups = _everyone(monkeypatch, [4, 5], [{"the model": "a"}])
    assert agreed(groups, lambda: (1, {"the model": "a"})) == 1


def test_alone_nobody_is_asked() -> None:
    alone: Any = SimpleNamespace(ranks=[0], talks=False)
    assert agreed(alone, lambda: (5, {"x": "y"})) == 5 and from_first(alone, lambda: "plan") == "plan"
    with pytest.raises(KeyError):
        agreed(alone, lambda: {}["x"])


# ---- one process -------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("RANK", raising=False)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_one_process_plans() -> None:
    """The plan is this program's, and also the plan of a second module; too little memory is said; evaluation before training makes no plan."""
    torch.manual_seed(0)
    batch = ZOO["llama"].inputs(4, 8)
    model = autopar.compile(ZOO["llama"].build(1).train(), backend="aot_eager")
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch).loss
    assert len(list(model._programs.steps())) == 1 and not model._builder.planned
    model.train()
    trained = model(**batch).loss
    torch.testing.assert_close(evaluated, trained.detach())
    assert len(list(model._programs.steps())) == 1, "steps from before the plan are kept"
    trained.backward()
    plan = model.plan
    assert plan.layout == "planned" and plan.cluster == "cpu:1x1" and plan.fingerprint and plan.predicted["step_time_s"] > 0
    assert plan.predicted["budget_bytes"] == autopar.Cluster.of("cpu").device.usable_bytes
    again = autopar.compile(ZOO["llama"].build(1).train(), plan=Plan.loads(dumps(plan)), backend="aot_eager")
    assert again.data_world == 1
    again(**batch).loss.backward()
    assert again.plan.ops == plan.ops
    with pytest.raises(InfeasibleError):
        autopar.compile(ZOO["llama"].build(1).train(), memory=1000, backend="aot_eager", example_inputs=batch)
