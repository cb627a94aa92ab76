"""A plan for people: a block for every kind of layer (which has the same choices in all of them), then what is communicated and predicted.

A layer is what a number in a module's path stands for. A block's rows are parameters (where they are stored, where they are computed with), heavy
operators (what every mesh axis splits of them), and what of a layer is kept for backward or made again there.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.cost.triton import TRITON
from autopar.graph.placement import Placement
from autopar.plan.decisions import BUCKETED
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

if TYPE_CHECKING:
    from autopar.plan.decisions import Decisions, OpChoice, ParamChoice

LAYER: re.Pattern[str] = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")  # the outermost number of a path
OUTSIDE = "outside of layers"
HEAVY = ("matmul", "attention", "conv", "embedding", "moe")
WIDTH = 150
CLONE = "~"  # between an operator and the segment that a copy of it stands for (`solver.shrink`)
STAGES = ("forward", "backward", "optimizer")
# Figures that have a place of their own in the text; any other is said behind them.
PREDICTED = {
    "step_time_s",
    "exposed_s",
    "tokens_per_s",
    "samples_per_s",
    "mfu",
    "peak_memory_bytes",
    "budget_bytes",
    "blocking_collectives",
    "expert_rows",
}
PREDICTED |= {f"{stage}_s" for stage in STAGES} | {*BUCKETED} | {"forward_alone_s", "backward_alone_s", "contended_once_s"}
# Operators of ours that stand in the place of several, and what they do.
FUSED = {"autopar.linear_log_prob_v1.default": "a linear layer under a cross-entropy, whose logits are made tile by tile"}
# What the letters of a rule are called; any other operator's are told as they are.
EXPERTS = "autopar.experts_v1"
LETTERS = {
    "aten.mm": {"m": "tokens", "k": "in", "n": "out"},
    "aten.bmm": {"b": "batch", "m": "rows", "k": "in", "n": "columns"},
    "aten.embedding": {"d0": "batch", "d1": "sequence", "v": "vocabulary", "d": "features"},
    "autopar.linear_log_prob_v1": {"t": "tokens", "v": "vocabulary"},
    EXPERTS: {"t": "tokens", "f": "features", **{f"x{i}": "experts" for i in range(16)}},
    "autopar.attention_v2": {"b": "batch", "g": "heads", "r": "query heads", "q": "queries", "s": "ring"},
}
SAID = {
    "save": "kept for backward",
    "recompute": "made again in backward",
    "offload:host": "kept in host memory",
    "offload:nvme": "kept on disk",
}


def text(plan: Decisions) -> str:
    mesh = " x ".join(f"{n}={s}" for n, s in plan.mesh_axes.items())
    lines = [f"plan: layout {plan.layout} on mesh {mesh}, {_batch(plan)}"]
    lines += _pipeline(plan)
    lines += _accumulated(plan)
    lines += _blocks(plan)
    lines += _experts(plan)
    lines += _collectives(plan)
    lines.append(f"fallbacks (ops without a rule, replicated): {plan.fallbacks or 'none'}")
    lines += [f"fused: {said}, {n} x" for target, said in FUSED.items() if (n := sum(t == target for t in plan.targets.values()))]
    if TRITON in plan.solver:
        lines += textwrap.wrap(f"Triton kernels: {plan.solver[TRITON]}", WIDTH, subsequent_indent="    ")
    if plan.unmet:
        lines.append(f"kept, though tagged to be made again: {'; '.join(plan.unmet)}")
    if plan.repeated:
        lines.append(f"heavy ops whose work some ranks repeat: {dict(Counter(plan.targets[o] for o in plan.repeated))}")
    lines += _predicted(plan)
    if "gap" in plan.solver:
        lines.append(f"solver: within {float(plan.solver['gap']):.2%} of the bound, stopped by {plan.solver.get('stopped_by', 'gap')}")
    if "loss_head" in plan.solver:
        lines.append(f"head of the loss: {plan.solver['loss_head']}")
    if "meshes" in plan.solver:
        lines += textwrap.wrap(f"meshes tried, each with a bound of its own: {plan.solver['meshes']}", WIDTH, subsequent_indent="    ")
    if "schedules" in plan.solver:
        lines += textwrap.wrap(f"schedules tried: {plan.solver['schedules']}", WIDTH, subsequent_indent="    ")
    if "pipelines" in plan.solver:
        lines += textwrap.wrap(f"pipelines: {plan.solver['pipelines']}", WIDTH, subsequent_indent="    ")
    if "micro_batches" in plan.solver:
        lines += textwrap.wrap(f"micro-batches tried: {plan.solver['micro_batches']}", WIDTH, subsequent_indent="    ")
    if "sizes" in plan.solver:
        lines.append(f"for all sizes of some inputs, none of them split over the mesh but in whole units; made for {plan.solver['sizes']}")
    if "capture" in plan.solver:
        lines.append(f"capture: {plan.solver['capture']}")
    return "\n".join(lines)


def _batch(plan: Decisions) -> str:
    """Over how many devices it is split; and why not over more, where it does not divide."""
    ways = f"{plan.data_size} {'way' if plan.data_size == 1 else 'ways'}"
    batch = next(iter(Counter(p.shape[0] for p in plan.inputs if p.shape).most_common(1)), (0, 0))[0]
    size = plan.mesh.size
    if batch > 1 and batch % size and size % batch:
        return f"{'batch' if plan.micro_batches == 1 else f'each of {plan.micro_batches} micro-batches'} of {batch} split {ways}: it does not divide over {size} devices"
    return f"{'batch' if plan.micro_batches == 1 else f'each of {plan.micro_batches} micro-batches'} split {ways}"


def _accumulated(plan: Decisions) -> Iterator[str]:
    """Of how many parameters gradients are reduced, or reduced so far, in every micro-batch."""
    trained = [c for c in plan.params.values() if c.trainable]
    for how, n in sorted(Counter(summed(c) for c in trained if c.accumulated is not None).items()):
        yield f"{how}: {n} of {len(trained)} parameters"


def _experts(plan: Decisions) -> Iterator[str]:
    """Over how many ranks routed experts are split, and what load the plan assumes of them."""
    ways = {
        math.prod(plan.mesh.axis_size(a) for a, (letter, _) in c.strategy.items() if LETTERS[EXPERTS].get(letter) == "experts")
        for op, c in plan.ops.items()
        if plan.targets.get(op, "").startswith(EXPERTS)
    } - {1}
    if ways:
        rows = plan.predicted.get("expert_rows")
        even = "" if rows is None else f", {rows:,.0f} rows a rank and layer at even load"
        fullest = "as many" if plan.imbalance == 1 else f"{plan.imbalance:g} times as many"
        yield f"routed experts: split over {' and '.join(map(str, sorted(ways)))} ranks{even}; {fullest} assumed on the fullest (imbalance {plan.imbalance:g})"


def _pipeline(plan: Decisions) -> Iterator[str]:
    """Schedule and bubble, then a line a stage: the mesh above is one stage's."""
    p = plan.pipeline
    if p is None:
        return
    stages = len(p.where)
    yield f"pipeline: {p.schedule}, {stages} stages on {p.ranks} ranks, {plan.micro_batches} micro-batches, bubble {p.bubble:.1%}"
    for s, (rank, layers, work, sent) in enumerate(zip(p.where, p.layers, p.work, p.sent_bytes, strict=True)):
        named = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        yield f"  stage {s} on rank {rank}: {named}, {work:.1%} of the work" + (f", sends {format_bytes(sent)}" if s + 1 < stages else "")
    if p.peak_bytes:
        yield from textwrap.wrap(
            f"  memory by rank: {', '.join(map(format_bytes, p.peak_bytes))}", WIDTH, initial_indent="  ", subsequent_indent="    "
        )


