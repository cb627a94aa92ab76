"""`imbalance=` of whoever plans, predicts, searches or compiles: how unevenly tokens go to the ranks that routed experts are split over.

It is the rows of the fullest rank over the mean of all: 1.0 is even load. All ranks wait for the fullest one, so its products, its exchanges
and its memory are what is priced (`autopar.cost.experts`). Of W ranks it can be W at most: all rows on one of them. Where no rows are exchanged it says nothing.
"""

from __future__ import annotations

import math

from autopar.errors import AutoparError
from autopar.graph.graph import Graph
from autopar.rules import lookup
from autopar.rules.experts import BACKWARD, FORWARD

EVEN = 1.0
_HOW = "give the rows of the fullest rank over the mean of all, such as imbalance=1.3; 1.0 is even load"


def checked(imbalance: float, devices: int) -> float:
    """As a number, of a run on so many devices. Raises AutoparError for what it cannot be."""
    is_number = isinstance(imbalance, (int, float)) and not isinstance(imbalance, bool)
    if not is_number or not math.isfinite(imbalance) or imbalance < EVEN:
        raise AutoparError(f"imbalance={imbalance!r} is no load of a fullest rank: that is the mean at least", where="imbalance", fix=_HOW)
    refuse_more(imbalance, devices, f"{devices} devices")
    return float(imbalance)


def refuse_more(imbalance: float, ranks: int, said: str) -> None:
    """Raises AutoparError where not even all rows on one of so many ranks would make that."""
    if imbalance > ranks > 1:
        raise AutoparError(
            f"imbalance={imbalance:g} is more than {said} could make it, with all rows on one of them",
            where="imbalance",
            fix=f"give at most {ranks}, or leave it out for even load",
        )


def check_experts(graph: Graph, imbalance: float) -> None:
    """Raises AutoparError where the program has fewer experts than that would take."""
    if imbalance == EVEN:
        return
    most = max(
        (math.prod(r.factors[x].size for x in r.pairs) for op in graph.ops if op.target in (FORWARD, BACKWARD) for r in (lookup(op),)),
        default=1,
    )
    refuse_more(imbalance, most, f"{most} ranks, with an expert each,")
