"""What the user says of single activations, from the module to the plan: checkpointed regions, their policies, marks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autopar
from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.errors import CaptureError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner import offline
from autopar.planner import task as tasks
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.propagate import propagate
from autopar.planner.refit import refit
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from tests.spmd.test_planned import cluster
from tests.wide import cases

aten = torch.ops.aten
SAVED = [aten.mm.default, aten._scaled_dot_product_flash_attention.default]
MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
BATCH, TOKENS, WIDTH = 8, 16, 32


def prefers(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if op == aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def yes_or_no(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op == aten.mm.default


def every_second() -> Any:
    """Has a state of its own: the first matrix product is saved, the second not, and so on."""
    seen = 0

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += op == aten.mm.default
        return MUST_SAVE if op == aten.mm.default and seen % 2 else MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def selective(policy: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy)


CONTEXTS = {"list": selective(SAVED), "prefers": selective(prefers), "bool": selective(yes_or_no), "second": every_second}


class Block(nn.Module):
    """how: "" | "plain" | one of CONTEXTS | "save" | "recompute" (the mark on the wide activation)."""

    def __init__(self, how: str, p: float = 0.1) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("plain", *CONTEXTS):
            kwargs = {"context_fn": CONTEXTS[self.how]} if self.how in CONTEXTS else {}
            return checkpoint(self.inside, x, use_reentrant=False, **kwargs)
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        u = self.up(self.norm2(x))
        u = autopar.must_save(u) if self.how == "save" else autopar.must_recompute(u) if self.how == "recompute" else u
        return x + self.drop(self.down(F.gelu(u)))


class Model(nn.Module):
    """hows: of its blocks. around: all of them are one checkpointed region."""

    def __init__(self, *hows: str, around: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(how) for how in hows)
        self.into, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.around = around

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = checkpoint(self.body, x, use_reentrant=False) if self.around else self.body(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())}

    def body(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x


def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(BATCH, TOKENS, WIDTH, generator=g), "target": torch.randint(0, 16, (BATCH, TOKENS), generator=g)}


def graph_of(model: nn.Module, **kwargs: Tensor) -> Graph:
    call = Call.of((), kwargs or inputs())
    return describe(capture(model.train(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))


@functools.cache
def captured(*hows: str, around: bool = False) -> Graph:
    torch.manual_seed(0)
    return graph_of(Model(*hows, around=around))


def forward(g: Graph) -> list[Op]:
    return [op for op in g.ops if op.direction == "forward"]


def tags(g: Graph, target: str, where: str = "") -> list[tuple[str, ...]]:
    return [op.tags for op in forward(g) if op.target.startswith(target) and where in op.module]


# ---- capture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", *CONTEXTS, "save", "recompute"])
def test_but_for_tags_the_program_is_the_same(how: str) -> None:
    bare = replace(captured(how, how), ops=tuple(replace(op, tags=()) for op in captured(how, how).ops))
    assert bare == captured("", "")
    assert all(op.tags == () for op in captured(how, how).ops if op.direction == "backward")


def test_all_of_a_region_is_made_again_but_what_it_hands_on() -> None:
    g = captured("plain", "")
    first, second = ([op for op in forward(g) if f"layers.{i}" in op.module] for i in (0, 1))
    *inside, last = first
    assert {t for op in inside for t in op.tags} == {"must_recompute"} and last.tags == () and last.target == "aten.add.Tensor"
    assert all(op.tags == () for op in second)


def test_policies() -> None:
    of = {how: captured(how) for how in CONTEXTS}
    again, save = ("must_recompute",), ("must_save",)
    assert tags(of["list"], "aten.mm", "layers") == tags(of["bool"], "aten.mm", "layers") == [save] * 4
    assert tags(of["list"], "autopar.attention") == [save * 2] and tags(of["bool"], "autopar.attention") == [again * 2]
    assert tags(of["list"], "aten.gelu") == tags(of["bool"], "aten.gelu") == tags(of["second"], "aten.gelu") == [again]
    assert tags(of["second"], "aten.mm", "layers") == [save, again, save, again]
    assert tags(of["prefers"], "aten.mm", "layers") == [("prefer_save",)] * 4
    assert tags(of["prefers"], "aten.gelu") == [("prefer_recompute",)]
    assert all(op.binding == () for op in of["prefers"].ops)


def test_a_state_begins_anew_in_every_region() -> None:
    g = captured("second", "second")
    assert tags(g, "aten.mm", "layers.0") == tags(g, "aten.mm", "layers.1")


class Odd(nn.Module):
    """In-place writes, a region in a region, a mask that every region makes alike, a result that is a view, one that ends in dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def masked(self, x: Tensor) -> Tensor:
        return x * (torch.arange(8, device=x.device) > 2).to(x.dtype)

    def inner(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(self.masked(x)))

    def outer(self, x: Tensor) -> Tensor:
        y = self.a(self.masked(x)).relu_()
        z = checkpoint(self.inner, y, use_reentrant=False)
        return torch.tanh(y + z).view(-1, 2, 4)

    def last(self, x: Tensor) -> Tensor:
        return self.drop(self.c(self.masked(x)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = checkpoint(self.outer, x, use_reentrant=False)
        return {"loss": (checkpoint(self.last, y.flatten(1), use_reentrant=False) * 2).sum()}


def odd() -> Graph:
    torch.manual_seed(0)
    return graph_of(Odd(), x=torch.zeros(4, 8))


def test_odd_regions() -> None:
    g = odd()
    again = ("must_recompute",)
    assert tags(g, "aten.relu") == tags(g, "aten.sigmoid") == [again]  # also what an inner region hands to the outer one
    assert tags(g, "aten.arange") == tags(g, "aten.gt") == [()]  # made alike in two regions: made once, outside
    assert tags(g, "aten.tanh") == [()] and tags(g, "aten.view") == [()] * 2  # a view is handed on, and what it looks at with it
    assert tags(g, "aten.native_dropout") == [("", "must_recompute")]


class Marks(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        y = autopar.must_recompute(torch.sin(x))
        a, b = autopar.must_save(torch.cos(y @ w)).split(4, -1)
        flat = autopar.must_recompute((a * b).view(-1))
        return {"loss": (autopar.must_save(x).exp().sum() + (flat * flat).sum() + y.view(-1).sigmoid().sum())}


def test_marks() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    assert autopar.must_save(x) is x and autopar.must_recompute(x) is x
    g = graph_of(Marks(), x=x, w=torch.zeros(8, 8, requires_grad=True))
    assert not tags(g, "aten.alias") and "autopar" not in "".join(op.target for op in g.ops)
    assert tags(g, "aten.sin") == [("must_recompute",)] and tags(g, "aten.cos") == [("must_save",)]
    assert tags(g, "aten.view") == [("must_recompute",)] * 2  # a view of what is made again is not kept either
    assert [op.tags for op in forward(g) if op.target == "aten.mul.Tensor"] == [("must_recompute",), ()]
    assert tags(g, "aten.mm") == tags(g, "aten.exp") == [()]


def test_a_context_made_in_forward_is_refused() -> None:
    class M(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            def made_here() -> Any:
                return create_selective_checkpoint_contexts(SAVED)

            return {"loss": checkpoint(torch.sin, x, use_reentrant=False, context_fn=made_here).sum()}

    with pytest.raises(CaptureError, match=r"functools\.partial"):
        graph_of(M(), x=torch.zeros(4, requires_grad=True))


# ---- folding -----------------------------------------------------------------------------------------------------


def test_layers_of_other_tags_do_not_fold() -> None:
    depth = [fold(captured(*hows)).depth for hows in (("plain",) * 4, ("plain", "plain", "", ""), ("plain", "", "plain", ""))]
    assert depth[0] == {"layers": 4}
    assert all(n <= 2 for n in depth[1].values())
    folded = fold(captured("plain", "", "plain", ""))
    assert [(s.layers, s.copies) for s in folded.stacks] == [(2, 2)]


def test_tags_are_part_of_the_program() -> None:
    prints = {how: fold(captured(how, how)).fingerprint() for how in ("", "plain", "list", "save", "recompute", "prefers")}
    assert prints["prefers"] == prints[""] and len(set(prints.values())) == 5


# ---- plans -------------------------------------------------------------------------------------------------------


@functools.cache
def planned(*hows: str, around: bool = False, budget_bytes: float = float("inf")) -> tuple[Graph, Plan]:
    g = captured(*hows, around=around)
    return g, plan_graph(g, {"dp": 2}, cluster(2), TrainingConfig(frozenset(g.params), budget_bytes=budget_bytes), Limits(gap=0.05)).plan


def made_by(g: Graph, tensors: set[str], where: str = "layers") -> set[str]:
    """Targets of the operators in layers that make them."""
    return {op.target.split(".")[1] for op in forward(g) for t in op.outputs if t is not None and t.name in tensors and where in op.module}


@pytest.mark.parametrize("how", cases(["plain", "list", "second"], ["second"]))
def test_regions_are_made_again_though_memory_is_plentiful(how: str) -> None:
    g, plan = planned(how, how, how)
    kept, again = made_by(g, set(plan.kept)), made_by(g, {t.name for op in g.ops if op.name in plan.recompute for t in op.outputs if t})
    assert kept == {"plain": {"add"}, "list": {"add", "mm", "attention_v2"}, "second": {"add", "mm"}}[how]
    assert {"native_layer_norm", "gelu", "native_dropout", "add"} <= again and ("mm" in again) == (how != "list")
    for op in forward(g):
        for i, t in enumerate(op.outputs):
            assert t is None or op.tag(i) != "must_recompute" or t.name not in plan.kept
            assert t is None or op.tag(i) != "must_save" or op.name not in plan.recompute
    assert plan.unmet == () and plan.predicted["step_time_s"] > planned("", "", "")[1].predicted["step_time_s"]


def test_the_last_product_of_a_region_does_not_run_again() -> None:
    """Backward needs the mask of the dropout behind it, which is drawn of nothing."""
    g, plan = planned("plain", "plain", "plain")
    products = {op.module: op.name in plan.recompute for op in forward(g) if op.target == "aten.mm.default"}
    assert products.pop("into") is False and products.pop("head") is False
    assert {where.split(".")[-1]: again for where, again in products.items()} == {"qkv": True, "out": True, "up": True, "down": False}


def test_marks_in_a_plan() -> None:
    for how, policy in (("save", "save"), ("recompute", "recompute")):
        g, plan = planned(how, how, how)
        wide = [op.out.name for op in forward(g) if op.target == "aten.mm.default" and op.module.endswith(".up")]
        assert {plan.activations[t] for t in wide} == {policy} and made_by(g, set(plan.kept)) >= {"mm", "native_layer_norm"}


def test_what_cannot_be_made_again_is_said() -> None:
    """One region around all layers: what a layer hands on is kept all the same."""
    g, plan = planned("", "", "", around=True)
    assert any(text.startswith("add in layers.*") and "handed on" in text for text in plan.unmet)
    assert "mm" not in made_by(g, set(plan.kept)) and re.search(r"tagged to be made again: .*add in layers\.\*", str(plan))
    assert Plan.loads(dumps(plan)).unmet == plan.unmet


def test_an_error_names_the_tags() -> None:
    with pytest.raises(InfeasibleError) as bare:
        planned("", "", "", budget_bytes=1000.0)
    with pytest.raises(InfeasibleError) as tagged:
        planned("list", "list", "list", budget_bytes=1000.0)
    assert tagged.value.shortfall_bytes > bare.value.shortfall_bytes
    assert "must_save of mm in layers.*.qkv" in tagged.value.what and "tags" in tagged.value.fix and "tag" not in str(bare.value)


def test_tiled_is_full() -> None:
    found = []
    for reduced_depth in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not reduced_depth:
                patch.setattr(tasks, "layer_periods", lambda m: {})
            found.append(offline.plan(Model(*["list"] * 6), inputs(), cluster(2), "2", options={"gap": 0.05}))
    tiled, full = found
    assert str(tiled.solver["capture"]).startswith("folded from captures of") and tiled.fingerprint == full.fingerprint
    assert canonical(refit(tiled, captured(*["list"] * 6))) == canonical(full)


# ---- hand layouts and steps --------------------------------------------------------------------------------------


def by_hand(g: Graph) -> Plan:
    return propagate(g, Layout.of("ddp", Mesh.of({"dp": 2})), {"dp": 2}, frozenset(g.params))


def test_hand_layouts_keep_to_them() -> None:
    g = captured("plain", "list")
    ops = {op.name: op for op in g.ops}
    plan = by_hand(g)
    assert {t for n in plan.recompute for t in ops[n].tags} == {"must_recompute", "prefer_recompute"} and not plan.kept
    assert plan.recompute >= {op.name for op in forward(g) if "must_recompute" in op.tags}
    assert by_hand(captured("", "")).recompute == frozenset()
    assert by_hand(captured("prefers")).recompute  # nothing else decides there
    (drop,) = (op for op in odd().ops if op.target == "aten.native_dropout.default")
    plan = by_hand(odd())
    assert drop.name in plan.recompute and list(plan.kept) == [f"{drop.name}.0"]


def step(model: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled = autopar.compile(model.train(), mesh, backend="aot_eager", **options)
    loss = compiled(**inputs())["loss"]
    loss.backward()
    return loss.detach(), {n: p.grad.full_tensor() for n, p in compiled.named_parameters()}  # type: ignore[union-attr]


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", cases([None, "ddp"], [None]))
def test_gradients_are_bitwise_those_without(alone: None, layout: str | None) -> None:
    """With dropout: a mask made again is the mask."""
    found = []
    for how in ("", "plain", "list"):
        torch.manual_seed(0)
        found.append(step(Model(how, how), layout=layout))
    (loss, grads), *others = found
    for other, theirs in others:
        assert torch.equal(loss, other) and grads.keys() == theirs.keys()
        assert all(torch.equal(grads[n], theirs[n]) for n in grads)