# ---- layers ------------------------------------------------------------------------------------------------------


def _split(path: str) -> tuple[str, int, str] | None:
    """ "model.layers.3.mlp.up" -> ("model.layers.", 3, "mlp.up"); None for what lies in no layer."""
    match = LAYER.search(path)
    return (path[: match.start()], int(match[0][:18]), path[match.end() + 1 :]) if match else None


def _blocks(plan: Decisions) -> Iterator[str]:
    layers: dict[str, dict[int, dict[str, ParamChoice]]] = defaultdict(lambda: defaultdict(dict))
    outside: dict[str, ParamChoice] = {}
    for name, c in plan.params.items():
        if at := _split(name):
            layers[at[0]][at[1]][at[2]] = c
        else:
            outside[name] = c
    blocks: list[tuple[str, str, dict[str, ParamChoice]]] = []  # title, the path it is of, rows
    for before, by_number in layers.items():
        kinds: dict[frozenset[tuple[str, str, str]], list[int]] = defaultdict(list)
        for number, params in by_number.items():
            kinds[frozenset((n, stored(c), computed(c)) for n, c in params.items())].append(number)
        if len(kinds) == len(by_number) > 1:  # no two are alike: a sequence of different modules
            outside |= {f"{before}{number}.{n}".rstrip("."): c for number, params in by_number.items() for n, c in params.items()}
            continue
        for numbers in kinds.values():
            many = f"{len(numbers)} layers" if len(numbers) > 1 else "1 layer"
            which = "*" if len(kinds) == 1 else _ranges(numbers)
            blocks.append((f"{before}{which}  ({many})", before, by_number[numbers[0]]))
    ops, policies = _ops(plan, {before for _, before, _ in blocks}), _policies(plan, {before for _, before, _ in blocks})
    blocks.insert(0, (OUTSIDE, "", outside))
    rows = [[_row(kind, rows) for kind, rows in _kinds(params, title != OUTSIDE).items()] for title, _, params in blocks]
    widths = [max((len(r[i]) for block in rows for r in block), default=0) for i in range(3)]
    seen: set[str] = set()
    for (title, before, _), block in zip(blocks, rows, strict=True):
        more = [*ops[before], *policies[before]] if before not in seen else []
        seen.add(before)
        if block or more:
            yield title
            yield from (f"  {n:<{widths[0]}}  {numel:>{widths[1]}}  {at:<{widths[2]}}  {compute}" for n, numel, at, compute in block)
            yield from (f"  {line}" for line in more)


