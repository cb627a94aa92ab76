"""What a legal graph is, stage by stage, as a table. **Add here what a later stage relies on.**

A rule holds of graphs that have its property: "local" from the shard pass on, "joint" while forward and backward are one graph, others from the pass that provides them. Those of level 0 are checked after every pass; those of level 1 cost time, and
are checked where AUTOPAR_DEBUG is set. What breaks one is told with the node, its dtype, shape and strides, and where its operands come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.graph.calls import is_issue, is_wait
from autopar.passes.demands import ORDERS, unmet


@dataclass(frozen=True)
class Rule:
    """holds: of a node, and of the prefix of the step's process groups."""

    said: str
    since: str
    holds: Callable[[fx.Node, str], bool]
    level: int = 0


def _has_value(n: fx.Node, prefix: str) -> bool:
    return n.op == "output" or ("val" in n.meta and n.meta.get("direction") in ("forward", "backward"))


def _reads_its_own_direction(n: fx.Node, prefix: str) -> bool:
    forward = n.op == "call_function" and n.meta["direction"] == "forward"
    return not forward or all(a.meta["direction"] == "forward" for a in n.all_input_nodes)


def _has_neutral_groups(n: fx.Node, prefix: str) -> bool:
    return not is_issue(n) or all(a.startswith(prefix + ".") for a in n.args if isinstance(a, str) and "." in a)


def _is_awaited_once(n: fx.Node, prefix: str) -> bool:
    return not is_issue(n) or (len(n.users) == 1 and all(is_wait(u) for u in n.users))


def _is_used(n: fx.Node, prefix: str) -> bool:
    return not is_wait(n) or bool(n.users)


def _lies_as_demanded(n: fx.Node, prefix: str) -> bool:
    if n.op != "call_function":
        return True
    values: Any = fx.map_arg(n.args, lambda a: a.meta["val"])
    return not unmet(n.target, values, n.meta.get(ORDERS))


RULES = (
    Rule("every node has a value and a direction", "local", _has_value),
    Rule("forward reads nothing of backward", "joint", _reads_its_own_direction),
    Rule("process groups have names that are the same on every rank", "local", _has_neutral_groups),
    Rule("a collective is waited for, once", "local", _is_awaited_once),
    Rule("what is waited for is used", "live", _is_used),
    Rule("operands lie as kernels demand", "laid out", _lies_as_demanded, level=1),
)


def check(gm: fx.GraphModule, prefix: str, after: str, have: Collection[str], level: int = 0) -> None:
    """Raises AssertionError for the first node that breaks a rule of the properties `have`. after: the pass that ran last."""
    gm.graph.lint()
    rules = [r for r in RULES if r.since in have and r.level <= level]
    for n in gm.graph.nodes:
        for r in rules:
            assert r.holds(n, prefix), f"after {after}, not so: {r.said}\n{described(n)}"


def described(n: fx.Node) -> str:
    """A node for people: what it makes and of what."""
    lines = [line(n)]
    lines += [f"    reads {line(a)}" for a in n.all_input_nodes]
    return "\n".join(lines)


def line(n: fx.Node) -> str:
    """One node on one line; the same text for the same node, whenever and on whatever rank it is made."""
    args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: _Name(a.name))
    given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
    made = _value(n.meta.get("val"))
    said = " ".join(str(n.meta[k]) for k in ("direction", "op") if n.meta.get(k))
    return f"%{n.name} = {n.target}({given})" + (f" : {made}" if made else "") + (f"  # {said}" if said else "")


class _Name(str):
    def __repr__(self) -> str:
        return f"%{self}"


def _value(val: Any) -> str:
    if isinstance(val, (list, tuple)):
        return "(" + ", ".join(_value(v) for v in val) + ")"
    if not isinstance(val, torch.Tensor):
        return "" if val is None else str(val)
    dense = val.is_contiguous()
    return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}" + ("" if dense else f" strides {list(val.stride())}")


def check_values(gm: fx.GraphModule, fake_mode: object) -> None:
    """Runs every node again on fake tensors, and compares shapes and dtypes with what is recorded."""
    _torch.check_recorded_values(gm, fake_mode)
