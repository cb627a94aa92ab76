"""What the commands that plan, search and predict have in common: options, the model they name, where they may write."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import AutoparError
from autopar.text.strict_json import short

INTERRUPTED = 130
alone = False  # whether this process is the command's own: `cli.main` was called, not the app

Model = Annotated[str, typer.Argument(help="a public model, such as llama3-70b, or the path of a config.json")]
Devices = Annotated[str, typer.Option("--cluster", help="devices: h100:32x8 (nodes x devices a node), or the path of a description")]
Batch = Annotated[int, typer.Option(min=1, help="sequences in a step, over all devices")]
Sequence = Annotated[int, typer.Option(min=1, help="tokens in a sequence")]
Computed = Annotated[str, typer.Option("--precision", help="bf16, fp16 or fp32: what is computed in")]

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text (docs/json.md)")]
How = Annotated[str, typer.Option("--runtime", help="what software runs it: autopar, megatron, megatron-overlap, fsdp")]
StateOf = Annotated[str, typer.Option("--optimizer", help="whose state memory is counted: adamw, adamw-fused, adamw8bit, sgd, ...")]
SomeLayers = Annotated[int | None, typer.Option("--layers", min=1, help="only so many of the model's layers")]

Imbalance = Annotated[
    float,
    typer.Option(help="tokens of the fullest rank over the mean, where routed experts are split over ranks; 1.0: even load"),
]


def built(model: str, layers: int | None, batch: int, seq: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The model on the meta device, and the shapes of a batch. What captures it is imported here too: torch's compiler, which takes seconds."""
    from autopar.models import configs as models

    config = models.config(model)
    shapes = models.inputs(config, batch, seq)
    importlib.import_module("autopar._torch").import_compiler()
    return models.build(config, layers), shapes


def writable(path: Path, what: str, where: str) -> None:
    """Whether a result can be written is found out before minutes are spent on it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        fix = "name a file in a folder that exists and can be written"
        raise AutoparError(f"{what} cannot be written to {short(str(path), 200)}", where=where, fix=fix)
