"""What `--json` prints: one document a command, whose kind and version it says. A test validates what every command prints against these tables.

Fields are added without a new version; where one goes or means something else, the version is another. Times are seconds, sizes bytes, shares fractions.
`python -m autopar.cli.documents` prints the tables as docs/json.md has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from autopar.elastic.plans import Templates
    from autopar.elastic.plans.goodput import Simulation
    from autopar.hardware.calibrate import Calibration
    from autopar.plan.plan import Plan
    from autopar.planner.explain import Explanation
    from autopar.planner.frontier import Frontier
    from autopar.predict import Prediction


class Document(BaseModel):
    """What all have in common: `kind` and `version`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def dumps(self) -> str:
        return self.model_dump_json()


class PlanDocument(Document):
    """`autopar plan` and `autopar show`."""

    kind: Literal["plan"] = "plan"
    version: Literal[1] = 1
    cluster: str = Field(description='what it was planned for, "" for a hand layout that nobody priced')
    mesh: dict[str, int] = Field(description="sizes of the mesh's axes, major first")
    layout: str = Field(description='"planned", or the hand layout')
    batch_ways: int = Field(description="devices that the batch is split over")
    predicted: dict[str, float] = Field(
        description="step_time_s, forward_s, backward_s, optimizer_s, exposed_s (what communication adds), tokens_per_s or samples_per_s, mfu, peak_memory_bytes, "
        "budget_bytes, blocking_collectives, bucketed_collectives (that are joined with others), buckets (that they become), bucket_saved_s (which the links do not take for it; "
        "the step's predicted time has them by themselves): those that are known"
    )
    solver: dict[str, str | float | int] = Field(description="objective_s, bound_s, gap, stopped_by, seconds, variables, rows, capture")
    fallbacks: dict[str, int] = Field(description="operators without a rule, which all ranks repeat, and how many there are")
    plan: dict[str, Any] = Field(description="all of it, as `autopar plan -o` writes it; its schema_version says of what form")


class DifferenceDocument(Document):
    """`autopar diff`."""

    kind: Literal["difference"] = "difference"
    version: Literal[1] = 1
    equal: bool = Field(description="whether nothing that was decided or predicted differs")
    lines: list[str] = Field(description="what differs, for people")
    predicted: dict[str, tuple[float | None, float | None]] = Field(description="the figures that differ, of both plans")


class ExplanationDocument(Document):
    """`autopar explain`."""

    kind: Literal["explanation"] = "explanation"
    version: Literal[1] = 1
    operator: str = Field(description="what was asked about")
    placement: str = Field(description="how it was to be placed")
    verdict: Literal["does", "cannot", "does not fit", "costs"] = Field(description="the answer in a word")
    step_s: float | None = Field(description="of the plan, if it was solved")
    instead_s: float | None = Field(description="of the best plan that does as asked, if there is one")
    text: str = Field(description="the whole answer, for people")


class PointRow(BaseModel):
    """A plan of the frontier."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    peak_memory_bytes: float = Field(description="of a device")
    step_time_s: float = Field(description="of the plan")
    bound_s: float = Field(description="no plan within this memory is faster")
    gap: float = Field(description="how far it may be from the best")
    changes: list[str] = Field(description="what the next point does otherwise, for people")


class FrontierDocument(Document):
    """`autopar frontier`."""

    kind: Literal["frontier"] = "frontier"
    version: Literal[1] = 1
    where: str = Field(description="cluster and mesh")
    usable_bytes: float = Field(description="what a device has")
    seconds: float = Field(description="that it took")
    complete: bool = Field(description="whether it ended by itself, not by the clock")
    points: list[PointRow] = Field(description="plans, the fastest first")


class LayoutRow(BaseModel):
    """A layout that was found."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    layout: dict[str, Any] = Field(description="sizes and choices, as `autopar.Layout` takes them")
    cluster: str = Field(description="the devices that it uses")
    idle_devices: int = Field(description="that it leaves")
    step_time_s: float = Field(description="of a step")
    tokens_per_s: float = Field(description="of all devices")
    mfu: float = Field(description="of all devices that there are, causal attention counted")
    mfu_square: float = Field(description="with all of attention's square")
    peak_bytes: float = Field(description="of the fullest pipeline rank")
    parts_s: dict[str, float] = Field(description="where the time goes")
    layers: list[int] = Field(description="by stage of the pipeline")
    runtime: str = Field(description="what software runs it")
    global_batch: int = Field(description="sequences of a step")
    differs: str = Field(description="from the best, for people")


