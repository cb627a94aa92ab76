"""fx graph -> torch-free graph.

Every call becomes an `Op` whose arguments hold `Tensor`s (name, shape, dtype) in place of nodes. The tensor of a node has
the node's name; output i of a node with several outputs has "name.i". `getitem` nodes are no ops: they are those outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured
from autopar.capture.lift import unsplit_sizes
from autopar.graph.graph import Graph, Op, Tensor

WRAPPED = re.compile(r"(?:^|\.)__dict__\['_modules'\]\['(\w+)'\]")  # how it names what a wrapper of torch's wraps
ROOT = re.compile(r"^L\['self'\](\._export_root)?(\.m(\.|$))?")  # what dynamo puts before a path of the user's module


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(captured: Captured) -> Graph:
    tensors: dict[str, Tensor] = {}
    ops: list[Op] = []
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    tangents: list[Tensor] = []
    tangent_of: list[int] = []
    placeholders = iter(captured.inputs)
    outputs: list[str] = []
    grads: dict[str, str] = {}
    updates: dict[str, str] = {}
    after_tangent: set[fx.Node] = set()
    unsplit = unsplit_sizes(captured.family) if captured.family is not None else frozenset()
    for node in captured.gm.graph.nodes:
        if node.op == "output":
            for role, n in zip(captured.outputs, node.args[0], strict=True):
                if not isinstance(n, fx.Node):
                    if role.kind == "output":
                        outputs.append("")
                    continue
                name = tensor_name(n)
                if role.kind == "output":
                    outputs.append(name)
                elif role.kind == "grad":
                    grads[role.name] = name
                elif role.kind == "buffer_update":
                    updates[role.name] = name
            continue
        val = node.meta["val"] if node.op != "get_attr" else node.meta.get("val", getattr_value(captured.gm, node))
        if _torch.is_getitem(node):
            if any(a in after_tangent for a in node.all_input_nodes):
                after_tangent.add(node)
            continue
        if node.op in ("placeholder", "get_attr"):
            t = Tensor(node.name, tuple(val.shape), dtype_name(val.dtype))
            tensors[t.name] = t
            if node.op == "get_attr":
                continue
            role = next(placeholders)
            if role.kind == "param":
                params[role.name] = t
            elif role.kind == "buffer":
                buffers[role.name] = t
            elif role.kind == "whole":  # of the batch that this is a part of: the same on every rank, as buffers are
                buffers[f"whole.{role.index}"] = t
            elif role.kind == "tangent":
                tangents.append(t)
                tangent_of.append(role.index)
                after_tangent.add(node)
            else:
                inputs[role.index] = t
            continue
        if any(a in after_tangent for a in node.all_input_nodes):
            after_tangent.add(node)
        op = replace(describe_node(node, tensors), unsplit=unsplit)
        ops.append(op if node not in after_tangent else replace(op, direction="backward"))
        tensors |= {t.name: t for t in op.outputs if t is not None}
    return Graph(
        params,
        buffers,
        tuple(inputs[i] for i in sorted(inputs)),
        tuple(tangents),
        tuple(tangent_of),
        tuple(sorted(ops, key=lambda op: op.direction == "backward")),  # a constant that only backward reads may stand first
        tuple(outputs),
        grads,
        updates,
        tensors,
    )


def getattr_value(gm: fx.GraphModule, node: fx.Node) -> Any:
    out: Any = gm
    for part in str(node.target).split("."):
        out = getattr(out, part)
    return out


def tensor_name(node: fx.Node) -> str:
    if _torch.is_getitem(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return f"{source.name}.{node.args[1]}"
    return node.name


def describe_node(node: fx.Node, tensors: dict[str, Tensor]) -> Op:
    """The `Op` of one call_function node."""

    def convert(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return tensors[tensor_name(x)]
        if isinstance(x, (list, tuple)):
            return tuple(convert(y) for y in x)
        if isinstance(x, dict):
            return {k: convert(v) for k, v in x.items()}
        if isinstance(x, torch.dtype):
            return dtype_name(x)
        if x is None or isinstance(x, (bool, int, float, str, complex)):
            return x
        return str(x)

    val = node.meta["val"]

    def output(v: Any, name: str) -> Tensor | None:
        return Tensor(name, tuple(v.shape), dtype_name(v.dtype)) if isinstance(v, torch.Tensor) else None

    if isinstance(val, (list, tuple)):
        outputs = tuple(output(v, f"{node.name}.{i}") for i, v in enumerate(val))
    else:
        outputs = (output(val, node.name),)
    direction = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
    args, kwargs = convert(node.args), convert(dict(node.kwargs))
    return Op(node.name, str(node.target), args, kwargs, outputs, direction, module_of(node), tags_of(node, len(outputs)))


def describe_calls(nodes: Iterable[fx.Node], results: Iterable[Any]) -> tuple[Graph, dict[str, fx.Node]]:
    """The calls among `nodes` of a rewritten graph, at local shapes, all of one direction; and the node of each. results: what is returned or read elsewhere."""
    tensors: dict[str, Tensor] = {}
    calls: dict[str, fx.Node] = {}
    ops: list[Op] = []
    for n in nodes:
        if n.op in ("placeholder", "get_attr"):
            val = n.meta["val"]
            tensors[n.name] = Tensor(n.name, tuple(val.shape), dtype_name(val.dtype))
        elif n.op == "call_function" and not _torch.is_getitem(n):
            op = replace(describe_node(n, tensors), direction="forward")
            tensors |= {t.name: t for t in op.outputs if t is not None}
            ops.append(op)
            calls[op.name] = n
    outputs = tuple(tensor_name(n) for n in results if isinstance(n, fx.Node))
    return Graph({}, {}, (), (), (), tuple(ops), outputs, {}, {}, tensors), calls


def tags_of(node: fx.Node, outputs: int) -> tuple[str, ...]:
    """The tag of every output; () if there is none."""
    tags = [node.meta.get("tag", "")] * outputs
    for user in node.users:
        if isinstance(node.meta["val"], (list, tuple)) and _torch.is_getitem(user):
            index = user.args[1]
            assert isinstance(index, int)
            tags[index] = user.meta.get("tag", "")
    return tuple(tags) if any(tags) else ()


def module_of(node: fx.Node) -> str:
    """The module path the node came from; its forward's for a backward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return WRAPPED.sub(r".\1", ROOT.sub("", str(path))).lstrip(".")
