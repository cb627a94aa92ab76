"""A stage's backward in two: what other stages wait for, and the gradients of its parameters.

    I   makes what is sent to the stage before
    W   makes the rest, of what forward saved, of what I received, and of values that I made on its way

W reads what I made through explicit values, `between`; but what follows from parameters alone (gathered shards, casts) each makes by itself, so that nothing gathered is held from one to the
other. The same calls, each once, but for those.

Requires: a backward half, as `partition` and all behind it leave it. Provides: two graphs. Bitwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import is_issue, is_wait
from autopar.passes.ancestors import ancestors
from autopar.passes.partition import Parts

SENT = "sent_grad"


@dataclass(frozen=True)
class Half:
    """inputs: first Role("saved", index=i) for what forward saved, then Role("between", index=i), then what else backward takes."""

    gm: fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]


@dataclass(frozen=True)
class Split:
    """input: results are its `outputs`, then the values between; None where nothing is sent. weight: its inputs of that kind are those."""

    input: Half | None
    weight: Half
    between: int


def split(parts: Parts) -> Split:
    gm = parts.backward
    assert gm is not None
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    places = [n for n in nodes if n.op == "placeholder"]
    known: dict[fx.Node, Role] = {n: Role("saved", "", i) for i, n in enumerate(places[: len(parts.saved)])}
    known |= dict(zip(places[len(parts.saved) :], parts.backward_inputs, strict=True))
    results = list(zip(parts.backward_outputs, _torch.results_of(gm.graph), strict=True))
    sent = [(r, n) for r, n in results if r.kind == SENT]
    rest = [(r, n) for r, n in results if r.kind != SENT]
    anew = _from_parameters(nodes, known)
    on_path = ancestors(n for _, n in sent if isinstance(n, fx.Node)) - anew - set(places)
    # A collective is awaited where it is issued, and a tuple taken apart where it is made.
    on_path |= {n for n in nodes if (is_wait(n) or _torch.is_getitem(n)) and n.all_input_nodes[0] in on_path}
    wanted = ancestors((n for _, n in rest if isinstance(n, fx.Node)), on_path)
    between = [n for n in nodes if n in wanted and n in on_path]
    given = {n: Role("between", "", i) for i, n in enumerate(between)}
    first = None
    if sent:
        first = _half(gm, nodes, known, [*sent, *((None, n) for n in between)], set())
    return Split(first, _half(gm, nodes, {**known, **given}, rest, set(between)), len(between))


def _from_parameters(nodes: Iterable[fx.Node], known: dict[fx.Node, Role]) -> set[fx.Node]:
    """Calls that depend on parameters and coordinates alone."""
    plain = {n for n, r in known.items() if r.kind in ("param", "coordinate")}
    out: set[fx.Node] = set()
    for n in nodes:
        if n.op == "get_attr" or (n.op == "call_function" and n.all_input_nodes and all(a in out or a in plain for a in n.all_input_nodes)):
            out.add(n)
    return out


def _half(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    known: dict[fx.Node, Role],
    results: Sequence[tuple[Role | None, object]],
    given: set[fx.Node],
) -> Half:
    needed = ancestors((n for _, n in results if isinstance(n, fx.Node)), given)
    graph, env, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Role]()
    order = {"saved": 0, "between": 1}
    for n in sorted((n for n in nodes if n in needed and n in known), key=lambda n: order.get(known[n].kind, 2)):
        env[n] = graph.placeholder(n.name)
        env[n].meta = {"val": n.meta["val"], "direction": "backward"}
        inputs.append(known[n])
    for n in nodes:
        if n in needed and n not in env:
            env[n] = graph.node_copy(n, env.__getitem__)
            env[n].meta = dict(n.meta)
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for _, n in results))
    out = fx.GraphModule(gm, graph)
    out.graph.lint()
    assert not any(is_issue(n) and not n.users for n in graph.nodes), "a collective that nobody waits for"
    return Half(out, tuple(inputs), tuple(r for r, _ in results if r is not None))
