"""The accounts of a step: in every stage, what computes and what carries data. A stage lasts as long as its busiest account."""

from __future__ import annotations

from autopar.solver.problem import Account

RESOURCES = ("compute", "intra", "inter", "d2h", "h2d", "nvme_write", "nvme_read")
STAGES = ("forward", "backward", "optimizer")
_PLACE = {resource: i for i, resource in enumerate(RESOURCES)}
ACCOUNTS = tuple(Account(s, r) for s in range(len(STAGES)) for r in RESOURCES)


def account(stage: int, resource: str) -> int:
    """Its index among `ACCOUNTS`."""
    return stage * len(RESOURCES) + _PLACE[resource]