def _kinds(params: Mapping[str, ParamChoice], star: bool) -> dict[tuple[str, str, str], list[int]]:
    """(name, with numbers starred, stored, computed with) -> elements of each."""
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for name, c in params.items():
        rows[LAYER.sub("*", name) if star else name, stored(c), computed(c)].append(math.prod(c.shape))
    return rows


def _row(kind: tuple[str, str, str], sizes: list[int]) -> tuple[str, str, str, str]:
    name, at, compute = kind
    return f"{name} ({len(sizes)} x)" if len(sizes) > 1 else name, f"{sum(sizes):,}", f"stored {at}", f"computed with {compute}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in out)


def _home(path: str, known: set[str]) -> tuple[str, int, str]:
    """Block, layer and the rest of a module's path."""
    at = _split(path)
    return at if at is not None and at[0] in known else ("", 0, path)


def _ops(plan: Decisions, known: set[str]) -> dict[str, list[str]]:
    """Heavy operators of forward, by block: those of all layers that are alike once."""
    rows: dict[str, dict[tuple[str, str, str], None]] = defaultdict(dict)
    for op, module in plan.modules.items():
        c = plan.ops.get(op)
        if c is not None and c.kind in HEAVY:
            before, _, rest = _home(module, known)
            target = plan.targets.get(op, op).rsplit(".", 1)[0]
            rows[before][LAYER.sub("*", rest), target.split(".")[-1], strategy(plan, target, c)] = None
    width = [max((len(r[i]) for block in rows.values() for r in block), default=0) for i in (0, 1)]
    return defaultdict(list, {b: [f"{n:<{width[0]}}  {t:<{width[1]}}  {s}" for n, t, s in block] for b, block in rows.items()})


