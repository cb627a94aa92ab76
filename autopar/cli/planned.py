"""What `plan`, `explain` and `frontier` have in common: the step that is asked about, and the call of the planner."""

from __future__ import annotations

import gc
import importlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from autopar.cli import options as cli_options
from autopar.cli.options import built
from autopar.cli.screen import Screen
from autopar.errors import AutoparError, MeshError
from autopar.planner.axes import PIPELINE, mesh_axes, refuse_unfilled
from autopar.planner.memory import LEAST, NAMES
from autopar.text.sizes import parse_bytes
from autopar.text.strict_json import short

Axes = Annotated[
    str | None,
    typer.Option(
        "--mesh", help="32x8, or with names: dp=32,tp=8; without it the cluster's nodes x devices; plan tries these cut elsewhere too"
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, help="plan for only so many of the model's layers")]
Optimizer = Annotated[str, typer.Option(help="whose state memory is planned for: adamw, adamw-fused, adamw8bit, sgd, ...")]
Accumulation = Annotated[int, typer.Option("--grad-accumulation", min=1, help="micro-batches of a step; --batch is of each")]
Micro = Annotated[
    str | None,
    typer.Option(
        "--micro-batches",
        metavar="M",
        help="run the batch as so many micro-batches, one after the other; auto: as many as is fastest. By default auto for plan, else 1",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="budget of a device: 70GB, 64GiB, or bytes; without it, or as fastest, what the device has; least: the smallest peak"
    ),
]
Offloaded = Annotated[
    str | None, typer.Option("--offload", help="where activations may be kept besides the device: host, nvme or host,nvme")
]
Head = Annotated[
    str,
    typer.Option(
        "--loss-head",
        metavar="FORM",
        help="whether the head under a loss makes its logits: plain; chunked: tile by tile, and again in backward; auto: as is faster or fits",
    ),
]
Hand = Annotated[str | None, typer.Option("--layout", help="keep to a hand layout: ddp, fsdp, tp, fsdp+tp or fsdp+ep")]
Order = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="of a mesh with an axis pp: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev, or the path of a .csv in torch's notation; by default the fastest of them, or one made for the stages",
    ),
]
Chunks = Annotated[int | None, typer.Option("--virtual-stages", min=1, help="stages a rank has, of --schedule interleaved")]
TimeLimit = Annotated[float | None, typer.Option(min=0.1, help="seconds that planning may take, from the model to the plan")]
PlanningMemory = Annotated[
    str | None,
    typer.Option("--planning-memory", help="most memory that planning may take itself: 4GB, 500MB; an error where it is not enough"),
]
Gap = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="stop this close to the bound: 0.01 is one per cent")]


@dataclass(frozen=True)
class Step:
    """A step as the command line describes it."""

    model: str
    cluster: str
    batch: int
    seq: int
    mesh: str | None
    layers: int | None
    precision: str
    optimizer: str
    grad_accumulation: int
    memory: str | None
    offload: str | None
    layout: str | None
    time_limit: float | None
    gap: float | None
    planning_memory: str | None = None
    micro_batches: str | None = None
    loss_head: str = "plain"
    schedule: str | None = None
    virtual_stages: int | None = None
    imbalance: float = 1.0

    def check(self, mesh: str | dict[str, int] | None) -> None:
        """Raises what the planner would raise of these words after seconds of imports and of building the model."""
        from autopar.cost.optimizers import kind_of
        from autopar.graph.mesh import Mesh
        from autopar.hardware.cluster import Cluster
        from autopar.planner.imbalance import checked as checked_load
        from autopar.planner.layout import Layout
        from autopar.planner.loss_head import checked
        from autopar.planner.offload import Offload

        where = Cluster.of(self.cluster)
        axes = mesh_axes(mesh, where)
        refuse_unfilled(axes, where)
        kind_of(self.optimizer)
        checked(self.loss_head)
        checked_load(self.imbalance, where.size)
        Offload.of(self.offload, where)
        if self.layout is not None:
            Layout.of(self.layout, Mesh.of({n: s for n, s in axes.items() if n != PIPELINE} or {"dp": 1}))

    def default_number(self, verb: str) -> str:
        """Of micro-batches, where none is said. The smallest peak would be that of one sample at a time, whatever that takes."""
        return "auto" if verb == "plan" and self.memory != LEAST else "1"

    def ask(self, verb: str, **asked: str | int | None) -> Any:
        """What `verb` of `autopar.planner.offline` (plan, explain, frontier) answers, with progress. What needs no model is checked before one is built."""
        budget = self.memory if self.memory is None or self.memory in NAMES else parse_bytes(self.memory, "--memory")
        micro = _number(self.micro_batches or self.default_number(verb), verb == "plan")
        own_memory = None if self.planning_memory is None else parse_bytes(self.planning_memory, "--planning-memory")
        shape = None if self.mesh is None else _mesh(self.mesh)
        self.check(shape)
        if verb != "plan" and isinstance(shape, dict) and PIPELINE in shape:
            raise MeshError(f"a pipeline has no {verb}", where="--mesh", fix=f"leave {PIPELINE} out: the rest of the mesh is a stage's")
        if self.schedule is not None or self.virtual_stages is not None:
            asked |= {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        from autopar.capture.in_subprocess import is_worthwhile

        start = time.perf_counter()
        with Screen("planning") as on_progress:
            module, shapes = built(self.model, self.layers, self.batch, self.seq)
            # Imported when it is needed: it brings the solver with it.
            room = "autopar.search.everywhere" if verb == "plan" else "autopar.planner.offline"
            does: Callable[..., Any] = getattr(importlib.import_module(room), verb)
            if cli_options.alone:
                gc.freeze()  # modules stay: nobody looks through them for garbage, not even in the end
            on_progress("imports and configuration", time.perf_counter() - start)
            limits = ("seconds", self.time_limit), ("gap", self.gap), ("memory_bytes", own_memory)
            options = {k: v for k, v in limits if v is not None}
            return does(
                module, shapes, self.cluster, shape,
                precision=self.precision, optimizer=self.optimizer, grad_accumulation=self.grad_accumulation, micro_batches=micro, layout=self.layout,
                memory=budget, offload=self.offload, loss_head=self.loss_head, imbalance=self.imbalance, options=options or None, progress=on_progress, in_subprocess=cli_options.alone and is_worthwhile(), **asked,
            )  # fmt: skip


def _number(text: str, plans: bool) -> int | str:
    """ "4" -> 4. plans: "auto" may be said."""
    if re.fullmatch(r"[1-9][0-9]{0,6}", text.strip()):
        return int(text)
    if text.strip() == "auto" and plans:
        return "auto"
    fix = "give a number, or auto" if plans else "give a number: `autopar plan --micro-batches auto` says which"
    raise AutoparError(f"{short(text)!r} is no number of micro-batches", where="--micro-batches", fix=fix)


def _mesh(text: str) -> str | dict[str, int]:
    """ "32x8" as it is, "dp=32,tp=8" by name."""
    plain = text.strip().lower()
    if re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,7}", plain):
        return plain
    axes = re.findall(r"([A-Za-z_][A-Za-z0-9_]{0,30})=([1-9][0-9]{0,6})(?:,|$)", text.strip())
    sizes = {n: int(s) for n, s in axes}
    if not axes or len(sizes) < len(axes) or ",".join(f"{n}={s}" for n, s in axes) != text.strip():
        raise MeshError(f"{short(text)!r} is not a mesh", where="--mesh", fix="write sizes such as 32x8, or named axes such as dp=32,tp=8")
    return sizes
