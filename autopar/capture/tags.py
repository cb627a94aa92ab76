"""What the user says of single activations, from the module's Python to `meta["tag"]` of the captured nodes (`autopar.planner.tags` says what a tag means).

There are two ways to say it. `must_save(x)` and `must_recompute(x)` mark one tensor: captured they are aliases, which are taken out again. And
checkpointed regions (`torch.utils.checkpoint`): all that is made in one is made again, or what its policy does not save. A region says nothing of what
it hands on: that is another's input, and outlives it.

A view shares its storage's policy. Saved, it saves what it looks at; made again, it is made of what it looks at, whatever becomes of that.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar.graph.calls import shares_storage
from autopar.graph.graph import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE

MARK = "autopar"  # the key of our annotation


def must_save(x: Tensor) -> Tensor:
    """`x` itself. In a plan, if backward needs `x`, then it is kept, on the device or away from it, and not made again."""
    return _marked(x, MUST_SAVE)


def must_recompute(x: Tensor) -> Tensor:
    """`x` itself. In a plan, if backward needs `x`, then it is made again from what it was made of, and not kept."""
    return _marked(x, MUST_RECOMPUTE)


def _marked(x: Tensor, tag: str) -> Tensor:
    if not torch.compiler.is_compiling():
        return x
    with torch.fx.traceback.annotate({MARK: tag}):
        marked: Tensor = torch.ops.aten.alias.default(x)
        return marked


def join_tags(first: fx.Node, other: fx.Node) -> None:
    """For when `first` stands for an equal `other` too. What several regions make alike, such as a mask, is made once, outside of them."""
    if _torch.region_of(first)[0] != _torch.region_of(other)[0]:
        _torch.leave_region(first)
    if "mark" in other.meta:
        first.meta["mark"] = other.meta["mark"]


def lift_marks(gm: fx.GraphModule) -> None:
    """Takes the aliases out of a joint graph; what made the marked tensor has the mark then, as `meta["mark"]`."""
    for n in list(gm.graph.nodes):
        mark = (n.meta.get("custom") or {}).get(MARK)
        if mark is not None and n.op == "call_function" and n.target is torch.ops.aten.alias.default:
            (x,) = n.args
            assert isinstance(x, fx.Node)
            _base(x).meta["mark"] = mark
            n.replace_all_uses_with(x)
            gm.graph.erase_node(n)
    gm.recompile()


def settle_tags(gm: fx.GraphModule) -> None:
    """Gives the nodes of forward their `meta["tag"]`, also the `getitem` nodes of each output."""
    forward = [n for n in gm.graph.nodes if n.op == "call_function" and _is_forward(n)]
    handed_on: set[fx.Node] = set()
    for n in reversed(forward):
        region, tag = _torch.region_of(n)
        readers = [u for u in n.users if u.op == "output" or _is_forward(u)]
        if any(u.op == "output" or _torch.region_of(u)[0] != region or (shares_storage(u) is n and u in handed_on) for u in readers):
            handed_on.add(n)
            tag = "" if tag in (MUST_RECOMPUTE, PREFER_RECOMPUTE) else tag
        n.meta["tag"] = n.meta.get("mark", tag)
    for n in forward:
        base = _base(n)
        if base is not n and base.op == "call_function":
            if n.meta["tag"] == MUST_SAVE and "mark" not in base.meta:
                base.meta["tag"] = MUST_SAVE
            elif base.meta.get("mark") == MUST_RECOMPUTE:
                n.meta["tag"] = MUST_RECOMPUTE


def _base(n: fx.Node) -> fx.Node:
    """What a view looks at, through views: a result of its own."""
    while (x := shares_storage(n)) is not None and not (_torch.is_getitem(n) and shares_storage(x) is None):
        n = x
    return n


def _is_forward(n: fx.Node) -> bool:
    return n.meta.get("partitioner_tag") != "is_backward"
