"""A plan's file: JSON, checked against a schema, nothing executable.

    {"plan": <canonical part>, "schema_version": 1, "timing": <how planning went: its seconds, what was captured>}

The canonical part is the same text for the same plan, on every machine: keys are sorted, numbers are written in the shortest form that reads back
equal, what has an order (mesh axes, parameters and ops) is an array. Timings differ from run to run, so they lie beside it.

A plan of a deep model repeats itself: 126 layers make the same few dozen choices. So distinct choices stand once in tables, and
parameters, ops and collectives are rows of (name, position in the table).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from autopar.errors import LayoutError
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.plan.checks import Checker, PlanError, contradiction, mesh_of
from autopar.plan.decisions import CollectiveUse, Decisions, OpChoice, ParamChoice, PipelineChoice
from autopar.plan.profile_schema import ProfileModel, profile_of, profile_rows
from autopar.plan.schema_types import STRICT, AtLeastOne, Flag, Number, Positive, Rows, Short, Size, Table, Text, Value
from autopar.text.strict_json import JsonError, parse, read_bytes, short

SCHEMA_VERSION = 1

Policy = Literal["save", "recompute", "offload:host", "offload:nvme"]
Reduction = Literal["sum", "max", "min"]

T = TypeVar("T")
P = TypeVar("P", bound=Decisions)


class _Model(BaseModel):
    model_config = STRICT


class PlacementModel(_Model):
    """splits: (axis, dim, stride); partial: (axis, reduction)."""

    shape: Short[Size]
    splits: Short[tuple[Text, Size, Positive]] = []
    partial: Short[tuple[Text, Reduction]] = []


class ParamModel(_Model):
    shape: Short[Size]
    dtype: Text
    padded: Short[Size]
    storage: PlacementModel
    compute: PlacementModel
    trainable: Flag = True
    keeps_gathered: Flag = False
    accumulated: PlacementModel | None = None
    once_a_call: Flag = False


class OpModel(_Model):
    """strategy: (axis, letter, stride) and partial: (axis, inputs), in mesh order."""

    strategy: Short[tuple[Text, Text, Positive]] = []
    partial: Short[tuple[Text, Short[Size]]] = []
    kind: Text
    fallback: Flag = False


class UseModel(_Model):
    kind: Text
    axes: Short[Text]
    wire_bytes: Number
    direction: Text
    count: Positive = 1


class PipelineModel(_Model):
    """By stage, but for ranks."""

    schedule: Text
    ranks: Positive
    where: Short[Size]
    layers: Short[Short[Text]]
    work: Short[Number]
    sent_bytes: Short[Number]
    bubble: Number
    forward_s: Short[Number] = []
    backward_s: Short[Number] = []
    hop_s: Short[Number] = []
    weight_s: Short[Number] = []
    actions: Short[str] = []
    peak_bytes: Short[Number] = []


class PlanModel(_Model):
    """The canonical part. Rows: params (name, of param_table), ops (name, of op_table, of target_table, of module_table; None: it has
    none), collectives (tensor, of collective_table), repeated (op, ranks that repeat it), kept (tensor, of kept_table).

    What has a default is left empty by hand layouts, and 1 is a collective's count where nothing is folded. Plans of older files have no profile."""

    mesh: Annotated[Short[tuple[Text, Positive]], Field(min_length=1)]
    layout: Text
    data_axes: Short[Text]
    reshard_after_forward: Flag
    param_table: Table[ParamModel]
    params: Rows[tuple[Text, Size]]
    op_table: Table[OpModel]
    target_table: Table[Text]
    module_table: Table[Text] = []
    ops: Rows[tuple[Text, Size | None, Size | None, Size | None]]
    inputs: Table[PlacementModel]
    outputs: Table[PlacementModel]
    collective_table: Table[UseModel]
    collectives: Rows[tuple[Text, Size]]
    repeated: Rows[tuple[Text, Number]]
    kept_table: Table[PlacementModel] = []
    kept: Rows[tuple[Text, Size]] = []
    fingerprint: Text = ""
    order: Rows[Text] = []
    segments: Short[tuple[Text, Table[Positive]]] = []
    together: Positive = 1
    micro_batches: Positive = 1
    imbalance: AtLeastOne = 1.0
    pipeline: PipelineModel | None = None
    cluster: Text = ""
    activations: dict[Policy, Rows[Text]] = {}
    recompute: Rows[Text] = []
    unmet: Table[Text] = []
    predicted: Annotated[dict[Text, Number], Field(max_length=1000)] = {}
    solver: Annotated[dict[Text, Value], Field(max_length=1000)] = {}
    profile: ProfileModel | None = None


