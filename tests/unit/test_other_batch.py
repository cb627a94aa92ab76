"""A folded program at a size that was not captured is, letter by letter, what a capture at that size gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.graph.graph import Graph
from autopar.planner.other_batch import at_batch
from autopar.solver.fold import Folded, fold
from tests.unit.test_expert_layouts import mixtral
from tests.unit.test_experts import llama
from tests.wide import cases

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512}


@cache
def program(kind: str, batch: int) -> Folded:
    return fold(mixtral(batch) if kind == "mixtral" else llama(2, batch, 64, **TINY))


@pytest.mark.parametrize("kind", cases(["mixtral", "llama"], ["mixtral"]))
def test_it_is_what_a_capture_gives(kind: str) -> None:
    found = at_batch(program(kind, 2), program(kind, 4), 2, 4, 16)
    assert found is not None and found.graph == program(kind, 16).graph and found == program(kind, 16)
    assert found.fingerprint() == program(kind, 16).fingerprint()


def test_other_programs_are_not_told_of() -> None:
    few, many = program("llama", 2), program("llama", 4)
    assert at_batch(few, program("mixtral", 4), 2, 4, 16) is None
    op = next(op for op in many.graph.ops if op.target == "aten.mm.default")

    def with_op(**changed: object) -> Folded:
        ops = tuple(replace(o, **changed) if o is op else o for o in many.graph.ops)  # type: ignore[arg-type]
        graph: Graph = replace(many.graph, ops=ops)
        return replace(many, graph=graph)

    assert at_batch(few, with_op(), 2, 4, 16) is not None
    assert at_batch(few, with_op(target="aten.bmm.default"), 2, 4, 16) is None
    out = op.outputs[0]
    assert out is not None
    odd = replace(out, shape=(out.shape[0] + 1, *out.shape[1:]))  # neither the same nor proportional
    assert at_batch(few, with_op(outputs=(odd,)), 2, 4, 16) is None
    assert at_batch(few, replace(many, note="captured in full"), 2, 4, 16) is None
