"""Plans ahead, end to end: a small model on a described cluster, every size against what is known of it; what cannot be is said."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache

import pytest
from torch import nn

from autopar.elastic.plans import templates
from autopar.elastic.plans.combine import Combination
from autopar.elastic.plans.table import Size, Templates, listed
from autopar.elastic.plans.templates import Answer, spared
from autopar.errors import AutoparError
from autopar.planner.infeasible import InfeasibleError
from autopar.search import search
from tests.models import ZOO

BATCH, TOKENS = 16, 128
INPUTS = {"input_ids": (BATCH, TOKENS), "labels": (BATCH, TOKENS)}


@cache
def model() -> nn.Module:
    return ZOO["llama"].build(2)


@cache
def made(unit: str = "device", survive: int = 3) -> Templates:
    return templates(model(), INPUTS, "h100:2x4", global_batch=BATCH, survive=survive, unit=unit)


def test_every_size_has_a_plan_of_the_whole_batch() -> None:
    sizes = made().sizes
    assert [s.units for s in sizes] == [8, 7, 6, 5] and made().without_plan == ()
    for s in sizes:
        assert s.step_s is not None and s.step_s > 0 and s.memory_bytes > 0
        assert sum(parts for _, parts in s.shares) == BATCH, "no sequence is left out, none is there twice"
        assert sum(units for units, _ in s.shares) + s.idle == s.units
        assert s.one_s is None or s.step_s <= s.one_s
        assert s.even_s is None or s.step_s <= s.even_s
        assert s.even_groups and s.grown_bytes >= 0.0
    assert sizes[0].moved_bytes == 0.0 and sizes[-1].grown_bytes == 0.0
    assert 0 < sizes[0].grown_bytes <= made().state_bytes, "who joins has nothing yet"
    assert all(a.step_s <= b.step_s for a, b in itertools.pairwise(sizes) if a.step_s and b.step_s), "more devices take no longer"


def test_one_group_is_as_fast_as_search_finds_it() -> None:
    best = search(model(), INPUTS, "h100:2x4", global_batch=BATCH, top_k=1, precision="bfloat16", options={"pp": (1,), "ep": (1,)})[0]
    one = made().sizes[0].one_s
    assert one is not None and one >= best.prediction.step_time_s * (1 - 1e-3)


def test_survivors_that_are_distributed_otherwise() -> None:
    lost = made().of((4, 3))
    assert lost is not None and sum(k for k, _ in lost.groups) + lost.idle == 7 and sum(x for _, x in lost.groups) == BATCH


def test_nodes_fail_as_one() -> None:
    sizes = made("node", 1).sizes
    assert [(s.units, s.devices) for s in sizes] == [(2, 8), (1, 4)]
    assert sizes[0].step_s is not None and sizes[1].step_s is not None


def test_the_document_is_json_and_the_text_has_every_size() -> None:
    document = json.loads(json.dumps(made().document()))
    assert [s["units"] for s in document["sizes"]] == [8, 7, 6, 5]
    assert all(any(line.split()[:1] == [str(s.units)] for line in str(made()).splitlines()) for s in made().sizes)


def test_sizes_without_a_plan_are_said_first() -> None:
    found = replace(made(), sizes=(*made().sizes, *(Size(n, n, None, why="no group fits") for n in (4, 3, 1))))
    assert found.without_plan == (4, 3, 1) and str(found).startswith("NO PLAN keeps to the memory of 4 to 3, 1 devices")
    assert "NO PLAN" not in str(made())
    assert listed((9,)) == "9" and listed((9, 8, 7, 3)) == "9 to 7, 3"


def test_no_memory_for_any() -> None:
    with pytest.raises(InfeasibleError, match="memory"):
        templates(model(), INPUTS, "h100:1x2", global_batch=BATCH, survive=1, unit="device", memory=1000.0)


def test_fewer_where_they_are_faster() -> None:
    def of(step_s: float | None, units: int) -> Answer:
        return Answer(None if step_s is None else Combination(((units, 4),), step_s, 0.0, 0), step_s, None, True)

    answers = {5: of(2.0, 5), 4: of(3.0, 4), 3: of(None, 3), 2: of(2.5, 2)}
    spared(answers)
    made = {k: a.made for k, a in answers.items()}
    assert {k: (m.step_s, m.idle, m.groups[0][0]) for k, m in made.items() if m is not None} == {
        5: (2.0, 0, 5), 4: (2.5, 2, 2), 3: (2.5, 1, 2), 2: (2.5, 0, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"unit": "rack"}, "rack"), ({"survive": 8}, "survived"), ({"survive": -1}, "survived"), ({"global_batch": 0}, "micro-batches"),
        ({"global_batch": 15, "micro_batch": 2}, "micro-batches"), ({"sizes": (5,)}, "groups"), ({"memory": "least"}, "least"),
    ],
)  # fmt: skip
def test_what_cannot_be(wrong: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"global_batch": BATCH, "survive": 3, "unit": "device", **wrong}
    with pytest.raises(AutoparError, match=said):
        templates(model(), INPUTS, "h100:2x4", **given)  # type: ignore[arg-type]