class FileModel(_Model):
    schema_version: Literal[1]
    plan: PlanModel
    timing: Annotated[dict[Text, Value], Field(max_length=1000)] = {}


def dumps(plan: Decisions) -> str:
    """The whole file as text; `canonical(plan)` is part of it, letter by letter. PlanError if the plan could not be read back."""
    file = _file(plan)
    _decode(file, Decisions)
    return _json(file.model_dump(mode="python"))


def canonical(plan: Decisions) -> str:
    """The part that is the same for the same plan, however long planning took."""
    return _json(_file(plan).plan.model_dump(mode="python"))


def loads(text: str | bytes, kind: type[P], where: str = "") -> P:
    """The plan that `text` describes, checked, as a `kind`; else PlanError. where: what to call the text's source, such as its path."""
    try:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        raw = parse(data)
    except JsonError as e:
        raise PlanError(f"The plan cannot be read: {e}", where=where, fix=_FIX) from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise PlanError("This is not a plan: it has no schema_version", where=where, fix=_FIX)
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        what = f"The plan has schema version {short(repr(version))}; this autopar reads version {SCHEMA_VERSION}"
        raise PlanError(what, where=where, fix="make the plan again with this autopar, or read it with the one that made it")
    try:
        return _decode(_validate(raw), kind)
    except PlanError as e:
        raise PlanError(e.what, where=": ".join(x for x in (where, e.where) if x), fix=e.fix) from None


def save(plan: Decisions, path: str | os.PathLike[str]) -> None:
    """Writes the plan's file. It appears whole or not at all: a job that reads it meanwhile sees the old one."""
    text = dumps(plan) + "\n"
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with beside.open("w", encoding="utf-8", newline="\n") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as e:
        raise PlanError(
            f"The plan cannot be written: {_reason(e)}", where=short(str(path)), fix="give a path that can be written"
        ) from None


def load(path: str | os.PathLike[str], kind: type[P]) -> P:
    """The plan in a file that `save` wrote, as a `kind`; else PlanError."""
    where = short(os.fspath(path), 200)
    try:
        data = read_bytes(Path(path))
    except JsonError as e:
        raise PlanError(f"The plan cannot be read: {e}", where=where, fix=_FIX) from None
    except (OSError, ValueError) as e:
        raise PlanError(f"The plan cannot be read: {_reason(e)}", where=where, fix="give the path of a plan file") from None
    return loads(data, kind, where)


_FIX = "copy the file again or make the plan again"


def _reason(e: Exception) -> str:
    return e.strerror or type(e).__name__ if isinstance(e, OSError) else short(str(e))


