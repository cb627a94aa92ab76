"""Balanced checkpointing (Yuan et al., Accelerating the Training of Large Language Models using Efficient Activation Rematerialization and Optimal Hybrid
Parallelism, USENIX ATC '24).

    balanced      their released Megatron's choice: of a layer its input, q, k, v, attention's result, the second residual's input and the first linear's
                  result are kept, norms and activation functions are made again. In general: no product, attention or collective runs twice.
    by density    their reason for it, as a rule with a budget: tensors rank by the seconds to make them again per byte kept, and the best are kept until a
                  share of the bytes that the layers keep without checkpointing is used up. That they do not do; the budget is ours.

Layers' inputs are kept always. Outside of layers all is kept that backward reads. Seconds are those of the cost model for one run of the operator, which
takes its operands to be at hand.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.cost.memory import is_view
from benchmarks.baselines.checkpoints import eager, regions, tagged
from benchmarks.baselines.program import Program

HEAVY = ("matmul", "attention", "conv", "moe")


def balanced(program: Program) -> frozenset[str]:
    floor = _floor(program)
    heavy = {op.name for op in program.graph.ops if program.rules[op.name].kind in HEAVY}
    return floor | {t for t, op in _wanted(program, floor).items() if op in heavy}


def by_density(program: Program, share: float) -> frozenset[str]:
    """share: of the layers' bytes, 0 keeps their inputs alone, 1 all."""
    floor = _floor(program)
    wanted, seconds = _wanted(program, floor), program.forward_seconds
    size = {t: program.graph.tensors[t].nbytes for t in wanted}
    left = share * sum(size[t] for t in _read_by_backward(program, frozenset()) if t in size)
    kept: set[str] = set()
    for t in sorted(wanted, key=lambda t: (-seconds.get(wanted[t], 0.0) / max(size[t], 1), t)):
        if size[t] <= left:
            kept.add(t)
            left -= size[t]
    return floor | kept


def _floor(program: Program) -> frozenset[str]:
    return eager(program, tagged(program, regions(program), None))


def _wanted(program: Program, floor: Collection[str]) -> dict[str, str]:
    """What layers have to make again when nothing more is kept than `floor`: tensor -> its operator. Views are made of what they view."""
    maker = {t.name: op for op in program.graph.ops for t in op.outputs if t is not None}
    needed = _read_by_backward(program, frozenset(maker) - frozenset(floor))
    return {t: maker[t].name for t in needed if t not in floor and not is_view(maker[t], program.rules[maker[t].name])}


def _read_by_backward(program: Program, again: Collection[str]) -> dict[str, None]:
    """Tensors of forward's operators that backward reads, and what is needed to make those of `again` again; in no particular order but always the same."""
    maker = {t.name: op for op in program.graph.ops if op.direction == "forward" for t in op.outputs if t is not None}
    todo = [t.name for op in program.graph.ops if op.direction == "backward" for t in op.inputs]
    found: dict[str, None] = {}
    while todo:
        t = todo.pop()
        if t in maker and t not in found:
            found[t] = None
            view = is_view(maker[t], program.rules[maker[t].name])
            todo += [i.name for i in maker[t].inputs] if t in again or view else []
    return found