class SearchDocument(Document):
    """`autopar search`."""

    kind: Literal["search"] = "search"
    version: Literal[1] = 1
    complete: bool = Field(description="false where Ctrl-C or a limit of time ended it")
    layouts: list[LayoutRow] = Field(description="the fastest first")


class PredictionDocument(Document):
    """`autopar predict`."""

    kind: Literal["prediction"] = "prediction"
    version: Literal[1] = 1
    model: str = Field(description="its class")
    cluster: str = Field(description="what it is priced for")
    devices: int = Field(description="of the cluster")
    layout: str = Field(description="for people")
    runtime: str = Field(description="what software runs it")
    global_batch: int = Field(description="sequences of a step")
    micro_batches: int = Field(description="of a replica, in a step")
    step_time_s: float = Field(description="the sum of parts_s")
    tokens_per_s: float = Field(description="of all devices")
    mfu: float = Field(description="causal attention counted")
    mfu_square: float = Field(description="with all of attention's square")
    exposed_s: float = Field(description="the parts that are communication: tensor, context and data parallel")
    parts_s: dict[str, float] = Field(description="where the time goes")
    peak_bytes: float = Field(description="of the fullest pipeline rank")
    usable_bytes: float = Field(description="what a device has")
    fits: bool = Field(description="whether the one is within the other")
    memory_bytes: list[dict[str, float]] = Field(description="by pipeline rank and part")
    layers: list[int] = Field(description="by stage of the pipeline")


class SizeRow(BaseModel):
    """A number of nodes or devices that may be left."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    units: int = Field(description="nodes or devices")
    devices: int = Field(description="that are left")
    step_s: float | None = Field(description="of a step; null where no plan keeps to the memory")
    memory_bytes: float = Field(description="of the fullest device")
    groups: str = Field(description="groups x their units (micro-batches of each), for people")
    layouts: dict[str, str] = Field(description="of a group of so many units")
    shares: list[tuple[int, int]] = Field(description="units and micro-batches of each group")
    sync_s: float = Field(description="of step_s, that sums of gradients between groups take")
    idle: int = Field(description="devices without work")
    one_s: float | None = Field(description="a step of one group over all")
    even_s: float | None = Field(description="a step of groups that all get as much")
    even_groups: int = Field(description="how many those are")
    moved_bytes: float = Field(description="to all devices, after the worst loss in the size above")
    busiest_bytes: float = Field(description="of it, to one device")
    grown_bytes: float = Field(description="to one device, where the size below grows to this")
    filled: bool = Field(description="whether templates fill it without rest")
    why: str = Field(description="no plan, for people")


class TemplatesDocument(Document):
    """`autopar elastic plan`; -o writes it, too."""

    kind: Literal["elastic-templates"] = "elastic-templates"
    version: Literal[1] = 1
    model: str = Field(description="its class")
    cluster: str = Field(description="what is there before anything fails")
    unit: str = Field(description="what fails as one: node or device")
    batch: int = Field(description="sequences of a step, whatever is left")
    micro_batch: int = Field(description="sequences that are dealt as one")
    tokens: int = Field(description="of a sequence")
    templates: dict[str, str] = Field(description="layouts by the units of a group")
    lacking: dict[str, float | None] = Field(
        description="units of groups that no plan keeps to the memory of, with the bytes that a device lacks, if more would do"
    )
    filled_from: int | None = Field(description="templates fill every number of units from this one on without rest; null: there is none")
    state_bytes: float = Field(description="parameters and optimizer state, as a checkpoint has them")
    link_Bps: float = Field(description="of a device, between nodes")
    host_Bps: float = Field(description="of a device, to its host's memory")
    node_units: int = Field(description="units of a node")
    sizes: list[SizeRow] = Field(description="the largest first")


class OutcomeRow(BaseModel):
    """A way to live with failures, and what came of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(description="for people")
    goodput: float = Field(description="steps whose result is there at the end x the time of a step of all, over the time of the run")
    held: float = Field(description="the same over all units, those that stand by too")
    in_use: float = Field(description="devices that train, on average, over all of the cluster")
    steps: int = Field(description="whose result is there")
    seconds: dict[str, float] = Field(
        description="useful, slower (units are missing), copies, writing (of checkpoints), lost (done in vain), recovering, waiting: they sum to the run"
    )
    losses: int = Field(description="units that failed while they were used")
    interrupted: int = Field(description="steps that a loss ended")
    undone: int = Field(description="whole steps that were done again")
    restarts: int = Field(description="from a checkpoint")
    interval_s: float | None = Field(description="of work between checkpoints; null for those that only fall back to them")