def _json(x: Any) -> str:
    # model_dump keeps what was validated: str, int, float, bool, None. Floats are written by repr: shortest, and the same everywhere.
    return json.dumps(x, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _validate(raw: Any) -> FileModel:
    try:
        return FileModel.model_validate(raw)
    except ValidationError as e:
        faults = e.errors(include_url=False, include_input=False, include_context=False)
        said = "; ".join(f"{_path(f['loc'])}: {short(f['msg'])}" for f in faults[:3])
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise PlanError(f"The plan does not fit its schema: {said}{more}", fix=_FIX) from None


def _path(loc: tuple[int | str, ...]) -> str:
    text = "".join(f"[{x}]" if isinstance(x, int) else f".{short(x)}" for x in loc)
    return short(text.lstrip(".") or "the file", 200)


# ---- Plan -> model -----------------------------------------------------------------------------------------------


class _Interned(Generic[T]):
    """Distinct entries in order of first use."""

    def __init__(self) -> None:
        self.at: dict[Any, int] = {}
        self.entries: list[T] = []

    def index(self, key: Any, make: Callable[[], T]) -> int:
        if key not in self.at:
            self.at[key] = len(self.entries)
            self.entries.append(make())
        return self.at[key]


def is_timing(key: str) -> bool:
    """Whether a solver entry tells how planning went, or what became of the plan (how long it took, what was captured, which collectives were joined): it may differ for
    the same plan."""
    return key in ("seconds", "capture", "buckets") or key.endswith("_seconds")


def _file(plan: Decisions) -> FileModel:
    order = {a: i for i, a in enumerate(mesh_of(list(plan.mesh_axes.items())).names)}

    def in_mesh_order(axes: Iterable[str]) -> list[str]:
        return sorted(axes, key=lambda a: (order.get(a, len(order)), a))

    params: _Interned[dict[str, Any]] = _Interned()
    ops: _Interned[dict[str, Any]] = _Interned()
    targets: _Interned[str] = _Interned()
    modules: _Interned[str] = _Interned()
    uses: _Interned[dict[str, Any]] = _Interned()

    def op_index(c: OpChoice) -> int:
        strategy = tuple((a, *c.strategy[a]) for a in in_mesh_order(c.strategy))
        partial = tuple((a, tuple(sorted(c.partial[a]))) for a in in_mesh_order(c.partial))
        return ops.index(
            (strategy, partial, c.kind, c.fallback),
            lambda: {"strategy": strategy, "partial": partial, "kind": c.kind, "fallback": c.fallback},
        )

    def param_index(c: ParamChoice) -> int:
        return params.index(c, lambda: _param(c))

    def about(op: str) -> tuple[int | None, int | None]:
        target, module = plan.targets.get(op), plan.modules.get(op)
        return (
            None if target is None else targets.index(target, lambda: target),
            None if module is None else modules.index(module, lambda: module),
        )

    def kept_index(p: Placement) -> int:
        return kept.index(p, lambda: _placement(p))

    def use_index(c: CollectiveUse) -> int:
        bytes_ = float(c.wire_bytes)
        return uses.index(
            (c.kind, c.axes, bytes_, c.direction, c.count),
            lambda: {"kind": c.kind, "axes": c.axes, "wire_bytes": bytes_, "direction": c.direction, "count": c.count},
        )

    kept: _Interned[dict[str, Any]] = _Interned()
    policies: dict[str, list[str]] = {}
    for tensor, policy in sorted(plan.activations.items()):
        policies.setdefault(policy, []).append(tensor)
    rows: list[tuple[str, int | None, int | None, int | None]] = [(n, op_index(c), *about(n)) for n, c in plan.ops.items()]
    rows += [(n, None, *about(n)) for n in dict.fromkeys((*plan.targets, *plan.modules)) if n not in plan.ops]
    # Python's own numbers only: json would refuse numpy's integers, and write its floats by their names.
    body = {
        "mesh": list(plan.mesh_axes.items()),
        "layout": plan.layout,
        "data_axes": plan.data_axes,
        "reshard_after_forward": plan.reshard_after_forward,
        "params": [(n, param_index(c)) for n, c in plan.params.items()],
        "param_table": params.entries,
        "ops": rows,
        "op_table": ops.entries,
        "target_table": targets.entries,
        "module_table": modules.entries,
        "inputs": [_placement(p) for p in plan.inputs],
        "outputs": [_placement(p) for p in plan.outputs],
        "collectives": [(c.tensor, use_index(c)) for c in plan.collectives],
        "collective_table": uses.entries,
        "repeated": sorted((n, float(x)) for n, x in plan.repeated.items()),
        "kept": [(n, kept_index(p)) for n, p in sorted(plan.kept.items())],
        "kept_table": kept.entries,
        "fingerprint": plan.fingerprint,
        "order": plan.order,
        "segments": sorted(plan.segments.items()),
        "together": plan.together,
        "micro_batches": plan.micro_batches,
        "imbalance": float(plan.imbalance),
        "pipeline": None if plan.pipeline is None else asdict(plan.pipeline),
        "cluster": plan.cluster,
        "activations": policies,
        "recompute": sorted(plan.recompute),
        "unmet": plan.unmet,
        "predicted": {k: float(v) for k, v in plan.predicted.items()},
        "solver": {k: v for k, v in plan.solver.items() if not is_timing(k)},
        "profile": None if plan.profile is None else profile_rows(plan.profile),
    }
    timing = {k: v for k, v in plan.solver.items() if is_timing(k)}
    return _validate({"schema_version": SCHEMA_VERSION, "plan": body, "timing": timing})


def _placement(p: Placement) -> dict[str, Any]:
    return {"shape": p.shape, "splits": [(s.axis, s.dim, s.stride) for s in p.splits], "partial": p.partial}


def _param(c: ParamChoice) -> dict[str, Any]:
    return {
        "shape": c.shape, "dtype": c.dtype, "padded": c.padded,
        "storage": _placement(c.storage), "compute": _placement(c.compute), "trainable": c.trainable,
        **({"keeps_gathered": True} if c.keeps_gathered else {}),
        **({"accumulated": _placement(c.accumulated)} if c.accumulated is not None else {}),
        **({"once_a_call": True} if c.once_a_call else {}),
    }  # fmt: skip


# ---- model -> Plan -----------------------------------------------------------------------------------------------


def _decode(file: FileModel, kind: type[P]) -> P:
    m = file.plan
    mesh = mesh_of(m.mesh)
    read = _Reader(mesh, Checker(mesh))
    param_table = [read.param(c, f"param_table[{i}]") for i, c in enumerate(m.param_table)]
    op_table = [read.op(c, f"op_table[{i}]") for i, c in enumerate(m.op_table)]
    read.check.axes(m.data_axes, "data_axes")
    params = {n: _at(param_table, i, f"params {n!r}") for n, i in m.params}
    ops = {n: _at(op_table, i, f"ops {n!r}") for n, i, _, _ in m.ops if i is not None}
    targets = {n: _at(m.target_table, i, f"ops {n!r}") for n, _, i, _ in m.ops if i is not None}
    modules = {n: _at(m.module_table, i, f"ops {n!r}") for n, _, _, i in m.ops if i is not None}
    _once([n for n, _ in m.params], "params")
    names = _once([n for n, _, _, _ in m.ops], "ops")
    _once([n for n, _ in m.repeated], "repeated")
    _once([n for tensors in m.activations.values() for n in tensors], "activations")
    _once([n for n, _ in m.kept], "kept")
    _once([n for n, _ in m.segments], "segments")
    for n, _ in m.repeated:
        if n not in targets:
            raise contradiction(f"it repeats {short(n)!r}, which is no op of it", "repeated")
    for n, c in ops.items():
        if c.fallback and n not in targets:
            raise contradiction(f"{short(n)!r} has no rule and no target", "ops")
    for said, listed, known in (("recompute", m.recompute, names), ("order", m.order, ops.keys())):
        _once(listed, said)
        for n in listed:
            if n not in known:
                raise contradiction(f"it names {short(n)!r}, which is no op of it", said)
    if twice := next((k for k in file.timing if k in m.solver), None):
        raise contradiction(f"{short(twice)!r} stands in both", "solver and timing")
    uses = [read.use(c, f"collective_table[{i}]") for i, c in enumerate(m.collective_table)]
    kept_table = [read.placement(p, f"kept_table[{i}]") for i, p in enumerate(m.kept_table)]
    return kind(
        mesh_axes=dict(m.mesh),
        layout=m.layout,
        params=params,
        ops=ops,
        inputs=tuple(read.placement(p, f"inputs[{i}]") for i, p in enumerate(m.inputs)),
        outputs=tuple(read.placement(p, f"outputs[{i}]") for i, p in enumerate(m.outputs)),
        data_axes=tuple(m.data_axes),
        targets=targets,
        collectives=tuple(_at(uses, i, "collectives")(tensor) for tensor, i in m.collectives),
        repeated=dict(m.repeated),
        reshard_after_forward=m.reshard_after_forward,
        kept={n: _at(kept_table, i, f"kept {n!r}") for n, i in m.kept},
        recompute=frozenset(m.recompute),
        unmet=tuple(m.unmet),
        fingerprint=m.fingerprint,
        order=tuple(m.order),
        segments={name: tuple(counts) for name, counts in m.segments},
        together=m.together,
        micro_batches=m.micro_batches,
        imbalance=m.imbalance,
        pipeline=None if m.pipeline is None else _pipeline(m.pipeline, m.micro_batches),
        modules=modules,
        cluster=m.cluster,
        activations={tensor: policy for policy, tensors in m.activations.items() for tensor in tensors},
        predicted=dict(m.predicted),
        solver={**m.solver, **file.timing},
        profile=None if m.profile is None else profile_of(m.profile, read.check),
    )


def _pipeline(m: PipelineModel, micro_batches: int) -> PipelineChoice:
    stages = len(m.where)
    if not stages or any(len(x) != stages for x in (m.layers, m.work, m.sent_bytes)) or set(m.where) != set(range(m.ranks)):
        raise contradiction(f"{stages} stages on {m.ranks} ranks, which its lists are not of", "pipeline")
    times = m.forward_s, m.backward_s, m.hop_s, m.weight_s
    if any(times) and tuple(map(len, times)) not in ((stages, stages, m.ranks, stages), (stages, stages, m.ranks, 0)):
        raise contradiction(f"times of other stages than {stages} on {m.ranks} ranks", "pipeline")
    if m.peak_bytes and len(m.peak_bytes) != m.ranks:
        raise contradiction(f"memory of {len(m.peak_bytes)} ranks, of {m.ranks}", "pipeline")
    layers = tuple(tuple(x) for x in m.layers)
    _once([n for x in layers for n in x], "pipeline")
    seconds = {"forward_s": m.forward_s, "backward_s": m.backward_s, "hop_s": m.hop_s, "weight_s": m.weight_s}
    of = {k: tuple(v) for k, v in seconds.items()}
    made = PipelineChoice(
        m.schedule, m.ranks, tuple(m.where), layers, tuple(m.work), tuple(m.sent_bytes), m.bubble, **of, actions=tuple(m.actions),
        peak_bytes=tuple(m.peak_bytes),
    )  # fmt: skip
    if m.actions:
        try:
            lists = made.lists(micro_batches)
        except LayoutError as e:
            raise contradiction(f"actions that make no schedule: {e.what}", "pipeline") from e
        if (len(lists.ranks), lists.where, lists.micro_batches) != (m.ranks, made.where, micro_batches):
            raise contradiction(
                f"actions of other ranks, stages or micro-batches than its {m.ranks}, {stages} and {micro_batches}", "pipeline"
            )
    return made


@dataclass(frozen=True)
class _Reader:
    """Models -> the planner's types, each checked against the mesh."""

    mesh: Mesh
    check: Checker

    def placement(self, p: PlacementModel, where: str) -> Placement:
        self.check.axes([*(a for a, _, _ in p.splits), *(a for a, _ in p.partial)], where)  # `of` would merge an axis given twice
        out = Placement.of(tuple(p.shape), {a: (d, s) for a, d, s in p.splits}, dict(p.partial))
        self.check.placement(out, where)
        return out

    def param(self, c: ParamModel, where: str) -> ParamChoice:
        storage, compute = self.placement(c.storage, f"{where}.storage"), self.placement(c.compute, f"{where}.compute")
        accumulated = None if c.accumulated is None else self.placement(c.accumulated, f"{where}.accumulated")
        gathered = c.keeps_gathered, accumulated, c.once_a_call
        out = ParamChoice(tuple(c.shape), c.dtype, tuple(c.padded), storage, compute, c.trainable, *gathered)
        self.check.param(out, where)
        return out

    def op(self, c: OpModel, where: str) -> OpChoice:
        self.check.axes([*(a for a, _, _ in c.strategy), *(a for a, _ in c.partial)], where)
        strategy = {a: (letter, stride) for a, letter, stride in c.strategy}
        return OpChoice(strategy, {a: frozenset(i) for a, i in c.partial}, c.kind, c.fallback)

    def use(self, c: UseModel, where: str) -> Callable[[str], CollectiveUse]:
        self.check.use(CollectiveUse(c.kind, tuple(c.axes), c.wire_bytes, "", c.direction, c.count), where)
        return lambda tensor: CollectiveUse(c.kind, tuple(c.axes), c.wire_bytes, tensor, c.direction, c.count)


def _at(table: list[T], index: int, where: str) -> T:
    if index >= len(table):
        raise contradiction(f"entry {index} of a table of {len(table)} is asked for", short(where))
    return table[index]


def _once(names: list[str], where: str) -> frozenset[str]:
    out = frozenset(names)
    if len(out) != len(names):
        seen: set[str] = set()
        for n in names:
            if n in seen:
                raise contradiction(f"{short(n)!r} is given twice", where)
            seen.add(n)
    return out
