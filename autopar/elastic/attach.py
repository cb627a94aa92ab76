"""What `autopar.compile(elastic=...)` does besides compiling: it refuses what cannot be survived, and makes this process a member of the run."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from autopar import _torch
from autopar.elastic import program, words
from autopar.elastic.ahead import Ahead, Scheduled
from autopar.elastic.member import Member
from autopar.elastic.newcomer import Newcomer, asked_axes, joins
from autopar.elastic.options import Elastic
from autopar.errors import AutoparError
from autopar.runtime.module import ParallelModule

WHERE = "autopar.compile, elastic="


@dataclass
class Attached:
    """member: None where there is one process alone, which nothing is left of when it is lost. newcomer: where this process is to join."""

    options: Elastic
    member: Member | None
    ahead: Ahead
    newcomer: Newcomer | None = None


_attached: weakref.WeakKeyDictionary[ParallelModule, Attached] = weakref.WeakKeyDictionary()
_members: list[Member] = []  # of this process; one at most


def refuse(inputs: str, has_plan: bool) -> None:
    """Raises AutoparError for what is not survived yet, before anything is compiled."""
    if not sys.platform.startswith("linux"):
        raise AutoparError(f"elastic= finds connections by /proc, which {sys.platform} does not have", where=WHERE, fix="train on Linux")
    if has_plan:
        raise AutoparError(
            "a plan that is passed is for one mesh, and after a loss the mesh is another",
            where=WHERE,
            fix="leave plan= out: the meshes that may be left are planned too; or pass layout=",
        )
    if inputs != "global":
        raise AutoparError(
            'inputs="local" deals data out by rank, and ranks change when one is lost: samples would be seen twice or never',
            where=WHERE,
            fix='use inputs="global": every rank passes the same whole batch',
        )


def attach(model: ParallelModule, options: Elastic, scheduled: Scheduled | None = None) -> None:
    """scheduled: of a pipeline. Collective. Raises AutoparError where a size has no plan, or nobody supervises this process."""
    ranks = model._builder.groups.ranks
    n = len(ranks)
    if n != (dist.get_world_size() if dist.is_initialized() else 1):
        raise AutoparError(f"the mesh has {n} of {dist.get_world_size()} processes", where=WHERE, fix="make a mesh of all of them")
    if any(a.member is not None for a in _attached.values()):
        raise AutoparError(
            "there is an elastic model in this process already, and after a loss each would regroup for itself",
            where=WHERE,
            fix="compile one module that holds both models, or leave elastic= out",
        )
    full = int(os.environ.get(words.FULL, n))
    ahead = Ahead(
        model, max(1, n - options.survive) if full > n else 1 if n == 1 else n - options.survive, full, asked_axes(), scheduled, _place()
    )
    member, newcomer = None, None
    if full > 1:
        member = _members[0] if _members else Member(options)
        _members[:] = [member]
    if member is not None and joins():
        newcomer = Newcomer(member)
        newcomer.compare("model", program.of_model(model, options, ahead.axes, ahead.lists_for(ahead.largest)))
        if model._config.layout is None:
            ahead.follow(newcomer.plans())
    elif n > 1:
        ends: list[list[tuple[str, int]]] = [[] for _ in ranks]
        dist.all_gather_object(ends, _torch.own_endpoints())
        rank = dist.get_rank()
        _torch.note_between(end for r, theirs in enumerate(ends) if r != rank for end in theirs)
    if member is not None and member.grows and newcomer is None and dist.get_rank() == 0:
        words.write(member.store, words.program("model"), program.of_model(model, options, ahead.axes, ahead.lists_for(ahead.largest)))
    _attached[model] = Attached(options, member, ahead, newcomer)


def _place() -> int | None:
    """Of this process among as many as the run may have; None where nobody says so."""
    place = os.environ.get(words.PLACE)
    return None if place is None else int(place)


def attached_to(model: object) -> Attached:
    """Raises AutoparError where the model was not compiled so."""
    found = _attached.get(model) if isinstance(model, ParallelModule) else None
    if found is None:
        raise AutoparError(
            f"{type(model).__name__} was not compiled with elastic=",
            where="autopar.elastic.Session",
            fix="model = autopar.compile(model, mesh, elastic=autopar.Elastic())",
        )
    return found
