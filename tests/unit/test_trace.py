"""A plan's profile is the step that was priced, taken apart: seconds of every stream, the peak of memory, every layer; and its trace keeps to the trace-event format."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli.main import app
from autopar.errors import AutoparError
from autopar.plan.checks import PlanError
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.explain import accounts
from autopar.timeline import expand as expanding
from autopar.timeline.perfetto import trace
from autopar.timeline.profile import Profile
from autopar.timeline.replay import COMPUTE
from tests.plans import made
from tests.profiled import LAYERS, VARIANTS, plan, planned


def profile(name: str = "plain") -> Profile:
    found = plan(name).profile
    assert found is not None
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_take_what_was_priced(name: str) -> None:
    """By stage and stream; what blocks is paid on compute too, what runs beside it by the cluster's contention."""
    done, p = planned(name)[0], profile(name)
    mine: dict[tuple[str, str], float] = defaultdict(float)
    for c in p.calls:
        what, stage = p.whats[c.what], p.regions[c.at.region].stage
        seconds = c.times * c.seconds
        mine[stage, what.stream] += seconds
        if what.axes and (share := 1.0 if c.wait is None else p.contention):
            mine[stage, COMPUTE] += share * seconds
    solution = done.solution
    assert dict(mine) == pytest.approx(accounts(done.found.problem, solution.decision), rel=1e-9)
    stages = [max(t for (stage, _), t in mine.items() if stage == s) for s in ("forward", "backward", "optimizer")]
    assert sum(stages) == pytest.approx(plan(name).predicted["step_time_s"], rel=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_memory_is_fullest_at_the_predicted_peak(name: str) -> None:
    t = plan(name).timeline()
    assert t.peak is not None and t.peak.total == pytest.approx(plan(name).predicted["peak_memory_bytes"], abs=len(t.peak.nbytes))
    assert all(n >= 0 for m in t.moments for n in m.nbytes.values())


def test_variants_show_what_they_are_for() -> None:
    """Else what the other tests hold of them would be little."""
    assert any(profile("little memory").whats[c.what].recompute for c in profile("little memory").calls)
    assert plan("offload").offload and {w.stream for w in profile("offload").whats} >= {"d2h", "h2d"}
    assert any(e.slowdown for e in plan("contended, two micro-batches").timeline().events)


@pytest.mark.parametrize("name", VARIANTS)
def test_streams_do_one_thing_at_a_time(name: str) -> None:
    t = plan(name).timeline()
    for stream in {e.what.stream for e in t.events}:
        mine = [e for e in t.events if (COMPUTE if e.slowdown else e.what.stream) == stream]
        assert all(a.end_s <= b.start_s + 1e-15 for a, b in itertools.pairwise(mine)), stream
    assert t.seconds == pytest.approx(max(e.end_s for e in t.events))
    idle = t.seconds - sum(e.seconds for e in t.events if e.what.stream == COMPUTE or e.slowdown)
    assert t.exposed_s == pytest.approx(idle) and sum(e.exposed_s for e in t.events) <= t.exposed_s * (1 + 1e-9)


def test_every_layer_runs() -> None:
    """Forward from the first to the last and backward from the last to the first, all with the same products."""
    events = [e for e in plan().timeline().events if e.what.name == "mm" and e.copy >= 0 and not e.what.recompute]
    for stage, copies in (("forward", range(LAYERS)), ("backward", reversed(range(LAYERS)))):
        mine = [e for e in events if e.stage == stage]
        assert [k for k, _ in itertools.groupby(mine, key=lambda e: e.copy)] == list(copies)
        calls = [[(e.what.module, e.seconds) for e in group] for _, group in itertools.groupby(mine, key=lambda e: e.copy)]
        assert {len(x) for x in calls} == {7 if stage == "forward" else 14}
        assert [m for m, _ in calls[1]] == [m for m, _ in calls[2]]
    assert {e.layer for e in events} == {f"model.layers.{k}" for k in range(LAYERS)}


def test_every_layer_has_its_collectives() -> None:
    """As many of each, also where the first layer's gathers are issued before it; a gather ends before the products of its layer do."""
    events = plan().timeline().events
    for serves, stage in (("parameter", "forward"), ("parameter", "backward"), ("gradient", "backward")):
        mine = [e for e in events if e.what.serves == serves and e.stage == stage and e.copy >= 0]
        count = [sum(e.copy == k for e in mine) for k in range(LAYERS)]
        assert len(set(count)) == 1, (serves, stage, count)
        # What stays from forward is not gathered again.
        kept = plan().gathered_once
        again = (serves, stage) == ("parameter", "backward") and kept >= {n for n in plan().params if ".layers." in n}
        assert (count[0] == 0) if again else (count[0] > 0), (serves, stage, count)
    for k in range(LAYERS):
        layer = [e for e in events if e.copy == k and e.stage == "forward"]
        read = max(e.end_s for e in layer if e.what.stream == COMPUTE)
        assert all(e.end_s < read for e in layer if e.what.serves == "parameter")


# ---- the format ----------------------------------------------------------------------------------------------------


def check_trace(document: Any) -> None:
    """What https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU asks of the JSON object format."""
    assert isinstance(document["traceEvents"], list) and document["displayTimeUnit"] in ("ms", "ns")
    named, used = set(), set()
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in document["traceEvents"]:
        assert isinstance(e["name"], str) and e["name"] and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name", "thread_sort_index"), e
            if e["name"] == "thread_name":
                assert isinstance(e["args"]["name"], str)
                named.add((e["pid"], e["tid"]))
        elif e["ph"] == "X":
            assert isinstance(e["cat"], str) and e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["args"], dict)
            tracks[e["pid"], e["tid"]].append((e["ts"], e["dur"]))
            used.add((e["pid"], e["tid"]))
        elif e["ph"] == "C":
            assert e["ts"] >= 0 and e["args"] and all(isinstance(x, (int, float)) for x in e["args"].values())
        else:
            raise AssertionError(f"an event of no phase that is written: {e}")
    assert used and used <= named
    for spans in tracks.values():
        # Microseconds with three digits: compared as nanoseconds, which are whole.
        whole = sorted((round(ts * 1e3), round(ts * 1e3) + round(dur * 1e3)) for ts, dur in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(whole))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_trace_keeps_to_the_format(name: str, tmp_path: Path) -> None:
    plan(name).to_perfetto(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
    check_trace(document)
    tracks = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "dp (links in a node)"} <= tracks
    assert name != "offload" or {"device to host", "host to device"} <= tracks
    calls = [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] != "exposed"]
    assert all({"op", "module", "layer", "region", "bytes", "recompute"} <= set(e["args"]) for e in calls)
    assert name != "little memory" or any(e["args"]["recompute"] for e in calls)
    step_us = max(e["ts"] + e["dur"] for e in calls)
    assert step_us == pytest.approx(plan(name).timeline().seconds * 1e6, abs=2e-3)
    peak = max(sum(e["args"].values()) for e in document["traceEvents"] if e["name"] == "memory")
    assert peak == pytest.approx(plan(name).predicted["peak_memory_bytes"], abs=10)


