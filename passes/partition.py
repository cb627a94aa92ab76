"""Joint graph -> forward graph and backward graph.

What backward reads of forward is saved, except values that follow from parameters alone (casts, gathers, views of weights): those are
made again in backward right before their first use, which is what `reshard_after_forward` means for a gathered
parameter, and so are the calls of ops that are to be recomputed (see `recompute`). Graph inputs that backward needs itself (parameter
shards, coordinates, seed) are passed to it again, not saved.

Requires: meta["direction"] on every node. Provides: two graphs; every backward placeholder is a saved value, a tangent, or a role of the
joint graph. Bitwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import OFFLOADED, is_wait, shares_storage
from autopar.passes.ancestors import ancestors
from autopar.passes.fused_recompute import FusedRecompute
from autopar.passes.recompute import recomputed_calls, staying
from autopar.passes.shard import Sharded


@dataclass(frozen=True)
class Parts:
    """forward: placeholders `forward_inputs`, outputs `forward_outputs` + saved values. backward: placeholders are the saved values, then
    `backward_inputs`; outputs `backward_outputs`. backward is None for inference. stays: which of the saved values stay for a call's later micro-batches; later: the forward of
    these, which takes them before all else (`autopar.passes.stay`)."""

    forward: fx.GraphModule
    forward_inputs: tuple[Role, ...]
    forward_outputs: tuple[Role, ...]
    saved: tuple[str, ...]
    backward: fx.GraphModule | None
    backward_inputs: tuple[Role, ...]
    backward_outputs: tuple[Role, ...]
    stays: tuple[int, ...] = ()
    later: Parts | None = None


_GRADS = ("grad", "input_grad", "sent_grad")


def partition(
    sharded: Sharded,
    *,
    reshard_after_forward: bool = True,
    recompute: frozenset[str] = frozenset(),
    fuses: bool = False,
    pinned: frozenset[str] = frozenset(),
    gathered: frozenset[str] = frozenset(),
    once: frozenset[str] = frozenset(),
) -> Parts:
    """recompute: names of ops whose results backward makes again instead of reading what forward saved. fuses: whether the halves are compiled; then what is free
    in backward's kernels is not saved (`fused_again`), but for results of `pinned` ops. gathered: parameters of which what forward gathered is saved,
    though `reshard_after_forward`. once: those of which it stays for later calls too, also where backward does not read it."""
    gm = sharded.gm
    nodes = list(gm.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    role_of = dict(zip(places, sharded.inputs, strict=True))
    results = _torch.results_of(gm.graph)
    fw_results = [(r, n) for r, n in zip(sharded.outputs, results, strict=True) if r.kind not in _GRADS]
    bw_results = [(r, n) for r, n in zip(sharded.outputs, results, strict=True) if r.kind in _GRADS]
    backward_nodes = [n for n in nodes if n.op == "call_function" and n.meta["direction"] == "backward"]
    is_backward = set(backward_nodes)
    recomputed = recomputed_calls(nodes, role_of, recompute, reshard_after_forward=reshard_after_forward, kept=gathered | once)
    recomputed |= views_of_offloaded(nodes)

    wanted = [a for n in backward_nodes for a in n.all_input_nodes] + [n for _, n in bw_results if isinstance(n, fx.Node)]
    saved, used = _crossing(wanted, is_backward, recomputed, role_of)
    if fuses:
        recomputed |= FusedRecompute(nodes, role_of, [n for _, n in fw_results], saved.keys(), recomputed, pinned).run()
        saved, used = _crossing(wanted, is_backward, recomputed, role_of)

    order = {n: i for i, n in enumerate(nodes)}
    brought = staying(nodes, role_of, once) if bw_results and once else {}
    kept = sorted(saved.keys() | {n for n, is_read in brought.items() if is_read}, key=order.__getitem__)
    forward, fw_inputs = _forward(gm, places, role_of, is_backward, [n for _, n in fw_results] + kept)
    if not bw_results:
        return Parts(forward, fw_inputs, tuple(r for r, _ in fw_results), (), None, (), ())
    bw_places = [n for n in places if n in used]
    backward = _backward(gm, kept, bw_places, nodes, is_backward, recomputed, [n for _, n in bw_results])
    return Parts(
        forward, fw_inputs, tuple(r for r, _ in fw_results), tuple(n.name for n in kept),
        backward, tuple(role_of[n] for n in bw_places), tuple(r for r, _ in bw_results),
        tuple(i for i, n in enumerate(kept) if n in brought),
    )  # fmt: skip


def _crossing(
    wanted: list[fx.Node], is_backward: set[fx.Node], recomputed: set[fx.Node], role_of: dict[fx.Node, Role]
) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """What backward needs of forward's results, and of graph inputs (and constants), to have `wanted`."""
    saved: dict[fx.Node, None] = {}
    used: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    todo = wanted[::-1]
    while todo:
        n = todo.pop()
        if n in seen or n in is_backward:
            continue
        seen.add(n)
        if n.op in ("placeholder", "get_attr") and not (n.op == "placeholder" and role_of[n].kind in ("input", "buffer", "received")):
            used[n] = None
        elif n in recomputed:
            todo += n.all_input_nodes
        else:
            saved[n] = None
    return saved, used


