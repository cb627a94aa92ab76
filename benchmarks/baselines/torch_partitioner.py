"""What torch's own partitioner keeps: `torch._functorch.partitioners.min_cut_rematerialization_partition`, which Inductor uses.

    min-cut          the cheapest cut between forward and backward, of what its heuristics allow to be made again: nothing heavy, nothing random
    memory budget    `torch._functorch.config.activation_memory_budget`: a knapsack over what min-cut would not make again, by FLOPs and bytes

torch runs it on the graph as Inductor decomposes it, we on the captured one, before. Operators that Inductor decomposes into allowed ones (a layer norm, a
softmax) are therefore added to its list of what may be made again, and our views to its views ("decomposed"); so it keeps 92 to 100% of the bytes that
it keeps of the decomposed graph, on Llama, GPT-2, BERT and T5. "as captured" leaves the lists as torch has them. Attention is an operator of ours; the
partitioner is told that it is heavy, as torch's are, and how many FLOPs it has (all pairs, as torch counts).

It also does what `torch.compile` makes of activation checkpointing: tags on nodes, which the cut keeps to (`checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry, register_flop_formula

from autopar import _torch
from autopar.capture.describe import tensor_name
from benchmarks.baselines.program import Program

_ATTENTION = torch.ops.autopar.attention_v2

if _ATTENTION not in flop_registry:

    @register_flop_formula(_ATTENTION)
    def _attention_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        """Two products for every query head: q k^T and p v."""
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def min_cut(
    program: Program, budget: float = 1.0, solver: str = "dp", decomposed: bool = True, tags: Mapping[str, tuple[int, str]] | None = None
) -> frozenset[str]:
    """Names of the tensors that are kept. tags: operator -> (number of its checkpointed region, what is wanted of its results)."""
    gm, roles = copied(program.captured.gm), program.captured.outputs
    count = next(i for i, r in enumerate(roles) if r.kind in ("grad", "input_grad"))
    assert not any(r.kind in ("output", "buffer_update") for r in roles[count:]), "gradients are the last results"
    for n in gm.graph.nodes:
        tag = (tags or {}).get(n.args[0].name if _torch.is_getitem(n) else n.name)
        if tag is not None:
            n.meta |= {"ac_graph_id": tag[0], "recompute": CheckpointPolicy[tag[1].upper()]}
    cheap, views = _lists(program, gm) if decomposed else (set(), set())
    names = set(_torch.saved_by_min_cut(gm, count, budget, solver, {_ATTENTION}, cheap, views))
    made = {op.name for op in program.graph.ops}
    nodes = [n for n in program.captured.gm.graph.nodes if n.op == "call_function" and n.name in names]
    return frozenset(tensor_name(n) for n in nodes if n.name in made or _torch.is_getitem(n))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` under the same names: the partitioner changes the graph that it is given."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in gm.graph.nodes:
        env[n] = graph.node_copy(n, env.__getitem__)
    return fx.GraphModule(gm, graph)


def _lists(program: Program, gm: fx.GraphModule) -> tuple[set[Any], set[Any]]:
    """What of the captured operators Inductor decomposes into cheap ones, and the views."""
    gone = _torch.decomposed_late()
    targets = {n.name: n.target for n in gm.graph.nodes if n.op == "call_function"}
    cheap, views = set(), set()
    for op in program.graph.ops:
        rule, target = program.rules[op.name], targets.get(op.name)
        if target is not None and hasattr(target, "overloadpacket"):
            if rule.kind == "view":
                views.add(target.overloadpacket)
            elif target in gone and not rule.is_heavy and rule.kind != "random":
                cheap.add(target.overloadpacket)
    return cheap, views
