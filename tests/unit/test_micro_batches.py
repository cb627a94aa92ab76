"""Which programs may be run as micro-batches, and how many are chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture.capture import Call, Captured, Shapes, capture, off_cache
from autopar.capture.micro_batches import WholeBatch, samples_of
from autopar.capture.samples import MicroBatchError
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps, loads
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.micro_batches import candidates, fastest, from_the_middle
from autopar.planner.more_micro_batches import bound_of_more
from autopar.planner.none_faster import NoneFasterError
from autopar.planner.planning import plan_graph
from autopar.planner.roomy import kept_bytes, roomy
from autopar.planner.stages import Stages
from autopar.planner.task import other_of, task
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.plans import captured
from tests.wide import cases, wide


def part_of(model: nn.Module, inputs: dict[str, Any], samples: int, loss_fn: Any = None) -> Captured:
    call = Call.of((), off_cache(model, inputs))
    shapes: Shapes = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
    batch = WholeBatch(shapes, shapes[0][0][0], 1)
    return batch.part(samples, lambda s: capture(model.train(), call, s, loss_fn=loss_fn))


@pytest.mark.parametrize("name", cases([n for n in ZOO if n != "convnet"], ["gpt2", "bert"]))
@pytest.mark.parametrize("samples", [1, 2])
def test_models_whose_loss_is_a_mean_over_labels(name: str, samples: int) -> None:
    """Which are given one value: 1 / the labels of the batch. Every random operator knows where its samples are."""
    found = part_of(ZOO[name].build(2), ZOO[name].inputs(6, 16), samples, ZOO[name].compile.get("loss_fn")).samples
    assert [(w.op != "") for w in found.values.edits.wholes] == [True]
    assert all(dim == 0 for dim, _ in found.random.values())


class Net(nn.Module):
    """`loss` of a linear layer's result."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(6, 4), loss

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.net(x))}