def test_the_check_finds_what_is_wrong() -> None:
    good = trace(plan().timeline(), "a plan")
    for change in ({"ph": "Q"}, {"dur": -1.0}, {"dur": 1e9}, {"tid": 99}):
        events = [dict(e) for e in good["traceEvents"]]
        next(e for e in events if e["ph"] == "X" and e["ts"] == 0).update(change)
        with pytest.raises(AssertionError):
            check_trace({**good, "traceEvents": events})


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_has_the_profile() -> None:
    back = Plan.loads(dumps(plan("little memory")))
    assert back.profile == plan("little memory").profile and back == plan("little memory")


def older(p: Plan) -> str:
    raw = json.loads(dumps(p))
    del raw["plan"]["profile"]
    return json.dumps(raw)


def test_files_from_before_load_and_say_what_they_lack(tmp_path: Path) -> None:
    old = Plan.loads(older(plan()))
    assert old == dataclasses.replace(plan(), profile=None)
    for p in (old, made("tiny", {"dp": 2}, "fsdp")):
        with pytest.raises(AutoparError, match="does not say what its step does in time"):
            p.to_perfetto(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("calls", 0, 0), 10_000),
        (("calls", 0, 5, 0), 10_000),
        (("calls", 0, 5, 3), 77),
        (("calls", 0, 1), -1.0),
        (("whats", 0, 2), "warp"),
        (("samples", 0, 3), [[99, 1]]),
        (("copies",), []),
        (("kinds", 0), "other"),
    ],
)
def test_damaged_profiles_are_refused(where: tuple[Any, ...], value: Any) -> None:
    raw = json.loads(dumps(plan()))
    at = raw["plan"]["profile"]
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    with pytest.raises(PlanError):
        Plan.loads(json.dumps(raw))


def test_a_file_of_endless_calls_takes_no_endless_time() -> None:
    p = profile()
    many = dataclasses.replace(p.calls[0], times=expanding.MAX_EVENTS + 1)
    with pytest.raises(AutoparError, match="more than"):
        expanding.expand(dataclasses.replace(p, calls=(*p.calls, many)))


def test_the_command(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "t.json")])
    assert done.exit_code == 0 and str(tmp_path / "t.json") in done.stdout
    check_trace(json.loads((tmp_path / "t.json").read_text()))
    (tmp_path / "old.json").write_text(older(plan()))
    for args in (["old.json", "-o", str(tmp_path / "o.json")], ["plan.json", "-o", str(tmp_path / "no" / "t.json")], ["none.json"]):
        failed = CliRunner().invoke(app, ["trace", str(tmp_path / args[0]), *args[1:]])
        assert failed.exit_code == 2 and failed.stderr.startswith("error: ") and "fix: " in failed.stderr