class SimulationDocument(Document):
    """`autopar elastic simulate`; -o writes it, too."""

    kind: Literal["elastic-simulation"] = "elastic-simulation"
    version: Literal[1] = 1
    model: str = Field(description="its class")
    cluster: str = Field(description="what is there before anything fails")
    unit: str = Field(description="what fails as one: node or device")
    units: int = Field(description="of the cluster, without those that stand by")
    days: float = Field(description="of the run")
    failures: int = Field(description="that hit a place of the run")
    mtbf_s: float = Field(description="expected between two of them; of a trace, what there was")
    step_s: float = Field(description="of all units, undisturbed")
    state_bytes: float = Field(description="of a checkpoint")
    write_s: float = Field(description="of a checkpoint")
    young_s: float = Field(description="of work between checkpoints, by his formula")
    daly_s: float = Field(description="the same by his")
    best_s: float = Field(description="the same, the best by the expected time")
    covered: int = Field(description="the fewest units that have a plan")
    setting: dict[str, float] = Field(
        description="what was measured, assumed or given: detect_s, regroup_s, start_s, join_s, storage_Bps (of a node), restart_s, save_s, spares"
    )
    outcomes: list[OutcomeRow] = Field(description="of each way, the ideal first")


class Constant(BaseModel):
    """A constant that was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    value: float = Field(description="in units of the name's ending")
    relative_sd: float = Field(description="its uncertainty, as a share")


class CalibrationDocument(Document):
    """`autopar calibrate`."""

    kind: Literal["calibration"] = "calibration"
    version: Literal[1] = 1
    file: str = Field(description="where the description was written")
    seconds: float = Field(description="that it took")
    constants: dict[str, Constant] = Field(description="by their path in the description")
    cluster: dict[str, Any] = Field(description="the description, as --cluster takes it")


class WrittenDocument(Document):
    """`autopar report`, `autopar trace` and `autopar compile`."""

    kind: Literal["written"] = "written"
    version: Literal[1] = 1
    plans: list[str] = Field(description="files of the plans")
    file: str = Field(description="what was written: a page of HTML, a trace, or a folder of what was compiled")


DOCUMENTS = (
    PlanDocument, DifferenceDocument, ExplanationDocument, FrontierDocument, SearchDocument, PredictionDocument, CalibrationDocument, WrittenDocument, TemplatesDocument,
    SimulationDocument,
)  # fmt: skip
ROWS = (PointRow, LayoutRow, Constant, SizeRow, OutcomeRow)


# ---- making them -------------------------------------------------------------------------------------------------


def plan_document(plan: Plan) -> str:
    from autopar.plan import schema

    return PlanDocument(
        cluster=plan.cluster, mesh=dict(plan.mesh_axes), layout=plan.layout, batch_ways=plan.data_size, predicted=plan.predicted, solver=plan.solver,
        fallbacks=plan.fallbacks, plan=json.loads(schema.dumps(plan)),
    ).dumps()  # fmt: skip


def difference_document(a: Plan, b: Plan, text: str) -> str:
    x, y = a.predicted, b.predicted
    changed = {k: (x.get(k), y.get(k)) for k in {**x, **y} if x.get(k) != y.get(k)}
    return DifferenceDocument(equal=not text, lines=text.splitlines(), predicted=changed).dumps()


def explanation_document(operator: str, placement: str, found: Explanation) -> str:
    return ExplanationDocument.model_validate(
        {"operator": operator, "placement": placement, "verdict": found.verdict, "step_s": found.step_s, "instead_s": found.instead_s, "text": found.text}
    ).dumps()  # fmt: skip


def frontier_document(found: Frontier) -> str:
    return FrontierDocument.model_validate(json.loads(found.to_json())).dumps()


def search_document(rows: list[dict[str, Any]], complete: bool) -> str:
    return SearchDocument(complete=complete, layouts=[LayoutRow(**row) for row in rows]).dumps()


def prediction_document(p: Prediction) -> str:
    return PredictionDocument(
        model=p.model, cluster=p.cluster, devices=p.devices, layout=str(p.layout), runtime=p.runtime, global_batch=p.global_batch,
        micro_batches=p.micro_batches, step_time_s=p.step_time_s, tokens_per_s=p.tokens_per_s, mfu=p.mfu(), mfu_square=p.mfu("square"),
        exposed_s=p.exposed_s, parts_s=dict(p.parts_s), peak_bytes=p.peak_bytes, usable_bytes=p.usable_bytes, fits=p.fits,
        memory_bytes=[dict(rank) for rank in p.memory_bytes], layers=list(p.layers),
    ).dumps()  # fmt: skip


def calibration_document(found: Calibration, file: Path) -> str:
    constants = {path: Constant(value=f.value, relative_sd=f.relative_sd) for path, f in found.fitted.items()}
    cluster = found.cluster.model_dump(mode="json")
    return CalibrationDocument(file=str(file), seconds=found.seconds, constants=constants, cluster=cluster).dumps()


def written_document(plans: Iterable[Path], file: Path) -> str:
    return WrittenDocument(plans=[str(p) for p in plans], file=str(file)).dumps()


def templates_document(made: Templates) -> str:
    return TemplatesDocument.model_validate_json(json.dumps(made.document())).dumps()


def simulation_document(found: Simulation) -> str:
    return SimulationDocument.model_validate_json(json.dumps(found.document())).dumps()


# ---- saying what they are ------------------------------------------------------------------------------------------


def page() -> str:
    """docs/json.md."""
    return "\n".join([HEAD, *(line for model in (*DOCUMENTS, *ROWS) for line in _table(model))]) + "\n"


HEAD = """# What `--json` prints

Every command takes `--json` and then prints one JSON document on standard output, and nothing else there. Each has a `kind` and a `version`: fields may be
added within a version; where one goes or means something else, the version is another. Times are in seconds, sizes in bytes, shares are fractions of one.

This page is printed by `python -m autopar.cli.documents`; the tables are `autopar/cli/documents.py`."""


def _table(model: type[BaseModel]) -> Iterator[str]:
    kind = model.model_fields.get("kind")
    title = f"`{kind.default}`: {model.__doc__}" if kind is not None else f"{model.__name__}: {model.__doc__}"
    yield f"\n## {title.rstrip('.')}\n"
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        meaning = field.description or (f"`{json.dumps(field.default)}`")
        yield f"| `{name}` | {_type(field.annotation)} | {meaning} |"


def _type(kind: Any) -> str:
    """As JSON has it."""
    plain: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "any"}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.__name__
    of = get_args(kind)
    origin = getattr(kind, "__origin__", None)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(x)}`" for x in of)
    if origin is dict:
        return f"object of {_type(of[1])}"
    if origin in (list, tuple):
        return f"list of {' and '.join(_type(x) for x in of)}"
    return " or ".join(_type(x) for x in of)


if __name__ == "__main__":
    print(page(), end="")
