"""Plans for tests of what is done with plans: made by `propagate` for captured models, with the collectives the shard pass inserts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import torch
from torch import nn

from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from tests.models import ZOO
from tests.spmd.simulate import Prepared, fake_world, prepare, simulated


class _Tiny(nn.Module):
    """One tied-down layer: its plan's file is about two kilobytes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.b(torch.relu(self.a(x))), target)}


@functools.cache
def captured(name: str, layers: int = 2) -> Prepared:
    torch.manual_seed(0)
    if name == "tiny":
        return prepare(_Tiny().train(), {"x": torch.zeros(8, 8), "target": torch.zeros(8, 8)})
    zoo = ZOO[name]
    return prepare(zoo.build(layers).train(), zoo.inputs(8, 16), zoo.compile.get("loss_fn"))


def made(name: str, mesh_axes: dict[str, int], layout: str, layers: int = 2) -> Plan:
    p = captured(name, layers)
    return propagate(p.graph, Layout.of(layout, Mesh.of(mesh_axes)), mesh_axes, frozenset(p.graph.params))


def with_collectives(name: str, mesh_axes: dict[str, int], layout: str) -> Plan:
    with fake_world(math.prod(mesh_axes.values())):
        s = simulated(captured(name), mesh_axes, layout)
    assert s.collectives
    return dataclasses.replace(s.plan, collectives=s.collectives)


def with_sections(plan: Plan, timing: dict[str, Any] | None = None, **sections: Any) -> Plan:
    """`plan` with sections that a hand layout leaves empty, put in through its file."""
    raw = json.loads(dumps(plan))
    raw["plan"].update(sections)
    raw["timing"].update(timing or {})
    return Plan.loads(json.dumps(raw))


def full(plan: Plan) -> Plan:
    """With something in every section."""
    ops = list(plan.ops)
    use = {"kind": "all_reduce", "axes": ["dp"], "wire_bytes": 64.0, "direction": "backward", "count": 3}
    uses = {} if plan.collectives else {"collectives": [[ops[0], 0]], "collective_table": [use]}
    return with_sections(
        dataclasses.replace(plan, modules={o: f"layers.{i // 2}.m" for i, o in enumerate(ops[:6])}),
        {"seconds": 12.25},
        **uses,
        fingerprint="f" * 64,
        order=ops[:3],
        cluster="h100:1x8",
        activations={"save": ops[:2], "recompute": ops[2:3], "offload:host": ops[3:4], "offload:nvme": ops[4:5]},
        recompute=ops[2:3],
        unmet=["add in layers.*: handed on to another layer"],
        kept=[[ops[0], 0], [ops[1], 0]],
        kept_table=[{"shape": [8], "splits": [["dp", 0, 4]], "partial": []}],
        predicted={"step_time_s": 0.1, "peak_memory_bytes": 7e10, "mfu": 1 / 3},
        solver={"status": "optimal", "objective": 0.1, "bound": 0.0999, "nodes": 17, "stopped_by": "gap"},
    )