def views_of_offloaded(nodes: list[fx.Node]) -> set[fx.Node]:
    """Views in forward of what is kept away from the device: saved themselves, they would keep it there."""
    out: set[fx.Node] = set()
    for n in nodes:
        if n.op == "call_function" and n.meta["direction"] == "forward" and not is_wait(n) and OFFLOADED not in n.meta:
            base = shares_storage(n)
            if base is not None and (OFFLOADED in base.meta or base in out):
                out.add(n)
    return out


def _copy(target: fx.Graph, n: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    new = target.node_copy(n, env.__getitem__)
    new.meta = dict(n.meta)
    return new


def _forward(
    gm: fx.GraphModule, places: list[fx.Node], role_of: dict[fx.Node, Role], is_backward: set[fx.Node], results: list[fx.Node | None]
) -> tuple[fx.GraphModule, tuple[Role, ...]]:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    roles = []
    needed = ancestors([n for n in results if isinstance(n, fx.Node)])
    for n in places:
        if role_of[n].kind not in ("tangent", "accumulated", "received_grad"):
            env[n] = _copy(graph, n, env)
            roles.append(role_of[n])
    for n in gm.graph.nodes:
        if n.op in ("call_function", "get_attr") and n not in is_backward and n in needed:
            env[n] = _copy(graph, n, env)
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in results))
    return _module(gm, graph), tuple(roles)


def _backward(
    gm: fx.GraphModule,
    kept: list[fx.Node],
    places: list[fx.Node],
    nodes: list[fx.Node],
    is_backward: set[fx.Node],
    recomputed: set[fx.Node],
    results: list[fx.Node | None],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in [*kept, *places]:
        new = graph.placeholder("saved_" + n.name if n.op != "placeholder" else n.name)
        new.meta = {"val": n.meta["val"], "direction": "backward"}
        env[n] = new

    order = {n: i for i, n in enumerate(nodes)}

    def bring(wanted: Iterable[fx.Node]) -> None:
        """All that is missing of `wanted`, in the order of forward: what the plan's memory rows count is in that order."""
        missing: dict[fx.Node, None] = {}
        todo = [n for n in wanted if n not in env]
        while todo:
            n = todo.pop()
            if n not in missing:
                missing[n] = None
                todo += (a for a in n.all_input_nodes if a not in env)
        for n in sorted(missing, key=order.__getitem__):
            assert n in recomputed or n.op == "get_attr", n
            env[n] = _copy(graph, n, env)

    needed = ancestors([n for n in results if isinstance(n, fx.Node)])
    for n in nodes:
        if n in is_backward and n in needed:
            bring(n.all_input_nodes)
            env[n] = _copy(graph, n, env)
    bring(n for n in results if isinstance(n, fx.Node))
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in results))
    return _module(gm, graph)


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    out = fx.GraphModule(root, graph)
    out.graph.lint()
    return out
