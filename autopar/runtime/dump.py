"""`AUTOPAR_DUMP=folder`: the graph after every stage, as text that can be read and compared.

    folder/0-train/00-captured.txt, 01-plan.txt, 02-shard.txt, 03-lay-out.txt, ...

A folder for every step that is built, in order; a line for every node (`passes.specification.line`), the same on every rank, so only the first rank writes. To see what
a pass did: diff two neighbours. To see what a change of the code did: dump before and after, and diff the folders.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import torch.distributed as dist
from torch import fx

from autopar.passes.specification import line

VARIABLE = "AUTOPAR_DUMP"
_steps = itertools.count()


class Dump:
    """Writes one step's stages; nothing where the variable is not set."""

    def __init__(self, kind: str) -> None:
        """kind: of the step, such as "train"; part of the folder's name. Nothing is written where there is none."""
        folder = os.environ.get(VARIABLE, "") if kind else ""
        first = not dist.is_initialized() or dist.get_rank() == 0
        self.folder = Path(folder) / f"{next(_steps)}-{kind}" if folder and first else None
        self.count = itertools.count()

    def graph(self, stage: str, gm: fx.GraphModule | None) -> None:
        if self.folder is not None and gm is not None:
            self.text(stage, "".join(f"{line(n)}\n" for n in gm.graph.nodes))

    def text(self, stage: str, text: str) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9]+", "-", stage.lower()).strip("-")
            (self.folder / f"{next(self.count):02d}-{name}.txt").write_text(text)
