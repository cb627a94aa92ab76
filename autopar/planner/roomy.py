"""How many micro-batches leave room: of which all may be kept that is not cheap to make again, so that a plan of it is soon found.

Fewer may be faster, and are planned afterwards; but where memory is short a plan takes longest to find, and at the end of its time there would be none.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.fusion import Storages
from autopar.graph.graph import Tensor
from autopar.planner.formulation.training import TrainingConfig
from autopar.rules import lookup
from autopar.solver.fold import Folded

ROOM = 0.7  # of the budget
CHEAPLY = 0.5  # of what backward reads: what is left where all that costs little is made again


def roomy(numbers: Sequence[int], folded: Folded, devices: int, training: TrainingConfig, batch: int) -> int:
    """Of `numbers`, ascending, the least of whose activations half fit beside parameters, gradients and the optimizer's state, everything split evenly over the devices. No
    more than what leaves a sample for each device; but the next one, where devices share a sample's activations. folded: of the whole batch."""
    counts = {t.name: folded.tensor_count.get(folded.tensor_rep.get(t.name, t.name), 1) for t in _once(folded)}
    elements = sum(t.numel * counts[t.name] for t in _once(folded))
    state = elements * (2 * training.master_bytes + training.state_bytes)
    kept = kept_bytes(folded)

    def fits(m: int) -> bool:
        return (CHEAPLY * kept / m + state) / devices <= ROOM * training.budget_bytes

    found = numbers[0]
    for m in numbers:
        if m > numbers[0] and batch // m < devices:
            return found if batch // found < devices else m
        found = m
        if fits(m):
            break
    return found


def _once(folded: Folded) -> list[Tensor]:
    """A parameter of each class."""
    return list({folded.tensor_rep.get(t.name, t.name): t for t in folded.graph.params.values()}.values())


def kept_bytes(folded: Folded) -> float:
    """Of what forward makes and backward reads, on one device."""
    graph = folded.graph
    storages = Storages(graph, {op.name: lookup(op) for op in graph.ops})
    sizes = {t.name: t.nbytes for op in graph.ops for t in op.outputs if t is not None}
    read: dict[str, float] = {}  # by class of tensors
    for op in graph.ops:
        for t in op.inputs if op.direction == "backward" else ():
            maker = storages.maker.get(t.name)
            if maker is not None and maker.direction == "forward" and maker.name not in storages.constant:
                root = storages.root.get(t.name, t.name)
                name = folded.tensor_rep.get(root, root)
                read[name] = sizes.get(root, 0.0) * folded.tensor_count.get(name, 1)
    return sum(read.values())
