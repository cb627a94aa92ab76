"""`autopar elastic`: what a run does when devices fail, said before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli import options as cli_options
from autopar.cli.options import AsJson, Batch, Computed, Devices, Model, Sequence, SomeLayers, StateOf, built, writable
from autopar.cli.screen import Screen
from autopar.cli.voice import voiced
from autopar.errors import AutoparError
from autopar.text.sizes import parse_bytes
from autopar.text.strict_json import short

if TYPE_CHECKING:
    from autopar.elastic.plans import Templates

Unit = Annotated[str, typer.Option(help="what fails as one: node or device")]
GroupSizes = Annotated[
    str | None, typer.Option("--sizes", help="nodes or devices of the groups that may train beside each other: 1-8, or 2,3,8")
]
Micro = Annotated[int, typer.Option("--micro-batch", min=1, help="sequences that are dealt as one")]
Memory = Annotated[str | None, typer.Option(help="of a device: 70GB, 64GiB, or bytes; without it what the device has")]


def plan(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    survive: Annotated[int, typer.Option(min=0, help="nodes or devices that may be lost")] = 1,
    unit: Unit = "node",
    sizes: GroupSizes = None,
    micro_batch: Micro = 1,
    memory: Memory = None,
    precision: Computed = "bf16",
    optimizer: StateOf = "adamw",
    layers: SomeLayers = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="write them here, as JSON")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan ahead for every number of nodes or devices that failures may leave."""
    if output is not None:
        writable(output, "What was planned", "--output")
    made = Asked(model, cluster, batch, seq, unit, sizes, micro_batch, memory, precision, optimizer, layers).templates(survive)
    if output is not None:
        output.write_text(json.dumps(made.document(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        from autopar.cli.documents import templates_document

        typer.echo(templates_document(made))
    else:
        typer.echo(made.text())


app = typer.Typer(help="Plan for failures, and say what they cost.", no_args_is_help=True)
for _command in (plan,):
    app.command()(voiced(_command))


class Asked:
    """What plans ahead are made of. Raises AutoparError for what is wrong, before a model is built."""

    def __init__(
        self, model: str, cluster: str, batch: int, seq: int, unit: str, sizes: str | None, micro_batch: int, memory: str | None, precision: str,
        optimizer: str, layers: int | None,
    ) -> None:  # fmt: skip
        from autopar.hardware.cluster import Cluster

        self.model, self.batch, self.seq, self.unit, self.micro_batch, self.layers = model, batch, seq, unit, micro_batch, layers
        self.precision, self.optimizer = precision, optimizer
        self.cluster = Cluster.of(cluster)
        self.sizes = None if sizes is None else numbers(sizes, "--sizes")
        self.memory = None if memory is None else parse_bytes(memory, "--memory")

    def templates(self, survive: int) -> Templates:
        with Screen("planning") as screen:
            from autopar.elastic.plans.templates import checked

            checked(self.cluster, self.batch, survive, self.unit, self.sizes, self.micro_batch)
            module, shapes = built(self.model, self.layers, self.batch, self.seq)
            from autopar.capture.in_subprocess import is_worthwhile
            from autopar.elastic.plans import templates

            return templates(
                module, shapes, self.cluster, global_batch=self.batch, survive=survive, unit=self.unit, sizes=self.sizes, micro_batch=self.micro_batch, memory=self.memory,
                precision=self.precision, optimizer=self.optimizer, in_subprocess=cli_options.alone and is_worthwhile(), progress=screen.timed,
            )  # fmt: skip


def numbers(text: str, where: str) -> tuple[int, ...]:
    """ "1-4,8" -> (1, 2, 3, 4, 8). Raises AutoparError."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = (x.strip() for x in part.partition("-"))
        ends = (low, high if dash else low)
        if not all(x.isascii() and x.isdigit() and len(x) <= 6 for x in ends) or int(ends[0]) > int(ends[1]):
            raise AutoparError(f"{short(text)!r} are no numbers", where=where, fix="write them as 1-8, or 2,3,8")
        found |= {*range(int(ends[0]), int(ends[1]) + 1)}
    return tuple(sorted(found))
