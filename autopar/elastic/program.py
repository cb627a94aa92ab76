"""What a process must have in common with the members of a run to join it: the model, the arguments, the optimizer, what the model computes; each as text, to be compared.

Members write it into the supervisor's store, and the process that would join compares, so that one with another program is refused before anybody waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from autopar.distributed.agreement import DisagreementError, difference
from autopar.elastic.options import Elastic
from autopar.pipeline import Lists
from autopar.planner.axes import PIPELINE
from autopar.runtime.facts import PLAN
from autopar.runtime.module import ParallelModule

FIX = "start it with the program, the arguments and the versions that the run was started with"
Texts = Mapping[str, str]  # by what it is for people


def of_model(model: ParallelModule, options: Elastic, axes: Mapping[str, int], lists: Lists | None) -> dict[str, str]:
    """What is compared when a module is compiled, and the versions of what compiles it. axes: of the mesh; the size of the one that follows the number of ranks is not compared. lists: a pipeline's
    schedule where all ranks are there that there may be."""
    said = {k: text for k, text in model._builder.facts().items() if k != PLAN}  # which one that joins has from the run
    facts = {k: "\n".join(x for x in text.splitlines() if not x.startswith(("mesh=", "schedule="))) for k, text in said.items()}
    varies = next((a for a in axes if a != PIPELINE), PIPELINE)
    mesh = " x ".join(name if name == varies else f"{name}={size}" for name, size in axes.items())
    return {
        **facts, "elastic=": repr(options), "the mesh's other axes": mesh, "the schedule of the pipeline": "" if lists is None else lists.text(),
        "the version of torch": torch.__version__,
    }  # fmt: skip


def of_session(model: ParallelModule, optimizer: Optimizer, others: list[Any]) -> dict[str, str]:
    """What is optimized by what, and what counts along."""
    names = {id(p): n for n, p in model._builder.model.named_parameters()}  # those on other stages, too
    groups = "\n".join(
        f"group {i}: {', '.join(sorted(set(g) - {'params'}))}\n" + "\n".join(f"group {i}: {names.get(id(p))}" for p in g["params"])
        for i, g in enumerate(optimizer.param_groups)
    )
    kinds = [type(x).__name__ for x in others]
    return {"the optimizer": f"{type(optimizer).__name__}\n{groups}", "what counts along with the session": "\n".join(kinds)}


def of_steps(model: ParallelModule) -> list[str]:
    """What the model computes in the steps that train."""
    return [s.program for s in model._programs.steps() if s.has_backward]


def digest_of(texts: Texts) -> str:
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def compare(theirs: Texts, mine: Texts) -> None:
    """Raises DisagreementError."""
    for name, text in theirs.items():
        if mine.get(name, "") != text:
            raise disagreement(name, text, mine.get(name, ""))


def disagreement(name: str, theirs: str, mine: str) -> DisagreementError:
    return DisagreementError(
        f"this process cannot join the run: it disagrees with it about {name}",
        where=difference({"the run": theirs, "this process": mine}),
        fix=FIX,
    )
