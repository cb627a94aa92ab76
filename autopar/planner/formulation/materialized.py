"""Which tensors are in memory once they are made."""

from __future__ import annotations

from typing import NamedTuple

from autopar.cost import Cost
from autopar.cost.memory import is_view
from autopar.planner.formulation.program import Program


class Materialized(NamedTuple):
    """whole: if all that backward reads is kept; ahead: by forward, if nothing is; again: by what runs again."""

    whole: set[str]
    ahead: set[str]
    recompute: set[str]


def materialized(program: Program, cost: Cost) -> Materialized:
    """Names of tensors of the program's graph."""
    found = Materialized(set(), set(), set())
    for op in program.graph.ops:
        names = {t.name for t in op.outputs if t is not None}
        whole = ahead = recompute = names
        if cost.fused is not None and op.name in cost.fused and not program.rules[op.name].is_heavy:
            whole, ahead, recompute = (names & x for x in (cost.fused[op.name].writes, cost.stored(op), cost.stored(op, recompute=True)))
        elif program.rules[op.name].kind == "view" and (cost.fused is not None or is_view(op, program.rules[op.name])):
            continue
        for all_of_it, mine in zip(found, (whole, ahead, recompute), strict=True):
            all_of_it |= mine
    return found