class Detached(torch.autograd.Function):
    """A backward that divides by how large the batch's gradient is: the forward does not show it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.abs().sum()


MIXES: dict[str, tuple[Any, str]] = {
    "contrastive": (lambda z: F.cross_entropy(z @ z.T, torch.arange(len(z))), "mixes the samples"),
    "maximum": (lambda z: z.square().amax(), "aten.amax"),
    "root of a sum": (lambda z: z.square().sum().sqrt(), "aten.sqrt"),
    "product of means": (lambda z: z.mean() * z.square().mean(), "aten.mul"),
    "mean subtracted": (lambda z: (z - z.mean(0)).square().sum(), "aten.sub"),
    "sorted": (lambda z: z.sort(0).values[0].sum(), "aten.sort"),
    "first half": (lambda z: z[: len(z) // 2].sum(), "aten.slice"),
    "power of the batch": (lambda z: (z.abs() ** len(z)).sum(), "aten.pow"),
    "backward of one's own": (lambda z: Detached.apply(z).sum(), "aten.div"),
    "shifted": (lambda z: (z * z.roll(1, 0)).sum(), "mixes the samples"),
}


@pytest.mark.parametrize("name", MIXES)
def test_refuses_what_mixes_samples(name: str) -> None:
    loss, wants = MIXES[name]
    with pytest.raises(MicroBatchError) as e:
        part_of(Net(loss), {"x": torch.randn(6, 6)}, 2)
    assert wants in str(e.value)
    assert "grad_accumulation=" in e.value.fix


ADDS = {
    "mean": lambda z: z.square().mean(),
    "sum": lambda z: z.square().sum() + 3.0,
    "of the batch's size": lambda z: z.square().sum() / len(z),
    "of two": lambda z: z.square().mean() + 2.0 * F.smooth_l1_loss(z, torch.ones_like(z)),
    "of samples' own": lambda z: z.logsumexp(-1).mean(),
    "pooled behind a transpose": lambda z: (
        F.adaptive_avg_pool1d(z.view(-1, 2, 2).transpose(1, 2), 1).square().sum()
    ),  # torch makes windows of it
}


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_adds_up(name: str, samples: int) -> None:
    """The losses of the parts, run as they are captured, are the loss of the whole."""
    torch.manual_seed(0)
    model, x = Net(ADDS[name]), torch.randn(6, 6)
    found = part_of(model, {"x": x}, samples)
    params = dict(model.named_parameters())
    losses = []
    for i in range(0, 6, samples):
        given = [x[i : i + samples] if r.kind == "input" else params[r.name] if r.kind == "param" else torch.ones(()) for r in found.inputs]
        losses.append(found.gm(*given)[0])
    assert torch.allclose(sum(losses, torch.zeros(())), model(x)["loss"], rtol=1e-5)


def test_sizes() -> None:
    assert samples_of(8, 4, 2) == [2, 2, 2, 2]
    assert samples_of(8, 3, 1) == [3, 3, 2]
    assert samples_of(14, 3, 2) == [6, 4, 4]  # what two ranks share
    assert samples_of(7, 3, 2) == [3, 2, 2]
    with pytest.raises(MicroBatchError, match="2 samples"):
        samples_of(2, 3, 1)
    for batch in range(1, 70):
        numbers = candidates(batch)
        assert numbers[0] == 1
        assert numbers == sorted(set(numbers))
        assert numbers[-1] <= batch < 2 * numbers[-1]
        for m in numbers:
            assert sum(samples_of(batch, m, 4)) == batch


def _plan(seconds: float, bound_s: float) -> Plan:
    return Plan({"dp": 1}, "", {}, {}, (), (), (), predicted={"step_time_s": seconds}, solver={"bound_s": bound_s})


def test_takes_the_fastest() -> None:
    """Those whose bound is no better are not planned; the gap is to the least bound of all."""
    planned: list[int] = []

    def plan(m: int, task: int) -> Plan:
        planned.append(m)
        if m == 1:
            raise InfeasibleError("memory", 1.0, "more")
        return _plan({2: 5.0, 4: 4.0}[m], {2: 4.9, 4: 3.8}[m])

    least = {1: 1.0, 2: 1.0, 4: 3.0, 8: 4.5}
    made, best = fastest([1, 2, 4, 8], lambda m: m, lambda m, _: least[m], plan)
    assert (planned, best.number, made.predicted["step_time_s"]) == ([1, 2, 4], 4, 4.0)
    assert made.solver["bound_s"] == 3.8
    assert made.solver["gap"] == pytest.approx(0.05)
    assert made.solver["micro_batches"] == "1: does not fit; 2: 5.000 s; 4: 4.000 s; 8: no less than 4.500 s"
    with pytest.raises(InfeasibleError):
        fastest([1], lambda m: m, lambda m, _: 0.0, plan)


def test_says_what_is_missing_where_least_is() -> None:
    def plan(m: int, task: int) -> Plan:
        raise InfeasibleError("memory in backward", {1: 8.0, 2: 3.0, 4: 5.0}[m], "more")

    with pytest.raises(InfeasibleError, match="memory in backward, as 2 micro-batches; 3 B too much"):
        fastest([1, 2, 4], lambda m: m, lambda m, _: 0.0, plan)
    planned: list[int] = []

    def refused(m: int, task: int) -> Plan:
        planned.append(m)
        raise AutoparError("no such layout")

    with pytest.raises(AutoparError, match="no such layout"):
        fastest([1, 2, 4], lambda m: m, lambda m, _: 0.0, refused)
    assert planned == [1]


def test_begins_where_there_is_room() -> None:
    assert from_the_middle([1, 2, 4, 8, 16], 1) == [1, 2, 4, 8, 16]
    assert from_the_middle([1, 2, 4, 8, 16], 8) == [8, 4, 16, 2, 1]
    assert from_the_middle([1, 2, 4], 4) == [4, 2, 1]


def test_what_time_does_not_suffice_for() -> None:
    """One, for which the time was too short, is not what is raised: eight has a plan."""
    late: list[int] = []

    def plan(m: int, task: int) -> Plan:
        if m == 8:
            return _plan(9.0, 8.9)
        late.append(m)
        raise AutoparError("The solver found no plan: out of time")

    made, best = fastest([8, 4, 2, 1], lambda m: m, lambda m, _: 0.0, plan, lambda needs_s: bool(late), any_s=lambda: 3.0)
    assert best.number == 8 and late == [4]
    assert made.solver["micro_batches"] == "1, 2: not tried, for want of time; 4: no plan was found in time; 8: 9.000 s"
    assert made.solver["bound_s"] == 3.0


def test_what_is_not_faster() -> None:
    """Where nothing was found below the best, the bound that is told is of what all could have taken; where no number has a plan, nothing is."""

    def plan(m: int, task: int) -> Plan:
        if m == 2:
            return _plan(5.0, 4.99)
        raise NoneFasterError({1: 4.98, 4: 3.0, 8: 4.96}[m])

    made, best = fastest([2, 1, 4, 8], lambda m: m, lambda m, _: 0.0, plan, gap=0.01)
    assert best.number == 2 and made.solver["bound_s"] == 3.0
    said = "1: no less than 4.980 s; 2: 5.000 s; 4: none faster was found, no less than 3.000 s; 8: no less than 4.960 s"
    assert made.solver["micro_batches"] == said
    with pytest.raises(NoneFasterError) as e:
        fastest([1, 4], lambda m: m, lambda m, _: 0.0, plan, gap=0.01)
    assert e.value.bound_s == 3.0


@pytest.mark.parametrize("shape", ["8", "4x2", "2x2x2"])
@pytest.mark.parametrize("memory", [4e9, 1.5e9])
def test_nothing_is_found_below_the_best(shape: str, memory: float) -> None:
    """A plan that is asked to be faster than the best one by more than that one's gap is not there; one that is asked to be little slower is."""
    with torch.device("meta"):
        model = ZOO["llama"].build(4, hidden_size=512, intermediate_size=1536, vocab_size=32000)
    inputs, cluster = {"input_ids": (64, 256), "labels": (64, 256)}, Cluster.of("h100:8")
    t = task(model, inputs, cluster, shape, None, "bf16", "adamw", 1, memory, None, lambda *_: None)
    limits = Limits(seconds=10.0, gap=0.02)
    best = plan_graph(t.folded, t.mesh_axes, t.cluster, t.training, limits).plan
    best_s, bound_s = best.predicted["step_time_s"], best.solver["bound_s"]
    again = plan_graph(t.folded, t.mesh_axes, t.cluster, t.training, replace(limits, below_s=1.01 * best_s)).plan
    assert again.predicted["step_time_s"] <= 1.01 * best_s
    seen: list[Stages] = []
    with pytest.raises(NoneFasterError) as e:
        plan_graph(t.folded, t.mesh_axes, t.cluster, t.training, replace(limits, below_s=0.99 * bound_s), asks=seen.append)
    assert e.value.bound_s <= best_s and len(seen) == 1
    assert e.value.bound_s >= 0.99 * bound_s * (1 - 1e-6)


