"""Training watched: what is reported is what was measured, beside what the plan says; a traced step computes the same, and has its calls, collectives and waits."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.dist.habits.common import Words, gradients, ids, seeded
from tests.dist.launch import run
from tests.wide import cases


class Scalars:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((tag, scalar_value, global_step))


class Logs:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], *, step: int) -> None:
        self.seen.append((data, step))


def _step(model: Any, i: int) -> None:
    model(ids(i), labels=ids(i + 1))["loss"].backward()


def _watched(folder: str, layout: str | None, backend: str) -> None:
    model = autopar.compile(seeded(Words), (2,), layout=layout, backend=backend, options={"seconds": 5})
    optimizer = torch.optim.AdamW(model.parameters())
    board, run_, told = Scalars(), Logs(), []
    monitors = [autopar.monitor(model, w, every=3) for w in (board, run_, lambda n, step: told.append((n, step)))]
    for i in range(7):
        if i == 3:  # an evaluation
            time.sleep(0.5)
            for m in monitors:
                m.start()
        _step(model, i)
        optimizer.step()
        optimizer.zero_grad()
        reports = [m.step() for m in monitors]
        assert all((r is not None) == (i in (3, 6)) for r in reports), i  # the first step captured, and does not count
    report = reports[0]
    assert report is not None and report.step == 7 and 0 < report.step_s < 0.4 and report.resident and report.peak_bytes > 1e6
    predicted = model.plan.predicted
    if layout is None:
        assert report.predicted_step_s == predicted["step_time_s"] and report.predicted_peak_bytes == predicted["peak_memory_bytes"]
        assert report.mfu is not None and report.mfu == pytest.approx(predicted["mfu"] * predicted["step_time_s"] / report.step_s)
        assert "(predicted" in str(report) and "MFU" in str(report)
    else:
        assert report.predicted_step_s is None and report.mfu is None and "predicted" not in str(report)
    if dist.get_rank() == 0:
        names = {f"autopar/{n}" for n in report.numbers()}
        assert {t for t, _, _ in board.seen} == set(run_.seen[0][0]) == set(told[0][0]) == names and [s for _, s in run_.seen] == [4, 7]
    else:
        assert not (board.seen or run_.seen or told)
    for m in monitors:
        m.close()

    # Two calls of a model are one step of twice a call.
    twice = autopar.monitor(model, every=1)
    _step(model, 0)
    _step(model, 1)
    r = twice.step()
    assert r is not None and (r.predicted_step_s is None or r.predicted_step_s == 2 * predicted["step_time_s"])

    # Traced, a step computes what it computes.
    path = Path(folder) / f"{layout}-{backend}.json"
    optimizer.zero_grad()
    _step(model, 5)
    want = {n: g.full_tensor() for n, g in gradients(model).items()}
    optimizer.zero_grad()
    before = [s.lowered for s in model.compiled_steps]
    with twice.trace(path):
        _step(model, 5)
        optimizer.step()
    assert [s.lowered for s in model.compiled_steps] == before
    for n, g in gradients(model).items():
        assert torch.allclose(g.full_tensor(), want[n], rtol=1e-5, atol=1e-7), n
    nowhere = Path(folder) / "nowhere" / "x.json"
    with (
        pytest.raises(autopar.AutoparError, match="cannot be written") if dist.get_rank() == 0 else contextlib.nullcontext(),
        twice.trace(nowhere),
    ):
        _step(model, 5)
    if dist.get_rank() == 0:
        _is_the_step(json.loads(path.read_text()), model, layout is None)


def _is_the_step(document: dict[str, Any], model: Any, planned: bool) -> None:
    events = document["traceEvents"]
    measured = [e for e in events if e["pid"] == 2 and e["ph"] == "X"]
    assert any(e["pid"] == 1 for e in events) == planned
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == 2 and e["name"] == "thread_name"}
    halves = next(s for s in model.compiled_steps if s.backwards)
    graphs = (halves.base.forward, halves.base.backward)
    collectives = [
        n for gm in graphs for n in gm.graph.nodes if str(n.target).startswith("_c10d_functional.") and "wait" not in str(n.target)
    ]
    on_links = [e for e in measured if "links" in tracks[e["tid"]]]
    waits = [e for e in measured if e["cat"] == "exposed"]
    eager = halves.settings.backend == "aot_eager"
    assert len(on_links) == len(waits) and (
        len(waits) == len(collectives) if eager else len(collectives) / 2 < len(waits) <= len(collectives)
    )
    assert all(e["args"]["waited_us"] <= e["dur"] + 1e-3 and e["args"]["axes"] for e in on_links)
    assert Counter(e["name"] for e in measured)["Optimizer.step#AdamW.step"] == 1
    if eager:
        products = [e for e in measured if e["name"].startswith("aten.mm")]
        assert {e["cat"] for e in products} == {"forward", "backward"} and {"up", "down", "head"} <= {e["args"]["module"] for e in products}
    # Those of a track lie one behind the other, or within.
    for tid in (t for t, name in tracks.items() if name == "compute"):
        ends: list[float] = []
        for e in sorted((e for e in measured if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= e["ts"] + 1e-3:
                ends.pop()
            assert not ends or e["ts"] + e["dur"] <= ends[-1] + 1e-3
            ends.append(e["ts"] + e["dur"])


@pytest.mark.parametrize(
    ("layout", "backend"), cases([(None, "aot_eager"), ("fsdp", "aot_eager"), ("fsdp", "inductor")], [(None, "aot_eager")])
)
def test_watched(layout: str | None, backend: str, tmp_path: Path) -> None:
    run(_watched, 2, str(tmp_path), layout, backend, timeout=150)


def test_what_cannot_be_watched(one_process: None) -> None:
    with pytest.raises(autopar.AutoparError, match="watches a compiled model, not Words"):
        autopar.monitor(seeded(Words))
    model = autopar.compile(seeded(Words), backend="aot_eager", layout="ddp")
    with pytest.raises(autopar.AutoparError, match="has neither add_scalar nor log"):
        autopar.monitor(model, 3)
    with pytest.raises(autopar.AutoparError, match="every=0"):
        autopar.monitor(model, every=0)
    watch = autopar.monitor(model)
    with pytest.raises(autopar.AutoparError, match="has not run"), watch.trace("x.json"):
        pass