def strategy(plan: Decisions, target: str, c: OpChoice) -> str:
    """What every mesh axis of the user's splits: "dp:tokens tp:out"."""
    named = LETTERS.get(target, {})
    parts = []
    for parent, size in plan.mesh_axes.items():
        if size == 1:
            continue
        axes = [a for a in plan.mesh.children(parent) if plan.mesh.axis_size(a) > 1]
        letters = [
            named.get(c.strategy[a][0], c.strategy[a][0]) if a in c.strategy else "sum" if a in c.partial else "repeated" for a in axes
        ]
        if len(set(letters)) == 1:
            parts.append(f"{parent}:{letters[0]}")
        else:
            parts += [f"{a}:{x}" for a, x in zip(axes, letters, strict=True)]
    return ", ".join(parts)


def _policies(plan: Decisions, known: set[str]) -> dict[str, list[str]]:
    """What a layer in the middle keeps for backward, and what is made again, by module; of every segment of layers with policies of their own."""
    Modules = dict[str, Counter[str]]  # by policy
    found: dict[str, dict[int, dict[int, Modules]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(Counter))))
    position = {op: i for i, op in enumerate(plan.ops)}
    made = [(tensor.split(".")[0], tensor, policy) for tensor, policy in plan.activations.items()]
    for op, _, policy in sorted(made, key=lambda m: (position.get(m[0], -1), m[1])):
        base, _, of = op.partition(CLONE)
        view = op in plan.ops and plan.ops[op].kind == "view"
        if base in plan.modules and not (view and policy == "recompute"):  # a view is made again for nothing
            before, number, rest = _home(plan.modules[base], known)
            found[before][number][int(of) if of.isdigit() else -1][policy][LAYER.sub("*", rest) or plan.targets.get(op, op)] += 1
    out: dict[str, list[str]] = defaultdict(list)
    for before, layers in found.items():
        counts = plan.segments.get(before.rstrip("."), ())
        numbers, n = sorted(layers), plan.together
        for k, number in enumerate(numbers[-2 * n :][:n]):
            of_group = f"layer {k + 1} of {n}: " if n > 1 and len(numbers) > 1 else ""
            for segment, policies in sorted(layers[number].items(), key=lambda x: (x[0] < 0, x[0])):
                mine = segment if segment >= 0 else middle_segment(counts)
                whose = f"{n * counts[mine]} of {n * sum(counts)} layers: " if len(counts) > 1 and mine < len(counts) else ""
                for policy, modules in sorted(policies.items(), reverse=True):
                    said = ", ".join(f"{m} ({x} x)" if x > 1 else m for m, x in modules.items())
                    what = SAID.get(policy, policy)
                    out[before] += textwrap.wrap(
                        f"{whose}{of_group}{what}: {said}", WIDTH, subsequent_indent="    ", break_long_words=False
                    )
    return out


def middle_segment(counts: Sequence[int]) -> int:
    """The segment that the operators of a layer in the middle stand for (`solver.shrink`): the last one, unless that is the last layer alone."""
    return len(counts) - 2 if len(counts) > 1 and counts[-1] == 1 else len(counts) - 1


# ---- the step ----------------------------------------------------------------------------------------------------


def _collectives(plan: Decisions) -> Iterator[str]:
    uses: dict[tuple[str, str, str], tuple[int, float]] = {}
    for c in plan.collectives:
        key = (c.direction, c.kind, " x ".join(merged(c.axes)))
        count, total = uses.get(key, (0, 0.0))
        uses[key] = (count + c.count, total + c.count * c.wire_bytes)
    blocking = plan.predicted.get("blocking_collectives")
    note = f", {blocking:.0f} of them block" if blocking is not None else ""
    yield f"collectives: {sum(c.count for c in plan.collectives if c.kind != 'slice')}{note}"
    for (direction, kind, names), (count, total) in sorted(uses.items()):
        yield f"  {direction:<8} {kind:<15} over {names:<12} {count:>5} x, {format_bytes(total)} sent a rank"
    # What they became where the plan was compiled, else what is expected of them.
    if said := plan.solver.get("buckets", buckets(*(plan.predicted.get(k, 0.0) for k in BUCKETED))):
        yield f"  buckets: {said}"


