"""Effects in a joint graph. torch threads a token through calls that do more than return something; a plan has no use for tokens.

What checks a factorisation (`torch.linalg.inv` of a singular matrix) would have every rank wait for what it is told: instead, what could not be computed is NaN in
the result, which eager would not have returned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar._torch.nodes import getitem, line_of

_CHECK = torch.ops.aten._linalg_check_errors.default
_PASSED_ON = (
    "stack_trace",
    "seq_nr",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "partitioner_tag",
    "autograd_backward",
    "ac_graph_id",
    "recompute",
)


class EffectError(Exception):
    """An operator with an effect that a graph cannot keep. where: the user's line."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


def without_tokens(gm: fx.GraphModule, inputs: list[Any], outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Takes tokens out of `gm`; gives the descriptors of the inputs and outputs that stay."""
    calls = [n for n in gm.graph.nodes if n.target is torch.ops.higher_order.with_effects]
    for n in calls:
        token, op, *args = n.args
        if op is not _CHECK:
            raise EffectError(f"{op} has an effect besides what it returns", line_of(n))
        _mark(gm, args[0])
        for user in list(n.users):
            user.replace_all_uses_with(token)
            gm.graph.erase_node(user)
        gm.graph.erase_node(n)
    is_token = ["Token" in type(d).__name__ for d in inputs]
    result = gm.graph.output_node()
    kept = [i for i, d in enumerate(outputs) if "Token" not in type(d).__name__]
    (values,) = result.args
    assert isinstance(values, (list, tuple))
    if len(kept) < len(outputs):
        result.args = (type(values)(values[i] for i in kept),)
    for node, token in list(zip(gm.graph.find_nodes(op="placeholder"), is_token, strict=True)):
        if token:
            gm.graph.erase_node(node)
    if any(is_token):
        gm.recompile()
    return [d for d, token in zip(inputs, is_token, strict=True) if not token], [outputs[i] for i in kept]


def _mark(gm: fx.GraphModule, info: Any) -> None:
    """NaN in what was computed together with `info`, where that is not zero."""
    call = info.args[0]
    made = next((u for u in call.users if u.target is getitem and u.args[1] == 0), None)
    if made is None:
        return
    graph, value, flags = gm.graph, made.meta["val"], info.meta["val"]
    readers = list(made.users)
    last = max(made, info)  # nodes compare by where they stand
    with graph.inserting_after(last):
        fine = graph.call_function(torch.ops.aten.eq.Scalar, (info, 0))
    nodes, shape = [fine], [*flags.shape, *[1] * (value.dim() - flags.dim())]
    with graph.inserting_after(fine):
        nodes.append(graph.call_function(torch.ops.aten.view.default, (fine, shape)))
    with graph.inserting_after(nodes[-1]):
        nodes.append(graph.call_function(torch.ops.aten.where.ScalarOther, (nodes[-1], made, math.nan)))
    with value.fake_mode:
        nodes[0].meta["val"] = torch.empty(flags.shape, dtype=torch.bool, device=flags.device)
        nodes[1].meta["val"] = nodes[0].meta["val"].view(shape)
        nodes[2].meta["val"] = torch.empty_like(value)
    for n in nodes:
        n.meta.update({k: made.meta[k] for k in _PASSED_ON if k in made.meta})
    for reader in readers:
        reader.replace_input_with(made, nodes[-1])
