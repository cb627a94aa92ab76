"""Plans from shallow captures are those of a capture of the whole: the same fingerprint, the same plan. Meshes planned in one process do not meet."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.depth_reduced import reduced_depth
from autopar.errors import CaptureError
from autopar.graph.graph import Graph
from autopar.models import configs as models
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner import offline
from autopar.planner import task as tasks
from autopar.planner.refit import PlanMismatchError, refit
from autopar.solver.fold import Folded
from tests import experts
from tests.models import ZOO
from tests.spmd.test_planned import cluster
from tests.wide import cases, wide

MESH = "8"


def model(name: str, layers: int) -> nn.Module:
    if name == "deepseek":  # three dense layers, then experts
        return experts.build("deepseek_v3", "eager", first_k_dense_replace=3, num_hidden_layers=layers)
    if name != "gemma3":
        return ZOO[name].build(layers)
    import transformers as T

    config = ZOO[name].build(3).config
    config.num_hidden_layers, config.layer_types = layers, ["sliding_attention", "full_attention"] * (layers // 2)
    return T.Gemma3ForCausalLM(config)


def inputs(name: str) -> dict[str, torch.Tensor]:
    return experts.inputs(8, 32) if name == "deepseek" else ZOO[name].inputs(8, 32)


@functools.cache
def programs(name: str, layers: int) -> tuple[Folded, Folded]:
    """Of shallow captures and of the whole."""
    found: list[Folded] = []
    real = tasks.program

    def seen(m: nn.Module, captured: Callable[[nn.Module], Graph], both: object) -> Folded:
        found.append(real(m, captured))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks, "layer_periods", lambda m: {})
            found.append(real(m, captured))
        raise InterruptedError  # captured; nothing needs planning yet

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(tasks, "program", seen)
        offline.plan(model(name, layers), inputs(name), cluster(8), MESH)
    return found[0], found[1]


def planned(name: str, layers: int, folded: Folded, mesh: str = MESH) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "program", lambda m, captured, both: folded)
        # Until the gap is small: what a clock would stop depends on what else this machine does.
        return offline.plan(model(name, layers), inputs(name), cluster(8), mesh, options={"seconds": 300})


@pytest.mark.parametrize(
    ("name", "layers"),
    cases([("llama", 6), ("gpt2", 7), ("gemma3", 8), ("mixtral", 6), ("t5", 6), ("deepseek", 9)], [("llama", 6)]),
)
def test_tiled_is_full(name: str, layers: int) -> None:
    tiled, full = programs(name, layers)
    assert tiled.note.startswith("folded from captures of") and len(tiled.graph.ops) < len(full.graph.ops)
    assert tiled.fingerprint() == full.fingerprint()
    a, b = planned(name, layers, tiled), planned(name, layers, full)
    assert a.fingerprint == b.fingerprint and a.solver["capture"] == tiled.note and "capture" not in b.solver
    assert list(a.params) == list(b.params) == [n for n, _ in model(name, layers).named_parameters()]
    assert canonical(refit(Plan.loads(dumps(a)), full)) == canonical(b)
    assert refit(b, full) is b


def test_another_program_is_refused_with_what_differs() -> None:
    _, full = programs("llama", 6)
    plan = planned("llama", 6, full)

    def refused(change: Plan, *said: str) -> None:
        with pytest.raises(PlanMismatchError) as e:
            refit(change, full)
        assert all(s in e.value.what for s in said) and e.value.where and "plan again" in e.value.fix

    fewer = {n: c for n, c in plan.params.items() if "layers.5" not in n}
    other = dataclasses.replace(plan, fingerprint="0" * 64)
    refused(dataclasses.replace(plan, params=fewer), "knows nothing of the parameters model.layers.5.self_attn.q_proj.weight", "and 6 more")
    refused(dataclasses.replace(other, params={**plan.params, "extra": next(iter(plan.params.values()))}), "no parameters extra")
    name, choice = next(iter(plan.params.items()))
    refused(
        dataclasses.replace(plan, params={**plan.params, name: dataclasses.replace(choice, shape=(1, 2))}), f"{name} [96, 32], not [1, 2]"
    )
    refused(dataclasses.replace(other, inputs=plan.inputs[:1]), "inputs have shapes [8, 32], [8, 32], not [8, 32]")
    at = plan.order[3]
    refused(dataclasses.replace(other, targets={**plan.targets, at: "aten.tan.default"}), "number 4", "not aten.tan.default")
    refused(dataclasses.replace(plan, order=plan.order[:-1]), f"not {len(plan.order) - 1}")
    refused(other, "other constants, dtypes or connections")
    hand = dataclasses.replace(plan, fingerprint="", order=())
    assert refit(hand, full) is hand
    refused(dataclasses.replace(hand, ops=dict(list(plan.ops.items())[1:])), "other names")


# ---- what cannot be tiled ----------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Ten layers; `how` they are gone through: counting on all of them, or on their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for i in range(10) if self.how == "all" else range(len(self.layers)):
            x = x + torch.relu(self.layers[i](x))
        return {"loss": (x / len(self.layers) if self.how == "number" else x).square().mean()}


@pytest.mark.parametrize(
    ("how", "said"), [("plain", "folded from"), ("all", "cannot be captured"), ("number", "captures of two depths are not alike")]
)
def test_in_full_where_shallow_captures_do_not_show_it(how: str, said: str) -> None:
    m = Stacked(how).eval()
    plan = autopar.plan(m, {"x": torch.zeros(64, 16)}, cluster(8), MESH)
    assert said in str(plan.solver["capture"]) and len(plan.params) == 20
    assert not m.training and len(m.layers) == 10, "the model is left as it was"


def test_a_shallow_copy() -> None:
    m = Stacked("plain")
    small = reduced_depth(m, {"layers": 3})
    assert [len(x.layers) for x in (small, m)] == [3, 10]
    assert small.layers[2].weight is m.layers[2].weight and small.layers[2] is not m.layers[2]


def test_what_cannot_be_captured_is_told_of_the_whole() -> None:
    class Bad(Stacked):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(CaptureError, match="Bad cannot be captured"):
        autopar.plan(Bad("plain"), {"x": torch.zeros(64, 16)}, cluster(8), MESH)


# ---- several plans in a process ------------------------------------------------------------------------------------


def decided(plan: Plan) -> str:
    """Without the bound: how far it comes depends on how fast the machine is."""
    return canonical(dataclasses.replace(plan, solver={k: v for k, v in plan.solver.items() if k not in ("bound_s", "gap")}))


@wide
def test_meshes_in_any_order(tmp_path: Path) -> None:
    """Each as it is made in a process of its own."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, **sizes}))
    meshes = ("8", "4x2", "2x4")
    alone = {}
    for mesh in meshes:
        out = tmp_path / f"{mesh}.json"
        call = ["plan", str(config), "--cluster", "h100:8", "--mesh", mesh, "--batch", "16", "--seq", "256", "-o", str(out)]
        done = subprocess.run([sys.executable, "-m", "autopar", *call], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        alone[mesh] = decided(Plan.load(out))
    assert len({hashlib.sha256(x.encode()).hexdigest() for x in alone.values()}) == 3
    c = models.config(str(config))
    for mesh in (*meshes[::-1], meshes[-1]):
        again = autopar.plan(models.build(c), models.inputs(c, 16, 256), "h100:8", mesh, precision="bf16", micro_batches="auto")
        assert decided(again) == alone[mesh], mesh
