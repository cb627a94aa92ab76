"""The search loses nothing: what it leaves out cannot be among the best, by an enumeration that knows no bounds; and its prices are `predict`'s."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli.main import app
from autopar.errors import AutoparError, LayoutError
from autopar.hardware.cluster import Cluster
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.predict import Prediction, Runtime
from autopar.predict.api import priced
from autopar.predict.memory import kept_bytes, peak_bytes
from autopar.predict.step import cost_of, halves_of, schedule_of, stages_of
from autopar.search import Progress, Ranked, Space
from autopar.search.best_first import BestFirst
from autopar.search.bounds import Bounds
from autopar.search.cache import Cache
from autopar.search.lower_bound import Pieces
from autopar.search.offload import STEPS, fractions
from autopar.search.price import Prices
from autopar.search.solutions import MicroBatches
from autopar.search.space import Family, Shape, part
from autopar.text.times import format_time
from tests.experts import build
from tests.wide import cases

SEQUENCE, BATCH = 512, 16
SIZES = (1, 2)  # micro-batches
WAYS = (1, 2)  # tp and cp
EXPERTS = 4
SPACE = Space(tp=WAYS, cp=WAYS, micro_batch=SIZES)


def inputs(sequence: int = SEQUENCE) -> dict[str, tuple[int, ...]]:
    return {"input_ids": (1, sequence), "labels": (1, sequence)}


@cache
def model(kind: str) -> nn.Module:
    with torch.device("meta"):
        if kind == "llama":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    num_hidden_layers=4, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4, vocab_size=1024,
                    use_cache=False, attn_implementation="sdpa",
                )
            ).train()  # fmt: skip
        if kind == "moe":
            return build(
                "mixtral", "grouped_mm", num_hidden_layers=2, hidden_size=256, intermediate_size=4096, vocab_size=512, num_local_experts=EXPERTS,
                num_key_value_heads=4, output_router_logits=False, attn_implementation="sdpa",
            )  # fmt: skip
        config = transformers.GPT2Config(
            n_layer=3, n_embd=256, n_head=4, vocab_size=1000, n_positions=SEQUENCE, use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train()


@cache
def micros(kind: str, runtime: str | Runtime) -> MicroBatches:
    """Captures and answers, which all tests of a model share."""
    tasks = {} if runtime == "autopar" else micros(kind, "autopar").tasks
    return MicroBatches(model(kind), inputs(), Cluster.of("h100:2x8"), Runtime.of(runtime), None, "bfloat16", Cache(), tasks=tasks)


def run(
    kind: str,
    cluster: Cluster,
    budget_bytes: float = math.inf,
    space: Space = SPACE,
    top_k: int = 1,
    runtime: str | Runtime = "autopar",
    batch: int = BATCH,
) -> tuple[list[Ranked], BestFirst]:
    bounds = Bounds(space, cluster, Runtime.of(runtime), "adamw", budget_bytes)
    prices = Prices(bounds, type(model(kind)).__name__, batch, SEQUENCE, "bfloat16")
    of = BestFirst(space, bounds, prices, micros(kind, runtime), top_k, lambda p: None)
    return of.run(), of


def pieces(
    kind: str, size: int, tp: int, cp: int, runtime: str | Runtime = "autopar", ep: int = 1, expert_tp: int | None = None
) -> Pieces | None:
    return micros(kind, runtime).of(Layout(tp=tp, cp=cp, ep=ep, expert_tp=expert_tp, micro_batch=size))


@cache
def everything(kind: str, devices: str, runtime: str | Runtime = "autopar") -> list[tuple[Prediction, Layout]]:
    """Every layout of the space, each by itself, without offload."""
    cluster, how, depth = Cluster.of(devices), Runtime.of(runtime), {"llama": 4, "gpt2": 3, "moe": 2}[kind]
    node = cluster.devices_per_node
    out = []
    for size, tp, *others in itertools.product(SIZES, WAYS, *(((1,), (1, 2, 4), (None, 1)) if kind == "moe" else (WAYS, (1,), (None,)))):
        cp, ep, expert_tp = others
        if tp * cp == 1 and expert_tp:
            continue  # the same
        try:
            found = pieces(kind, size, tp, cp, runtime, ep, expert_tp)
        except LayoutError:  # more than two roles
            continue
        for pp, dp in itertools.product(range(1, cluster.size + 1), repeat=2):
            n = tp * cp * pp * dp
            if found is None or n > cluster.size or (n > node and n % node) or (cluster.size % pp and depth % pp):
                continue
            for v, recompute, zero in itertools.product(range(1, depth + 3), ("none", "selective", "balanced", "full"), range(4)):
                if v > 1 and (pp == 1 or all((depth + short) % (pp * v) for short in range(3))):
                    continue
                if (zero and dp * cp == 1) or (zero == 3 and pp > 1):
                    continue
                if recompute == "selective" and not how.unfused_passes:
                    continue
                layout = Layout(
                    tp=tp, cp=cp, pp=pp, dp=dp, virtual=v, micro_batch=size, recompute=recompute, zero=zero, ep=ep, expert_tp=expert_tp
                )
                with contextlib.suppress(LayoutError):  # sizes do not divide
                    out.append((priced(found, "", part(cluster, n), layout, how, BATCH, SEQUENCE, "bfloat16", "adamw"), layout))
    return out


def enumerated(kind: str, devices: str, budget_bytes: float, top_k: int, runtime: str | Runtime = "autopar") -> list[float]:
    """The fastest that fits of all that differ in more than ZeRO's level."""
    best: dict[Layout, float] = {}
    for done, layout in everything(kind, devices, runtime):
        key = replace(layout, zero=0)
        if done.peak_bytes <= budget_bytes and done.step_time_s < best.get(key, math.inf):
            best[key] = done.step_time_s
    return sorted(best.values())[:top_k]