def buckets(members: float, made: float, saved_s: float) -> str:
    """members: collectives that are joined; made: what they become; saved_s: that this takes off the links. Nothing where there are none."""
    return f"{members:.0f} collectives in {made:.0f}, which takes {format_time(saved_s)} off the links" if members else ""


def _predicted(plan: Decisions) -> Iterator[str]:
    """What the step takes, what it is made of, and memory; of plans that know less, less."""
    p = plan.predicted
    if "step_time_s" in p:
        devices = plan.mesh.size * (1 if plan.pipeline is None else plan.pipeline.ranks)
        head = [f"step time {format_time(p['step_time_s'])}"]
        for what in ("tokens", "samples"):
            if (rate := p.get(f"{what}_per_s")) is not None:
                head.append(f"{rate:,.0f} {what}/s ({rate / devices:,.0f} a device)" if rate >= 10 * devices else f"{rate:,.4g} {what}/s")
        if "mfu" in p:
            head.append(f"MFU {p['mfu']:.1%}")
        yield f"predicted on {plan.cluster}: {', '.join(head)}"
    parts = [f"{stage} {format_time(p[f'{stage}_s'])}" for stage in STAGES if f"{stage}_s" in p]
    if "exposed_s" in p:
        share = f" ({p['exposed_s'] / p['step_time_s']:.1%} of the step)" if p.get("step_time_s") else ""
        parts.append(f"exposed communication {format_time(p['exposed_s'])}{share}")
    if parts:
        yield f"  {', '.join(parts)}"
    if "peak_memory_bytes" in p:
        yield f"  peak memory {format_bytes(p['peak_memory_bytes'])}" + (
            f" of {format_bytes(p['budget_bytes'])}" if "budget_bytes" in p else ""
        )
    if more := [said(k, v) for k, v in sorted(p.items()) if k not in PREDICTED]:
        yield f"  {', '.join(more)}"


def said(key: str, value: float) -> str:
    """step_time_s, 0.0123 -> "step time 12.30 ms"."""
    name, shown = measure(key, value)
    return f"{name} {shown}"


def measure(key: str, value: float) -> tuple[str, str]:
    """A number's name without its unit, and how it is said with one."""
    for suffix, say in (("_per_s", "{:,.0f}/s".format), ("_s", format_time), ("_bytes", format_bytes)):
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " "), say(value)
    return key.replace("_", " "), f"{value:,.6g}"


# ---- placements --------------------------------------------------------------------------------------------------


def stored(c: ParamChoice) -> str:
    return placed(c.storage) + (" padded" if c.padded != c.shape else "")


def computed(c: ParamChoice) -> str:
    return placed(c.compute) + (", gathered once a call" if c.once_a_call else ", gathered once" if c.keeps_gathered else "")


def summed(c: ParamChoice) -> str:
    """Where gradients of micro-batches are added up."""
    if c.accumulated is None:
        return "gradients reduced once in all micro-batches"
    how = "reduced" if c.accumulated == c.storage else f"reduced to {placed(c.accumulated)}"
    return f"gradients {how} in every micro-batch"


def placed(p: Placement) -> str:
    """By the user's axes: "Shard(0) dp, Shard(1) tp"."""
    if p.is_replicate:
        return "Replicate"
    by_dim: dict[int, list[str]] = {}
    for s in sorted(p.splits, key=lambda s: (s.dim, -s.stride)):
        by_dim.setdefault(s.dim, []).append(s.axis)
    return ", ".join(f"Shard({d}) {'.'.join(merged(axes))}" for d, axes in sorted(by_dim.items()))


def merged(axes: Iterable[str]) -> list[str]:
    """dp.0, dp.1 -> dp for people."""
    return list(dict.fromkeys(a.rsplit(".", 1)[0] if a.rsplit(".", 1)[-1].isdigit() else a for a in axes))
