"""The patterns, and what is made of them. **Add a pattern here.**"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured
from autopar.capture.fusions.graph import Writer
from autopar.capture.fusions.log_prob import put_log_prob
from autopar.capture.fusions.loss_head import loss_heads
from autopar.capture.tags import settle_tags


@dataclass(frozen=True)
class Pattern:
    """find: every place where it may be put; put: does so at one of them. operator: what then stands there."""

    name: str
    operator: str
    find: Callable[[fx.Graph], list[Any]]
    put: Callable[[Any, Writer], None]


LOSS_HEAD = Pattern("linear layer and cross-entropy", "autopar.linear_log_prob_v1.default", loss_heads, put_log_prob)
PATTERNS = (LOSS_HEAD,)


def logits_bytes(captured: Captured) -> float:
    """What all scores of the heads that are found would take, in float32."""
    return sum(4.0 * head.scores for head in loss_heads(captured.gm.graph))


def fused(captured: Captured, patterns: tuple[Pattern, ...] = PATTERNS) -> Captured:
    """`captured` with operators of ours where there are patterns; itself where there are none."""
    if captured.family is not None:
        family = captured.family.then(lambda made: _fused(made, patterns))
        return replace(family.at(family.units), family=family)
    return _fused(captured, patterns)


def _fused(captured: Captured, patterns: tuple[Pattern, ...]) -> Captured:
    if not any(p.find(captured.gm.graph) for p in patterns):
        return captured
    gm = fx.GraphModule(captured.gm, _copy(captured.gm.graph))
    write = Writer(gm.graph, captured.fake_mode)
    for p in patterns:
        for place in p.find(gm.graph):
            p.put(place, write)
    _torch.drop_dead_code(gm)
    settle_tags(gm)
    gm.graph.lint()
    return replace(captured, gm=gm)


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new
