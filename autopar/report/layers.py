"""What each kind of layer splits, and what of it is kept for backward, made again or moved to the host: a row for every module, in the order of forward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from autopar.plan.text import CLONE, HEAVY, LAYER, middle_segment, strategy
from autopar.report.facts import Subject
from autopar.report.html import Markup, join, path, table, tag
from autopar.report.seconds import NOTHING_S
from autopar.text.times import format_time
from autopar.timeline.replay import COMPUTE

Segment = tuple[str, int]  # a stack and which of its segments
POLICIES = {"save": "kept", "recompute": "made again", "offload:host": "host", "offload:nvme": "disk"}


def layers(s: Subject) -> Markup:
    """Equal layers stand in one row; of layers with policies of their own, each policy says of how many."""
    plan = s.plan
    split: dict[str, dict[str, None]] = defaultdict(dict)
    policies: dict[str, dict[Segment, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    order: dict[str, None] = {}
    for op, module in plan.modules.items():
        order.setdefault(LAYER.sub("*", module))
        c = plan.ops.get(op)
        if c is not None and c.kind in HEAVY:
            target = plan.targets.get(op, op).rsplit(".", 1)[0]
            split[LAYER.sub("*", module)][f"{target.split('.')[-1]}: {strategy(plan, target, c) or 'whole'}"] = None
    ends = _ends(s)
    for tensor, policy in plan.activations.items():
        op, _, of = tensor.split(".")[0].partition(CLONE)
        made_in = plan.modules.get(op)
        if made_in is None or (plan.ops.get(op) is not None and plan.ops[op].kind == "view" and policy == "recompute"):
            continue
        segment = _segment(s, made_in, of, ends)
        if segment is not None:
            policies[LAYER.sub("*", made_in)][segment][policy] += 1
    spent = _seconds(s)
    rows: list[list[object]] = []
    for module in order:
        if module in split or module in policies or sum(spent.get(module, (0.0, 0.0))) > 0.002 * s.timeline.seconds:
            forward, backward = spent.get(module, (0.0, 0.0))
            kept = join(_policies(s, policies[module])) if module in policies else ""
            rows.append([
                path(module or "(no module)"), join((tag("span", x, class_="place") for x in split.get(module, ())), " "), kept,
                format_time(forward) if forward > NOTHING_S else "", format_time(backward) if backward > NOTHING_S else "",
            ])  # fmt: skip
    return table(["module", "what each mesh axis splits", "results for backward", "forward", "backward"], rows, (3, 4))


def _policies(s: Subject, by_segment: dict[Segment, Counter[str]]) -> Iterator[Markup]:
    """Segments with the same policies are told together."""
    alike: dict[tuple[tuple[str, int], ...], list[Segment]] = defaultdict(list)
    for segment, found in sorted(by_segment.items()):
        alike[tuple(sorted(found.items(), reverse=True))].append(segment)
    for policies, segments in alike.items():
        counts, n = s.plan.segments.get(segments[0][0], ()), s.plan.together
        said = [
            tag("span", f"{POLICIES.get(f, f)}{f' {times} ×' if times > 1 else ''}", class_=f"policy f-{f.split(':')[0]}")
            for f, times in policies
        ]
        if len(counts) > 1 and len(segments) < len(counts):
            said.insert(0, tag("span", f"{n * sum(counts[i] for _, i in segments)} of {n * sum(counts)} layers:", class_="dim"))
        yield tag("div", join(said, " "))


def _ends(s: Subject) -> dict[str, list[str]]:
    """Starred path -> the modules that it stands for, in the order of the layers."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for module in s.plan.modules.values():
        found[LAYER.sub("*", module)][module] = None
    return {starred: list(paths) for starred, paths in found.items()}


def _segment(s: Subject, module: str, of: str, ends: dict[str, list[str]]) -> Segment | None:
    """Of which segment of which stack `module` tells: copies in the middle of theirs, the first and the last layer only where they are one by themselves."""
    match, alike = LAYER.search(module), ends[LAYER.sub("*", module)]
    stack = module[: match.start()].rstrip(".") if match else ""
    counts = s.plan.segments.get(stack, ())
    if of.isdigit():
        return (stack, int(of)) if int(of) < len(counts) else None
    if len(alike) < 2 or module == alike[-2]:
        return stack, middle_segment(counts) if len(counts) > 1 else 0
    if len(counts) > 1 and module == alike[-1] and counts[-1] == 1:
        return stack, len(counts) - 1
    if len(counts) > 1 and module == alike[0] and counts[0] == 1:
        return stack, 0
    return None


def _seconds(s: Subject) -> dict[str, tuple[float, float]]:
    """Module, starred -> seconds of compute in forward and in backward, of all layers together."""
    out: dict[str, tuple[float, float]] = {}
    for e in s.timeline.events:
        if e.what.stream == COMPUTE and not e.slowdown:
            module = LAYER.sub("*", e.what.module)
            forward, backward = out.get(module, (0.0, 0.0))
            out[module] = (forward + e.seconds, backward) if e.stage == "forward" else (forward, backward + e.seconds)
    return out
