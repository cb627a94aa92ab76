"""Every rule of a legal graph catches a graph that breaks it; dumps are the same text for the same step; the log says what takes time."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.graph.calls import is_wait
from autopar.passes.specification import RULES, check, line
from autopar.runtime import dump
from tests.spmd.simulate import fake_world

EVERY = {r.since for r in RULES}
PREFIX = "sim"


def add(g: fx.Graph, target: object, args: tuple[object, ...], val: object, direction: str = "forward") -> fx.Node:
    n = g.call_function(target, args)  # type: ignore[arg-type]
    n.meta = {"val": val, "direction": direction, "op": "test"}
    return n


def legal() -> fx.Graph:
    """x gathered over an axis, added to itself, and normalised."""
    g, x = fx.Graph(), torch.empty(2, 4)
    a = g.placeholder("x")
    a.meta = {"val": x, "direction": "forward"}
    ops = torch.ops._c10d_functional
    sent = add(g, ops.all_gather_into_tensor.default, (a, 2, f"{PREFIX}.a"), torch.empty(4, 4))
    whole = add(g, ops.wait_tensor.default, (sent,), torch.empty(4, 4))
    out = add(g, torch.ops.aten.add.Tensor, (whole, whole), torch.empty(4, 4))
    group = add(
        g,
        torch.ops.aten.native_group_norm.default,
        (out, None, None, 4, 4, 1, 2, 1e-5),
        (torch.empty(4, 4), torch.empty(4, 2), torch.empty(4, 2)),
    )
    add(g, operator.getitem, (group, 0), torch.empty(4, 4), "backward")
    g.output((out,))
    return g


def node(g: fx.Graph, name: str) -> fx.Node:
    return next(n for n in g.nodes if name in str(n.target))


def no_value(g: fx.Graph) -> None:
    del node(g, "add").meta["val"]


def from_backward(g: fx.Graph) -> None:
    node(g, "wait").meta["direction"] = "backward"


def a_ranks_own_group(g: fx.Graph) -> None:
    n = node(g, "gather")
    n.args = (*n.args[:2], "rank3.a")


def two_waits(g: fx.Graph) -> None:
    with g.inserting_before(node(g, "add")):
        add(g, torch.ops._c10d_functional.wait_tensor.default, (node(g, "gather"),), torch.empty(4, 4))


def no_reader(g: fx.Graph) -> None:
    n = node(g, "add")
    n.args = (n.graph.find_nodes(op="placeholder")[0],) * 2
    assert not next(w for w in g.nodes if is_wait(w)).users


def transposed_operand(g: fx.Graph) -> None:
    node(g, "add").meta["val"] = torch.empty(4, 4).t()


BREAKS: dict[str, Callable[[fx.Graph], None]] = {
    "every node has a value and a direction": no_value,
    "forward reads nothing of backward": from_backward,
    "process groups have names that are the same on every rank": a_ranks_own_group,
    "a collective is waited for, once": two_waits,
    "what is waited for is used": no_reader,
    "operands lie as kernels demand": transposed_operand,
}


def test_a_legal_graph() -> None:
    check(fx.GraphModule(nn.Module(), legal()), PREFIX, "nothing", EVERY, 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.said.replace(" ", "-"))
def test_what_breaks_a_rule_is_told(rule: object) -> None:
    g = legal()
    BREAKS[rule.said](g)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=rule.said) as e:  # type: ignore[attr-defined]
        check(fx.GraphModule(nn.Module(), g), PREFIX, "some pass", EVERY, 1)
    assert "after some pass" in str(e.value) and "reads %" in str(e.value), "the node, and what it reads"


def test_costly_rules_are_left_out_unless_asked_for() -> None:
    g = legal()
    transposed_operand(g)
    check(fx.GraphModule(nn.Module(), g), PREFIX, "nothing", EVERY)


def test_a_line_says_what_a_node_makes() -> None:
    assert (
        line(node(legal(), "wait"))
        == "%wait_tensor_default = _c10d_functional.wait_tensor.default(%all_gather_into_tensor_default) : float32[4, 4]  # forward test"
    )


def step() -> None:
    with fake_world(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        autopar.compile(model, (2,), layout="fsdp", backend="aot_eager", outputs="all").prepare(torch.zeros(4, 8))


def test_dumps_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for name in ("a", "b"):
        monkeypatch.setenv(dump.VARIABLE, str(tmp_path / name))
        step()
        (folder,) = (tmp_path / name).iterdir()
        texts.append({f.name: f.read_text().replace(_prefix(folder), PREFIX) for f in folder.iterdir()})
    assert texts[0] == texts[1]
    names = sorted(texts[0])
    assert names[0] == "00-captured.txt" and names[2] == "02-shard.txt" and names[-1].endswith("overlap-backward.txt")
    assert "reduce_scatter_tensor" in texts[0][names[-1]] and "aten.t.default" in texts[0][names[0]]


def _prefix(folder: Path) -> str:
    """Groups are named anew for each module of a process."""
    text = (folder / "02-shard.txt").read_text()
    return text.split("'autopar.")[1].split(".dp'")[0]


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dump.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    step()
    assert not list(tmp_path.iterdir())


def test_the_log_says_what_takes_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        step()
    said = [r.getMessage().split(":")[0] for r in caplog.records]
    assert [s for s in ("capture", "fold", "shard", "joint passes", "lower forward with aot_eager") if s not in said] == []