BUDGETS = (math.inf, 1.9e9, 1.62e9)


@pytest.mark.parametrize("kind", cases(["llama", "gpt2"], ["llama"]))
@pytest.mark.parametrize("devices", cases(["h100:4", "h100:8", "h100:2x8", "h100:3x4"], ["h100:8", "h100:3x4"]))
def test_equal_to_enumeration(kind: str, devices: str) -> None:
    """On several memories; and something is pruned."""
    peaks = sorted(done.peak_bytes for done, _ in everything(kind, devices))
    for budget_bytes, top_k in itertools.product((math.inf, peaks[len(peaks) // 10], peaks[3]), (1, 3)):
        found, of = run(kind, Cluster.of(devices), budget_bytes, replace(SPACE, offload=False), top_k)
        assert [r.prediction.step_time_s for r in found] == enumerated(kind, devices, budget_bytes, top_k)
        assert found and all(r.prediction.peak_bytes <= budget_bytes for r in found)
        assert of.priced + of.pruned == of.total > of.priced


def test_equal_to_enumeration_with_routed_experts() -> None:
    """Where data parallelism takes long, ranks share experts; with too little memory for all of them, too."""
    space = replace(SPACE, cp=(1,))
    slow = Cluster.of("h100:2x2")
    peaks = sorted(done.peak_bytes for done, _ in everything("moe", "h100:2x2"))
    for budget_bytes, top_k in ((math.inf, 3), (peaks[len(peaks) // 10], 2), (peaks[3], 1)):
        found, of = run("moe", slow, budget_bytes, replace(space, offload=False), top_k)
        assert [r.prediction.step_time_s for r in found] == enumerated("moe", "h100:2x2", budget_bytes, top_k)
        assert of.priced + of.pruned == of.total > of.priced
    replicas = replace(space, tp=(1,), pp=(1,), idle=False)
    best, without = (run("moe", slow, space=replace(replicas, ep=ep))[0][0] for ep in (None, (1,)))
    assert best.layout.ep > 1 and best.prediction.step_time_s < without.prediction.step_time_s and without.layout.ep == 1
    assert "ep" in best.compared(without).differs
    best = run("moe", slow, space=replace(space, ep=(2, 4), idle=False))[0][0]
    # Sizes that were not captured are told by others; `predict` captures what it is asked for.
    assert autopar.predict(model("moe"), inputs(), best.cluster, best.layout, global_batch=BATCH).step_time_s == best.prediction.step_time_s
    tensor = replace(space, tp=(2,), pp=(1,), ep=(2,), idle=False)
    folded, plain = (run("moe", slow, space=replace(tensor, expert_tp=(n,)))[0][0] for n in (1, None))
    assert (folded.layout.expert_tp, plain.layout.expert_tp) == (1, None) and "expert-tp 1" in str(folded.layout)
    assert run("moe", slow, space=tensor)[0][0].prediction.step_time_s == min(x.prediction.step_time_s for x in (folded, plain))
    with pytest.raises(LayoutError, match="expert_tp is \\(1,\\), and there are no routed experts"):
        run("llama", slow, space=replace(SPACE, expert_tp=(1,)))
    with pytest.raises(LayoutError, match="4 experts are not shared so"):
        run("moe", slow, space=replace(SPACE, ep=(3,)))
    with pytest.raises(LayoutError, match="no routed experts to be shared so"):
        run("llama", slow, space=replace(SPACE, ep=(2,)))


def test_equal_to_enumeration_where_layers_are_dealt_by_products() -> None:
    """Smaller pieces may be dealt otherwise than the real ones, so they bound less."""
    runtime = replace(Runtime.of("megatron"), name="balanced", balanced=True)
    found, _ = run("llama", Cluster.of("h100:4"), space=replace(SPACE, offload=False), top_k=3, runtime=runtime)
    assert [r.prediction.step_time_s for r in found] == enumerated("llama", "h100:4", math.inf, 3, runtime)


def test_equal_to_enumeration_for_another_runtime() -> None:
    found, _ = run("llama", Cluster.of("h100:8"), space=replace(SPACE, offload=False), top_k=3, runtime="megatron")
    assert [r.prediction.step_time_s for r in found] == enumerated("llama", "h100:8", math.inf, 3, "megatron")


@pytest.mark.parametrize("kind", cases(["llama", "gpt2", "moe"], ["llama", "moe"]))
def test_bounds_hold(kind: str) -> None:
    """For every layout that there is: with its own pieces, and with those of one device."""
    devices = "h100:2x2" if kind == "moe" else "h100:2x8"
    bounds = Bounds(SPACE, Cluster.of(devices), Runtime.of("autopar"), "adamw", math.inf)
    near = 0
    for done, layout in everything(kind, devices):
        shape = Shape(
            layout.micro_batch,
            layout.tp,
            layout.cp,
            layout.pp,
            layout.dp or 1,
            done.micro_batches,
            ep=layout.ep,
            expert_tp=layout.expert_tp,
        )
        family = Family(shape, layout.virtual, layout.recompute)
        real = pieces(kind, shape.micro_batch, shape.tp, shape.cp, ep=shape.ep, expert_tp=shape.expert_tp)
        ideal = micros(kind, "autopar").lower_bound(
            shape.sequences, shape.ways, shape.ep, tuple(p.name for p in shape.together if p.routed == "experts")
        )
        lows = [bounds.family_s(real, family, True), bounds.family_s(ideal, family, False), bounds.shape_s(ideal, shape)]
        assert all(low <= done.step_time_s for low in lows), layout
        near += lows[0] > 0.9 * done.step_time_s
    assert near > 0.3 * len(everything(kind, devices))  # bounds that say something


# ---- what must hold whatever is searched -----------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_more_memory_is_never_worse(offload: bool) -> None:
    peaks = sorted(done.peak_bytes for done, _ in everything("llama", "h100:8"))
    space = replace(SPACE, offload=offload)
    times = []
    for budget_bytes in (peaks[0] * 1.001, peaks[2], peaks[len(peaks) // 20], peaks[len(peaks) // 3], peaks[-1]):
        found, _ = run("llama", Cluster.of("h100:8"), budget_bytes, space)
        times.append(found[0].prediction.step_time_s)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_multiples_of_the_devices_are_never_slower(kind: str) -> None:
    def rate(devices: str) -> float:
        return run(kind, Cluster.of(devices))[0][0].prediction.tokens_per_s

    for few, multiples in (
        ("h100:1x4", ["h100:2x4", "h100:3x4", "h100:4x4"]),
        ("h100:1x3", ["h100:2x3"]),
        ("h100:2x8", ["h100:4x8", "h100:16x8"]),
    ):
        assert all(rate(few) <= rate(more) for more in multiples)
    idle = run(kind, Cluster.of("h100:16x8"))[0][0]
    assert idle.idle and idle.cluster.size + idle.idle == idle.devices == 128
    assert idle.mfu() == pytest.approx(idle.prediction.mfu() * idle.cluster.size / 128)


@given(st.sampled_from(["none", "balanced", "full"]), st.integers(1, 4), st.integers(1, 3), st.floats(0.5, 1.0), st.floats(1e10, 1e13))
@settings(deadline=None, max_examples=60)
def test_least_offload(recompute: str, pp: int, virtual: int, share: float, host_Bps: float) -> None:
    """Against every whole per cent; what the link or the host does not carry is refused; early ranks offload at least as much as late ones but the last,
    which has the head."""
    found = pieces("llama", 1, 1, 1)
    assert found is not None
    plain = Cluster.of("h100:1x4")
    cluster = part(plain, pp).model_copy(update={"host": plain.host.model_copy(update={"bandwidth_Bps": host_Bps})})
    how, m = Runtime.of("autopar"), 12
    layout = Layout(pp=pp, dp=1, virtual=virtual if pp > 1 and pp * virtual <= 6 else 1, recompute=recompute)
    schedule = schedule_of(layout, m)
    stages = stages_of(found, schedule)[1]
    cost = cost_of(layout, 1, how, cluster)
    halves = {p: halves_of(p, layout, how, cost) for p in found}

    def peak(rank: int, alpha: float) -> Mapping[str, float]:
        return peak_bytes(rank, schedule, stages, replace(layout, offload=alpha), how, 1)

    budget_bytes = share * max(sum(peak(r, 0.0).values()) for r in range(pp))
    answer = fractions(layout, schedule, stages, halves, how, cluster, 1, budget_bytes, True)
    for rank in range(pp):
        fits = [k / STEPS for k in range(STEPS + 1) if sum(peak(rank, k / STEPS).values()) <= budget_bytes * (1 + 1e-12)]
        least = fits[0] if fits else math.inf
        offloaded = peak(rank, 0.0)["activations"] - peak(rank, least)["activations"] if fits else math.inf
        carried = all(
            cluster.host.latency_s + least * sum(n * kept_bytes(p, layout, how) for p, n in stage.items()) / cluster.host.reached_Bps
            <= sum(n * halves[p][half].compute_s for p, n in stage.items())
            for stage in stages[rank::pp] for half in (0, 1)
        )  # fmt: skip
        if answer is not None:
            assert answer[rank] == least and (not least or (carried and offloaded <= cluster.host_bytes_per_device))
        elif least and fits and carried and offloaded <= cluster.host_bytes_per_device:
            continue
        else:
            break
    else:
        assert answer is not None
        assert list(answer[:-1]) == sorted(answer[:-1], reverse=True)


def test_nothing_is_offloaded_where_that_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all that is kept is on the way, and sums differ by rounding."""
    kept = 65.3e9

    def peak(rank: int, schedule: object, stages: object, layout: Layout, *_: object) -> dict[str, float]:
        return {"parameters and optimizer": 1e13, "activations": kept if not layout.offload else math.nextafter(kept, 0.0)}

    monkeypatch.setitem(fractions.__globals__, "peak_bytes", peak)
    layout, cluster = Layout(dp=1), Cluster.of("h100:1")
    assert fractions(layout, schedule_of(layout, 1), [{}], {}, Runtime.of("autopar"), cluster, 1, 80e9, True) is None


def test_offload_is_found_where_memory_is_short() -> None:
    """Where it alone makes a layout fit, and at no time: the link is quick enough."""
    wide = Cluster.of("h100:2")
    wide = wide.model_copy(update={"host": wide.host.model_copy(update={"bandwidth_Bps": 1e15, "latency_s": 0.0})})
    space = Space(tp=(1,), cp=(1,), pp=(2,), virtual=(3,), recompute=("none",), micro_batch=(1,), zero=(0,))
    plain = run("llama", wide, space=space)[0][0].prediction
    fullest = max(plain.memory_bytes, key=lambda r: sum(r.values()))
    budget_bytes = plain.peak_bytes - 0.1 * fullest["activations"]
    found, _ = run("llama", wide, budget_bytes, space)
    assert found[0].prediction.step_time_s == plain.step_time_s and found[0].prediction.peak_bytes <= budget_bytes
    assert isinstance(found[0].layout.offload, tuple) and 0 < max(found[0].layout.offload) < 1
    assert "offload" in str(found[0].layout)
    assert run("llama", wide, budget_bytes, replace(space, offload=False))[0] == []
    slow = wide.model_copy(update={"host": wide.host.model_copy(update={"bandwidth_Bps": 1e6})})
    assert run("llama", slow, budget_bytes, space)[0] == []


def test_the_answer_is_predictions() -> None:
    """Through the public functions; from the cache the same again, also after the process was ended in the middle of a line."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, vocab_size=512, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        small = transformers.LlamaForCausalLM(config).train()
    told: list[Progress] = []
    asked: dict[str, Any] = {"global_batch": 8, "top_k": 3, "options": {"tp": [1, 2], "cp": [1], "micro_batch": [1]}}
    found = autopar.search(small, inputs(), "h100:4", **asked, progress=told.append)
    assert len(found) == len({r.layout for r in found}) == 3 and found == sorted(found, key=Ranked.order)
    for r in found:
        assert autopar.predict(small, inputs(), r.cluster, r.layout, global_batch=8) == r.prediction
    assert not found[0].differs and all(r.differs for r in found[1:])
    assert told[-1].left == 0 and told[-1].best == tuple(found) and told[-1].pruned > 0
    # With more time than it takes what is found first is the same here: layouts are real ones, by the same prices, and bounds tell the order.
    limited = autopar.search(small, inputs(), "h100:4", **asked, seconds=600)
    assert limited[0] == found[0]
    hurried = autopar.search(small, inputs(), "h100:4", **asked, seconds=1e-6)
    assert hurried and {r.layout.tp for r in hurried} == {1}, "what shares a sequence least comes first"
    assert autopar.search(small, inputs(), "h100:4", **asked, seconds=1e-6, below_s=found[0].prediction.step_time_s / 2) == []
    with pytest.raises(AutoparError, match="a search of 0 seconds"):
        autopar.search(small, inputs(), "h100:4", **asked, seconds=0)


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "cache.jsonl"
    m = micros("gpt2", "autopar")
    pieces("gpt2", 1, 2, 1)
    first = replace(m, cache=Cache(file), solved={})
    first.solve([(1, 1, 1, 1, None, None), (1, 2, 1, 1, None, None)])
    with file.open("a") as f:
        f.write('{"key": "abc", "piec')
    again = Cache(file)
    assert len(again.known) == 2 and file.read_text().endswith("}\n")

    def never(share: object) -> None:
        raise AssertionError(f"solved {share} again")

    second = replace(m, cache=again, solved={})
    second.answer = never  # type: ignore[method-assign,assignment]
    second.solve([(1, 2, 1, 1, None, None)])
    kept, solved = second.solved[1, 2, 1, 1, None, None], m.solved[1, 2, 1, 1, None, None]
    assert kept is not None and solved is not None and [vars(p) for p in kept] == [vars(p) for p in solved]
    # Another cluster, other kernels, another way to share it: not found.
    a100 = replace(second, tasks={1: replace(m.task(1), cluster=Cluster.of("a100:8"))}, _keys={})
    modules = replace(second, runtime=Runtime.of("megatron"), _keys={})
    assert second.key((1, 2, 1, 1, None, None)) in again
    assert (
        not {
            a100.key((1, 2, 1, 1, None, None)),
            modules.key((1, 2, 1, 1, None, None)),
            second.key((1, 1, 2, 1, None, None)),
            second.key((1, 2, 1, 1, None, False)),
        }
        & again.known.keys()
    )
    file.write_text('{"key": 3}\n')
    with pytest.raises(AutoparError, match="cache cannot be used"):
        Cache(file)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(LayoutError, match="no micro-batch"):
        autopar.search(model("llama"), inputs(), "h100:4", global_batch=3, options={"micro_batch": [2]})
    with pytest.raises(LayoutError, match="speed cannot be restricted"):
        autopar.search(model("llama"), inputs(), "h100:4", global_batch=4, options={"speed": [2]})
    with pytest.raises(AutoparError, match="global batch of 0"):
        autopar.search(model("llama"), inputs(), "h100:4", global_batch=0)
    with pytest.raises(InfeasibleError, match="No plan fits") as e:
        autopar.search(model("llama"), inputs(), "h100:4", global_batch=4, memory=1e8, options={"tp": [1], "cp": [1], "micro_batch": [1]})
    assert e.value.shortfall_bytes > 0


# ---- the command line ------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


def test_from_the_command_line(tmp_path: Path) -> None:
    """A config.json; what `search` finds, `predict` prices alike."""
    config, out = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps(TINY))
    about = [str(config), "--cluster", "h100:2", "--batch", "2", "--seq", "128"]
    done = CliRunner().invoke(app, ["search", *about, "--top", "2", "--cache", str(tmp_path / "c.jsonl"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert len(rows) == 2 and rows[0]["step_time_s"] <= rows[1]["step_time_s"] and rows[1]["differs"]
    lay = rows[0]["layout"]
    sizes = [
        x for n in ("tp", "cp", "pp", "virtual", "micro_batch", "zero", "recompute") for x in (f"--{n.replace('_', '-')}", str(lay[n]))
    ]
    used = about.copy()
    used[2] = rows[0]["cluster"]
    told = CliRunner().invoke(app, ["predict", *used, *sizes])
    assert told.exit_code == 0 and f"step {format_time(rows[0]['step_time_s'])}" in told.output


def test_errors_of_the_command_line(tmp_path: Path) -> None:
    about = ["gpt2", "--cluster", "h100:8", "--batch", "8", "--seq", "128"]
    for args, said, code in (
        (["predict", *about, "--tp", "3"], "does not fill 8 devices", 2),
        (["predict", *about, "--recompute", "some"], "recompute is 'some'", 2),
        (["predict", *about, "--runtime", "deepspeed"], "no runtime is called", 2),
        (["search", *about, "--cache", str(tmp_path)], "cannot be written", 2),
        (["search", "gpt-5", *about[1:]], "No model is called", 2),
    ):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == code and said in done.output, done.output


def test_ctrl_c_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = run("llama", Cluster.of("h100:4"), top_k=2)

    def interrupted(*args: object, progress: Any, **kwargs: object) -> None:
        progress(Progress("pricing", 2, 0, 5, tuple(found)))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["autopar.search"], "search", interrupted)
    done = CliRunner().invoke(app, ["search", "gpt2", "--cluster", "h100:4", "--batch", "8", "--seq", "128"])
    assert done.exit_code == 130 and "the best so far" in done.output and "micro-batch" in done.output
