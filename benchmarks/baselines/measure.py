"""Baselines and our plans at equal measured memory, run on this machine's CPU: median step times and ratios, with intervals.

Steps are forward and backward of the halves that `lower` makes for aot_eager, call by call, on random parameters, without an optimizer. A step's memory is the
peak of live storages while it runs, each storage once. Our plan's is at most the baseline's: where a plan measures more, the planner is asked again for so much less.

All contenders take turns, in another order every round, so that what else the machine does hits all alike. A ratio is that of one round; the interval is
the one of order statistics that holds the median with at least 95%. The predicted ratio beside it is that of the prices of the cluster that was named, of
forward and backward: "cpu:1" is nobody's calibration of this machine.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.capture import Role
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.runtime.lower import lower
from benchmarks.baselines import Baseline, baselines
from benchmarks.baselines.ours import CLOSE, TRIES, Ours, too_small
from benchmarks.baselines.program import Point, Program
from tests.live import LiveBytes

Step = Callable[[], "dict[Role, torch.Tensor]"]


def measure(p: Program, settings: tuple[Any, ...], seconds: float, gap: float, repeats: int) -> dict[str, Any]:
    """Of every family the setting of the lowest peak and the fastest, each with our plan within its peak. settings: of `baselines`."""
    planner, values = Ours(p, "planned", (), seconds, gap), tensors(p)
    optimizer_s = p.price(p.base, p.parts(p.base)).stage_s["optimizer"]
    steps: dict[str, Step] = {}
    rows: list[dict[str, Any]] = []
    for b, point in chosen_of([(b, p.point(p.keeping(b.saved))) for b in baselines(p, *settings)]):
        step = lowered(p, p.keeping(b.saved), values)
        theirs_bytes = live_bytes(step, values)
        said: dict[str, Any] = {"family": b.family, "setting": b.setting, "theirs_bytes": theirs_bytes}
        try:
            plan, mine, mine_bytes, tries = within(p, planner, values, theirs_bytes)
        except AutoparError as e:
            print(f"{b.family}, {b.setting}: {e.what}", flush=True)
            rows.append({**said, "why": e.what})
            continue
        theirs, ours = f"{b.family}, {b.setting}", f"ours within {theirs_bytes}"
        steps |= {theirs: step, ours: mine}
        predicted = (p.point(plan).step_s - optimizer_s) / (point.step_s - optimizer_s)
        rows.append({**said, "ours_bytes": mine_bytes, "tries": tries, "predicted_ratio": predicted, "theirs": theirs, "ours": ours})
    times = interleaved(steps, repeats)
    for r in (r for r in rows if "ours" in r):
        theirs, ours = times[r.pop("theirs")], times[r.pop("ours")]
        r |= {"theirs_s": median(theirs), "ours_s": median(ours), "ratio": median([y / x for x, y in zip(theirs, ours, strict=True)])}
        print(
            f"{r['family']}, {r['setting']}: peaks {r['theirs_bytes'] / 1e6:.1f} MB, ours {r['ours_bytes'] / 1e6:.1f}; ours by theirs in time "
            f"{r['ratio']['median']:.3f} [{r['ratio']['low']:.3f}, {r['ratio']['high']:.3f}], predicted {r['predicted_ratio']:.3f}",
            flush=True,
        )
    shapes = [list(shape) for shape, _ in p.captured.input_shapes]
    return {"repeats": repeats, "threads": torch.get_num_threads(), "inputs": shapes, "rows": rows}


def within(p: Program, planner: Ours, values: Mapping[Role, torch.Tensor], most_bytes: int) -> tuple[Plan, Step, int, int]:
    """The best plan that measures at most so many bytes, its step, what it measures, and how often the planner was asked."""
    budget = most_bytes + p.optimizer_bytes(p.parts(p.base))[0]
    for tries in range(1, TRIES + 1):
        plan = planner.of_all_budgets(budget)
        step = lowered(p, plan, values)
        measured = live_bytes(step, values)
        if measured <= most_bytes * (1 + CLOSE):
            return plan, step, measured, tries
        if why := too_small(plan, budget):
            raise AutoparError(why)
        budget -= measured - most_bytes
    raise AutoparError(f"measures {measured - most_bytes} bytes too much after {TRIES} tries")


def live_bytes(step: Step, values: Mapping[Role, torch.Tensor]) -> int:
    """The peak of live storages in a step, what it is given included. It warms the step up, too."""
    with torch.no_grad(), LiveBytes(values.values()) as live:
        step()
    return live.peak


def chosen_of(found: Sequence[tuple[Baseline, Point]]) -> list[tuple[Baseline, Point]]:
    out: list[tuple[Baseline, Point]] = []
    for family in dict.fromkeys(b.family for b, _ in found):
        mine = [x for x in found if x[0].family == family]
        best = (min(mine, key=lambda x: (x[1].peak_bytes, x[1].step_s)), min(mine, key=lambda x: (x[1].step_s, x[1].peak_bytes)))
        out += [x for x in best if x[0].saved not in [y[0].saved for y in out]]
    return list(dict.fromkeys(out))


def tensors(p: Program) -> dict[Role, torch.Tensor]:
    """Something random for every input of the graph."""
    generator = torch.Generator().manual_seed(0)
    known = {role: n.meta["val"] for n, role in zip(p.captured.gm.graph.find_nodes(op="placeholder"), p.captured.inputs, strict=True)}
    found = {}
    for role, val in known.items():
        if role.kind == "input":
            found[role] = torch.randint(4, 1000, tuple(val.shape), generator=generator)
        elif role.kind == "tangent":
            found[role] = torch.ones(val.shape, dtype=val.dtype)
        elif val.dtype.is_floating_point:
            found[role] = torch.empty(val.shape, dtype=val.dtype).normal_(0, 0.02, generator=generator)
        else:
            found[role] = torch.zeros(val.shape, dtype=val.dtype)
    return found


def lowered(p: Program, plan: Plan, values: Mapping[Role, torch.Tensor], backend: str = "aot_eager") -> Step:
    """One step of the plan on one device, which returns its gradients."""
    parts, mode = p.parts(plan), p.captured.fake_mode
    assert parts.backward is not None
    forward = lower(parts.forward, backend=backend, fake_mode=mode)
    strides = None if forward.strides is None else forward.strides[len(parts.forward_outputs) :]
    backward = lower(parts.backward, backend=backend, fake_mode=mode, is_backward=True, saved_strides=strides)
    given = {**values, **{r: torch.tensor([1, 0]) for r in parts.forward_inputs if r.kind == "seed"}}
    given |= {r: torch.tensor(0) for r in {*parts.forward_inputs, *parts.backward_inputs} if r.kind == "coordinate"}
    outputs = len(parts.forward_outputs)

    def step() -> dict[Role, torch.Tensor]:
        results = forward.fn([given[r] for r in parts.forward_inputs])
        flat = [*results[outputs:], *(given[r] for r in parts.backward_inputs)]
        del results
        return dict(zip(parts.backward_outputs, backward.fn(flat), strict=True))

    return step


def interleaved(steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one that is not counted."""
    order, shuffle = list(steps), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(repeats + 1):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            if i:
                times[name].append(time.perf_counter() - start)
    return times


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median, the narrowest symmetric pair of order statistics that holds it with at least 95% (all there is, of fewer than six), and the values."""
    n, ordered = len(values), sorted(values)
    k = 0  # from the k-th smallest to the k-th largest, counted from 0
    while k + 1 < n - 1 - k and 1 - 2 * sum(math.comb(n, j) for j in range(k + 2)) / 2**n >= 0.95:
        k += 1
    return {"median": statistics.median(values), "low": ordered[k], "high": ordered[n - 1 - k], "all": list(values)}
