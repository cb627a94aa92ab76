"""Tokens sent to experts once for each node: against counting, and where it is less than sending every row on its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from autopar.cost import two_level
from autopar.cost.links import collective
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.layout import Layout
from autopar.predict.runtime import RUNTIMES, Runtime
from autopar.predict.seconds import seconds
from autopar.predict.step import cost_of
from autopar.predict.work import Transfer, Workload

HERE = Cluster.of("h100:4x8")


@pytest.mark.parametrize(("chosen", "experts", "nodes"), [(2, 8, 4), (3, 6, 2), (4, 8, 8), (1, 4, 2), (8, 8, 4)])
def test_other_nodes_as_counted(chosen: int, experts: int, nodes: int) -> None:
    own, each = 0, experts // nodes
    ways = list(itertools.combinations(range(experts), chosen))
    counted = sum(len({e // each for e in way} - {own}) for way in ways) / len(ways)
    assert two_level.other_nodes(chosen, experts, nodes) == pytest.approx(counted)


def test_seconds_of_the_busier_link() -> None:
    mesh, axes = Mesh.of({"ep": 32}), tuple(Mesh.of({"ep": 32}).names)
    sent = 31 / 32 * 8 * 1e9  # eight rows of each token, a gigabyte of tokens
    crossing = 1e9 * 3 * (1 - math.comb(96, 8) / math.comb(128, 8)) / HERE.inter.reached_Bps
    inside = 8e9 * 7 / 8 / HERE.intra.reached_Bps
    steps = HERE.inter.latency_s + 3 * HERE.inter.step_s + 7 * HERE.intra.step_s
    took = two_level.seconds(HERE, mesh, axes, sent, 8, 128)
    assert took == pytest.approx(max(crossing, inside) + steps)
    assert took < collective(HERE, mesh, "all_to_all", axes, sent).seconds / 2
    # Of one expert a token nothing is saved between nodes; inside of a node there are no two levels.
    assert two_level.other_nodes(1, 128, 4) == pytest.approx(3 / 4)
    inner = Mesh.of({"dp": 4, "ep": 8})
    assert two_level.seconds(HERE, inner, inner.children("ep"), sent, 8, 128) == math.inf


def test_a_runtime_says_whether_it_does_so() -> None:
    layout = Layout(ep=32)
    axes, flat = ("ep",), RUNTIMES["megatron"]

    def took(runtime: Runtime, routed: tuple[int, int] | None) -> float:
        sent = Workload({}, {Transfer("all_to_all", axes, 1e9, routed=routed): 2.0})
        return seconds(sent, cost_of(layout, 32, runtime, HERE), runtime, False).exposed_s

    levels = replace(flat, two_level=True)
    assert took(levels, (8, 128)) < took(flat, (8, 128)) == took(flat, None) == took(levels, None)
    assert took(levels, (1, 128)) <= took(flat, (1, 128))
