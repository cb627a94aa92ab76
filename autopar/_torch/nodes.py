"""Calls of fx graphs: which operators they are of, what they may be used for, where in the user's source they come from."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx


def value_of(n: fx.Node) -> Any:
    return n.meta.get("val", n.meta.get("example_value"))


def drop_dead_code(gm: fx.GraphModule) -> None:
    """Dead code elimination that knows functional collectives to be pure (torch's counts wait_tensor as a side effect). Checks of values (one_hot's, of its
    classes) go too: they give nothing, and would have every rank wait for the whole of what is checked."""

    def impure(n: fx.Node) -> bool:
        return n.op in ("placeholder", "output") or "copy_" in str(n.target)

    for n in reversed(list(gm.graph.nodes)):
        if not n.users and not impure(n):
            gm.graph.erase_node(n)
    gm.recompile()


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Graph modules made within become Python code when they are first called: fragments that are only inlined never do."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


def line_of(n: fx.Node) -> str:
    """The user's line that a node was traced from, "file:line in function: source"; the node's name where it is not known."""
    lines = [line.strip() for line in str(n.meta.get("stack_trace") or n.stack_trace or "").splitlines() if line.strip(" ^~")]
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith("File ")), None)
    if at is None:
        return n.name
    return ": ".join([re.sub(r'^File "(.*)", line (\d+), in (.*)$', r"\1:\2 in \3", lines[at]), *lines[at + 1 : at + 2]])


def results_of(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns: nodes, and None or constants where it returns no tensor."""
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return tuple(results)


def is_getitem(n: fx.Node) -> bool:
    return n.target is operator.getitem


getitem = operator.getitem


def is_operator(target: Any) -> bool:
    """Whether it is an operator of torch or registered with torch, and no Python function."""
    return isinstance(target, torch._ops.OpOverload)


def is_pure(n: fx.Node) -> bool:
    """Our graphs are functional and draw random numbers from counters only; what writes or asserts must stay."""
    if isinstance(n.target, torch._ops.OpOverload):
        return not n.target._schema.is_mutable and "assert" not in str(n.target)
    return True


def without_dead_code(gm: fx.GraphModule) -> fx.GraphModule:
    drop_dead_code(gm)
    return gm


def get_attribute(gm: fx.GraphModule, path: str) -> Any:
    out: Any = gm
    for part in path.split("."):
        out = getattr(out, part)
    return out


def draws_random(n: fx.Node) -> bool:
    """Whether a node draws from torch's random generator."""
    return isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
