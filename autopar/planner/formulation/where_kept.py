"""Where a value may be kept for backward: on the device, in host memory, on local disks; and what that takes.

What forward's kernels would not have written is written to be kept, and read by backward's kernels, wherever it is meanwhile (`Cost.kept`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.cost import Beside, Cost
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.program import Program
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.problem import DEVICE, HOST, NVME, Policy

# Per medium, the links that its data crosses: (resource, direction).
LINKS: dict[str, tuple[tuple[str, int], ...]] = {
    DEVICE: (),
    HOST: (("d2h", 0), ("h2d", 1)),
    NVME: (("d2h", 0), ("nvme_write", 0), ("nvme_read", 1), ("h2d", 1)),
}


def policies(program: Program, training: TrainingConfig, cost: Cost, value: str, nbytes: Mapping[int, float]) -> tuple[Policy, ...]:
    """How a value may be kept. nbytes: of one tensor, per node at which it may be."""
    found = []
    for medium in (DEVICE, *training.media):
        for n, size in nbytes.items():
            if medium == DEVICE or size >= training.least_bytes:
                found.append(Policy(n, medium, times(program, cost, value, size, medium)))
    return tuple(found)


def times(program: Program, cost: Cost, value: str, nbytes: float, medium: str = DEVICE) -> dict[int, float]:
    """By account, what keeping all tensors of a value takes. nbytes: of one."""
    spent: dict[int, float] = defaultdict(float)
    for tensor in program.q.members[value]:
        for beside, count in besides(program, cost, tensor, nbytes):
            spent[account(beside.half, "compute")] += count * beside.seconds
    for resource, d in LINKS[medium]:
        spent[account(d, resource)] += program.q.count(value) * cost.transfer_s(resource, nbytes)
    return {a: t for a, t in spent.items() if t}


def besides(program: Program, cost: Cost, tensor: str, nbytes: float) -> Iterator[tuple[Beside, int]]:
    """What operators do to keep a tensor, and how often in the program. What lies outside of layers is read by each of them."""
    q, home = program.q, program.stack_of.get(tensor.split(".")[0])
    for beside in cost.kept(tensor, nbytes):
        own = q.tensor_times[tensor]
        yield beside, own if program.stack_of.get(beside.op) == home else max(own, q.times[beside.op])
