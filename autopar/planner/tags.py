"""What the user wants of single activations, as plans keep to it. `capture_tags` says how it is said; each output of an `Op` has its tag.

    must_save         if backward needs it, it is kept, on the device or away from it. It has no rerun in the program.
    must_recompute    if backward needs it, it is made again. It has no policy in the program: there is nowhere to keep it.
    prefer_*          a hint. The program decides by time and memory alone; hand layouts, which decide nothing, recompute what had better be.

The first two are part of what an operator is: layers of other tags do not fold, and programs of other tags have other fingerprints.

What a repeated layer hands on is kept or not needed, whatever its tag: made again, it would take the layers before it with it. So a region that spans
layers cannot be had as it is; `unmet` lists what was kept instead. Parameters, and what follows from them alone (casts, gathers), are no
activations: `reshard_after_forward` decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.graph.graph import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, Graph, Op
from autopar.plan.text import LAYER

RECOMPUTE = (MUST_RECOMPUTE, PREFER_RECOMPUTE)
EXAMPLES = 3  # of what is tagged


def unmet(graph: Graph, kept: Collection[str]) -> tuple[str, ...]:
    """Operators tagged to run again of which something is kept nevertheless, for people: those of all layers once."""
    found = [op for op in graph.ops for i, t in enumerate(op.outputs) if t is not None and t.name in kept and op.tag(i) == MUST_RECOMPUTE]
    return tuple(dict.fromkeys(f"{_place(op)}: handed on to another layer" for op in found))


def binding(graph: Graph) -> str:
    """For people, what plans have to keep to; "" if there is nothing."""
    said = []
    for tag in (MUST_SAVE, MUST_RECOMPUTE):
        ops = dict.fromkeys(_place(op) for op in graph.ops if tag in op.binding)
        if ops:
            said.append(f"{tag} of {', '.join([*ops][:EXAMPLES])}" + (f" and {len(ops) - EXAMPLES} more" if len(ops) > EXAMPLES else ""))
    return "; ".join(said)


def untagged(graph: Graph) -> Graph:
    """The program had nobody said anything."""
    return replace(graph, ops=tuple(replace(op, tags=()) for op in graph.ops))


def _place(op: Op) -> str:
    """ "mm in model.layers.*.mlp.up_proj"."""
    return f"{op.target.split('.')[1]} in {LAYER.sub('*', op.module) or 'the model itself'}"