def test_what_cannot_be_parted_is_planned_whole() -> None:
    def plan(m: int, task: int) -> Plan:
        if m > 1:
            raise AutoparError("it mixes samples")
        return _plan(5.0, 4.9)

    made, best = fastest([4, 2, 8, 1], lambda m: m, lambda m, _: 0.0, plan)
    assert best.number == 1 and made.solver["micro_batches"] == "1: 5.000 s; 2, 4: the program cannot be run so"
    with pytest.raises(AutoparError, match="mixes samples"):
        fastest([4, 2], lambda m: m, lambda m, _: 0.0, plan)


def test_room_is_for_all_that_backward_reads() -> None:
    """The least number of which the activations of one fit: as a device has less memory, more of them; never more than the first that leaves no sample for each device, and that only where
    half of the activations do not fit before."""
    zoo = ZOO["llama"]
    p = captured("llama")
    folded = fold(p.graph)
    kept = kept_bytes(folded)
    measured = sum(t.nbytes for t in _saved(zoo))
    assert measured <= 1.5 * kept and kept <= 3 * measured
    numbers = candidates(8)
    light = replace(folded, graph=replace(p.graph, params={}))
    for devices in (1, 2, 4):
        budgets = (1e12, kept / devices, kept / devices / 2, 1.0)
        found = [roomy(numbers, light, devices, TrainingConfig(frozenset(), budget_bytes=budget), 8) for budget in budgets]
        assert found[0] == 1 and found == sorted(found) and found[-1] == min(8, 16 // devices), found


def _saved(zoo: Any) -> list[torch.Tensor]:
    """What eager keeps for backward, parameters aside."""
    model, found = zoo.build(2).train(), dict[int, torch.Tensor]()
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in params:
            found.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(**zoo.inputs(8, 16))
    return list(found.values())


def test_one_micro_batch_that_does_not_fit_tells_of_more() -> None:
    with torch.device("meta"):
        model = ZOO["llama"].build(1)
    for number, said in ((1, True), ("auto", False)):
        with pytest.raises(InfeasibleError) as e:
            autopar.plan(model, {"input_ids": (8, 16), "labels": (8, 16)}, "h100:2", micro_batches=number, memory=1000.0, loss_head="plain")
        assert ('micro_batches="auto"' in e.value.remedy) == said


def test_leaves_out_what_more_cannot_mend() -> None:
    """What no multiple of two can take less than is known once two are planned: four are not even captured, and three are."""
    captured: list[int] = []

    def task(m: int) -> int:
        captured.append(m)
        return m

    made, best = fastest(
        [1, 2, 3, 4], task, lambda m, _: 0.0, lambda m, _: _plan(6.0 - m, 0.1), more_s=lambda m: {1: 0.5, 2: 3.99}.get(m, 0.0), gap=0.01
    )
    assert (captured, best.number) == ([1, 2, 3], 3)
    made, best = fastest(
        [1, 2, 4], task, lambda m, _: 0.0, lambda m, _: _plan(6.0 - m, 3.98), more_s={1: 0.5, 2: 3.97}.__getitem__, gap=0.01
    )
    assert best.number == 2
    assert made.solver["bound_s"] == 3.97  # of what was left out


@wide
@pytest.mark.parametrize(
    ("shape", "memory", "head", "numbers"),
    [("8", 4e9, "plain", (1, 2)), *product(["8", "4x2", "2x2x2"], [4e9, 1.5e9], ["plain", "auto"], [(1, 2, 4)])],
)
def test_no_plan_of_more_takes_less(shape: str, memory: float, head: str, numbers: tuple[int, ...]) -> None:
    """Than the bound that the plan of fewer has for it, whether memory is short or not."""
    with torch.device("meta"):
        model = ZOO["llama"].build(4, hidden_size=512, intermediate_size=1536, vocab_size=32000)
    bounds: dict[int, float] = {}
    limits = Limits(seconds=10.0, gap=0.02)

    def planned(m: int) -> float:
        inputs, cluster = {"input_ids": (64, 256), "labels": (64, 256)}, Cluster.of("h100:8")
        t = task(model, inputs, cluster, shape, None, "bf16", "adamw", 1, memory, None, lambda *_: None, False, m, {}, head)

        def ask(stages: Stages) -> None:
            bounds[m] = m * bound_of_more(stages, other_of(t))

        found = plan_graph(t.folded, t.mesh_axes, t.cluster, t.training, limits, asks=ask)
        seconds = [found.plan.predicted["step_time_s"]]
        if t.other is not None:
            seconds.append(plan_graph(t.other.folded, t.mesh_axes, t.cluster, t.other.training, limits).plan.predicted["step_time_s"])
        return m * min(seconds)

    taken = {m: planned(m) for m in numbers}
    if shape == "8":
        assert bounds[1] > 0
    for m, n in combinations(numbers, 2):
        assert bounds[m] <= taken[n] * (1 + 1e-6)


def test_a_plan_says_its_number() -> None:
    """A call of m micro-batches takes m times one of grad_accumulation=m, and never more than what is chosen by itself; files, texts and comparisons know the number."""

    def planned(number: int | str, batch: int = 4, calls: int = 1) -> Plan:
        with torch.device("meta"):
            model = ZOO["llama"].build(2, hidden_size=256, intermediate_size=512)
        return autopar.plan(
            model, {"input_ids": (batch, 128), "labels": (batch, 128)}, "h100:2", micro_batches=number, grad_accumulation=calls
        )

    one, two, auto, alone = planned(1), planned(2), planned("auto"), planned(1, 2, 2)
    assert auto.predicted["step_time_s"] <= min(p.predicted["step_time_s"] for p in (one, two)) * (1 + 1e-9)
    assert two.predicted["step_time_s"] == pytest.approx(2 * alone.predicted["step_time_s"], rel=0.02)
    # What one call's micro-batches have gathered stays for all of them, which those of two calls do not.
    more = two.predicted["peak_memory_bytes"] - alone.predicted["peak_memory_bytes"]
    stays = sum(math.prod(c.compute.local_shape(two.mesh)) for c in two.params.values() if c.once_a_call)
    assert stays and not alone.gathered_once_a_call and 0 <= more <= 1.3 * 4 * stays
    assert (one.micro_batches, two.micro_batches) == (1, 2)
    assert "2 micro-batches" in two.text()
    assert "micro-batches tried: 1: " in auto.text()
    assert loads(dumps(two), Plan).micro_batches == 2
    assert "micro" in one.diff(two)
    with pytest.raises(AutoparError, match="number of micro-batches"):
        planned(0)
