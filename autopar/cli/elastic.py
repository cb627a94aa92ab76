"""`autopar elastic`: what a run does when devices fail, said before it begins."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
from autopar.text.times import parse_time

if TYPE_CHECKING:
    from autopar.elastic.plans import Templates

SURVIVED = 32  # losses that are planned for, where nobody says how many
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


def simulate(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    mtbf_device: Annotated[
        str | None,
        typer.Option(help="mean time between failures of one device: 50000h. Llama 3's were 50,700 h (419 in 54 days of 16,384 H100)"),
    ] = None,
    mtbf_node: Annotated[str | None, typer.Option(help="instead, of one node")] = None,
    mtbf_cluster: Annotated[str | None, typer.Option(help="instead, of the whole cluster: 3h")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="instead, failures from a CSV file: hours,node or hours,device, and repair_hours")
    ] = None,
    days: Annotated[float, typer.Option(help="that the run takes")] = 30.0,
    seed: Annotated[int, typer.Option(help="of the failures")] = 0,
    repair: Annotated[str, typer.Option(help="until what failed can be used again: 4h, or never")] = "4h",
    spares: Annotated[int, typer.Option(min=0, help="nodes or devices that stand by")] = 2,
    survive: Annotated[
        int | None, typer.Option(min=0, help=f"losses that are planned ahead; without it as many as come at once, at most {SURVIVED}")
    ] = None,
    detect: Annotated[str | None, typer.Option(help="until a loss is seen; without it as measured by four gloo processes")] = None,
    regroup: Annotated[
        str | None, typer.Option(help="of survivors, beside what moves; without it as measured by four gloo processes")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="until a process that is started can join; without it as measured by four gloo processes")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(help="that the others stand while it joins, beside what moves; without it as measured by four gloo processes"),
    ] = None,
    restart: Annotated[str, typer.Option(help="of a whole run from a checkpoint, without reading it: assumed")] = "5min",
    storage: Annotated[str, typer.Option(help="bytes a second that a node writes and reads checkpoints with")] = "1GB",
    save: Annotated[str, typer.Option(help="between checkpoints of elastic runs, which are written beside training")] = "1h",
    unit: Unit = "node",
    sizes: GroupSizes = None,
    micro_batch: Micro = 1,
    memory: Memory = None,
    precision: Computed = "bf16",
    optimizer: StateOf = "adamw",
    layers: SomeLayers = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw it, as SVG, PNG or PDF")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="write it here, as JSON")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay failures on plans ahead: what they cost elastic runs, and runs with checkpoints and spares."""
    for path, where in ((output, "--output"), (plot, "--plot")):
        if path is not None:
            writable(path, "The simulation", where)
    if plot is not None:
        from autopar.elastic.plans.chart import refuse

        refuse(plot)
    asked = Asked(model, cluster, batch, seq, unit, sizes, micro_batch, memory, precision, optimizer, layers)
    from autopar.elastic.plans import failures as drawn
    from autopar.elastic.plans.goodput import Setting
    from autopar.elastic.plans.goodput import simulate as run
    from autopar.elastic.plans.templates import units_of

    units, each = units_of(asked.cluster, unit)
    measured = {"detect": detect, "regroup": regroup, "start": start, "join": join}
    s = Setting(
        **{f"{k}_s": parse_time(x, f"--{k}") for k, x in measured.items() if x is not None},
        storage_Bps=parse_bytes(storage, "--storage"), restart_s=parse_time(restart, "--restart"), save_s=parse_time(save, "--save"), spares=spares,
    )  # fmt: skip
    repair_s, end_s = parse_time(repair, "--repair"), days * 86400
    if trace is not None:
        if (mtbf_device, mtbf_node, mtbf_cluster) != (None, None, None):
            raise AutoparError("a trace and a time between failures say the same", where="--trace", fix="leave one out")
        hit, mtbf_s = drawn.read(trace, units, unit, repair_s), None
    else:
        scales = {
            "--mtbf-device": (mtbf_device, 1 / each),
            "--mtbf-node": (mtbf_node, asked.cluster.devices_per_node / each),
            "--mtbf-cluster": (mtbf_cluster, units),
        }
        each_s = _of_a_unit(scales)
        hit, mtbf_s = drawn.poisson(units, each_s, repair_s, end_s, seed), each_s / units
    ahead = min(drawn.most_away(hit, end_s), SURVIVED, units - 1) if survive is None else survive
    found = run(asked.templates(ahead), hit, days, s, mtbf_s)
    if plot is not None:
        from autopar.elastic.plans.chart import draw

        draw(found, plot)
    if output is not None:
        output.write_text(json.dumps(found.document(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        from autopar.cli.documents import simulation_document

        typer.echo(simulation_document(found))
    else:
        typer.echo(found.text())


def _of_a_unit(scales: Mapping[str, tuple[str | None, float]]) -> float:
    """Seconds between failures of what fails as one. scales: by option, its text and the units' time over its time."""
    given = [(name, text, scale) for name, (text, scale) in scales.items() if text is not None]
    if len(given) != 1:
        fix = f"give one of {', '.join(scales)}, or --trace"
        raise AutoparError(
            "how often something fails is said twice" if given else "nothing says how often something fails",
            where=" ".join(g[0] for g in given),
            fix=fix,
        )
    name, text, scale = given[0]
    seconds = parse_time(text, name)
    if not 0 < seconds < math.inf:
        raise AutoparError(f"{short(text)!r} is no time between failures", where=name, fix="give a positive time, such as 3h")
    return seconds * scale


app = typer.Typer(help="Plan for failures, and say what they cost.", no_args_is_help=True)
for _command in (plan, simulate):
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
