"""Steps of training on this machine: what a calibrated cluster file predicts, against what is then measured.

    python -m benchmarks.steps --processes 1,2,4 --turns 2

Three models, each under the hand layouts, run by `autopar.compile(..., layout=..., backend="aot_eager")` with fused AdamW. The prediction is the price of the
rewritten step that runs (`autopar.simulate.price`) on the cluster that `autopar calibrate`'s measurements and fit make of as many processes. Every few samples
of calibration (whose own steps, of another model, run before, between and after) a step runs, of each case in turn, so that other work on the machine is in both alike; a step's time is the median of all its runs, its
interval that of the median at 95 % (order statistics). `wrong`: pairs of layouts of a model whose intervals do not overlap and whose predictions are the other way round.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.record import write

LAYOUTS = ("ddp", "fsdp", "tp")
MODELS = ("llama", "gpt2", "bert")
SAMPLES_A_STEP = 6
WINDOW_S = 0.02
LARGEST = 1 << 24  # bytes of a collective: these models have none larger


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2,4", help="comma-separated")
    parser.add_argument("--models", default=",".join(MODELS), help="of these, comma-separated")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="comma-separated")
    parser.add_argument("--turns", type=int, default=2, help="times that everything is calibrated")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def built(model: str, a: argparse.Namespace) -> Any:
    """Without dropout, which on CPU would unfuse attention."""
    import transformers as T

    w, h, v, s = a.width, a.width // 32, a.vocabulary, a.sequence
    if model == "llama":
        sizes = {
            "vocab_size": v,
            "hidden_size": w,
            "num_attention_heads": h,
            "num_key_value_heads": h // 2,
            "intermediate_size": 8 * w // 3 // 32 * 32,
        }
        return T.LlamaForCausalLM(T.LlamaConfig(num_hidden_layers=a.layers, max_position_embeddings=s, **sizes))
    if model == "gpt2":
        none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=v, n_embd=w, n_head=h, n_layer=a.layers, n_positions=s, **none))
    none = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
    sizes = {"vocab_size": v, "hidden_size": w, "num_attention_heads": h, "intermediate_size": 4 * w, "max_position_embeddings": s}
    return T.BertForMaskedLM(T.BertConfig(num_hidden_layers=a.layers, **sizes, **none))


class Case:
    """One model under one layout, ready to step."""

    def __init__(self, model: str, layout: str, processes: int, a: argparse.Namespace) -> None:
        import torch

        import autopar

        torch.manual_seed(0)
        self.module = autopar.compile(
            built(model, a).train(),
            {"x": processes},
            layout=layout,
            backend="aot_eager",
            optimizer="adamw-fused",
            cluster=f"cpu:{processes}",
        )
        ids = torch.randint(4, a.vocabulary, (a.batch, a.sequence), generator=torch.Generator().manual_seed(1))
        self.batch = {"input_ids": ids, "labels": ids}
        self.step = self.module.prepare(**self.batch)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)

    def run(self) -> None:
        self.module(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def price(self, cluster: Any) -> dict[str, Any]:
        from autopar.hardware.calibrate.steps import price_of

        p = price_of(self.module, self.step, cluster)
        accounts: dict[str, float] = {}
        for (_, resource), t in p.accounts_s.items():
            accounts[resource] = accounts.get(resource, 0.0) + t
        waited = sum(c.seconds for c in p.charges if c.blocks)
        return {"predicted_s": p.step_time_s, "stages_s": dict(p.stage_s), "accounts_s": accounts, "blocking_s": waited}


def taken(device: Any, local: int, seconds: float, on_progress: Callable[[str], None], a: argparse.Namespace) -> Any:
    """In every process; the first one returns rows and the calibration's text."""
    import torch.distributed as dist

    from autopar.hardware.calibrate import wires
    from autopar.hardware.calibrate.measure import step, stepped, together
    from autopar.hardware.calibrate.measured import Measured
    from autopar.hardware.calibrate.result import calibration
    from autopar.hardware.calibrate.steps import references
    from autopar.hardware.calibrate.timing import Clock

    layouts = a.layouts.split(",") if local > 1 else [a.layouts.split(",")[0]]  # they are all the same on one
    names = [(m, lay) for m in a.models.split(",") for lay in layouts]
    cases = {}
    for name in names:
        on_progress(f"compiling {' '.join(name)}")
        cases[name] = Case(*name, local, a)
        cases[name].run()
    clock = Clock(device, WINDOW_S)
    whole = references(local)
    times: dict[tuple[str, str], list[float]] = {n: [] for n in names}
    samples, beside = [], []
    for turn in range(a.turns):
        on_progress(f"turn {turn + 1} of {a.turns}")
        step(whole, clock)
        following = itertools.cycle(cases.items())
        for i, sample in enumerate(calibrated(clock, local)):
            samples.append(sample)
            if i % SAMPLES_A_STEP == 0:
                name, case = next(following)
                times[name].append(clock.agreed(clock.window(case.run, 1)))
        if local > 1:
            beside += wires.contention(clock)
    step(whole, clock)
    mine = Measured(tuple(samples), "cpu", "CPU", 1e9, local * 1e9, 1, local, 1, tuple(beside), 0.0)
    mine = replace(mine, steps=stepped(whole, mine))
    every: list[Any] = [mine]
    if local > 1:
        every = [None] * local
        dist.all_gather_object(every, mine)
        if dist.get_rank():
            return None
    found = calibration(together(every))
    rows = [
        {"model": m, "layout": lay, "processes": local, **measured(times[m, lay]), **cases[m, lay].price(found.cluster)} for m, lay in names
    ]
    return rows, found.text()


def calibrated(clock: Any, local: int) -> Iterator[Any]:
    """What `autopar calibrate` measures that these steps need, sample by sample, in the same order in all processes."""
    import torch

    from autopar.hardware.calibrate import copies, wires, work

    def quiet(line: str) -> None: ...

    yield from work.samples(clock, math.inf, quiet, (torch.float32,))
    yield from copies.samples(clock, quiet)
    if local > 1:
        yield from wires.samples(clock, [s for s in wires.SIZES if s <= LARGEST], math.inf, local, quiet)


def measured(times: Sequence[float]) -> dict[str, Any]:
    """The median and its interval: between the order statistics that hold it with 95 %."""
    ordered, n = sorted(times), len(times)
    below = 0
    while below < n // 2 and 2 * sum(math.comb(n, i) for i in range(below + 1)) / 2**n <= 0.05:
        below += 1
    low = max(0, below - 1)
    return {"measured_s": statistics.median(ordered), "interval_s": [ordered[low], ordered[n - 1 - low]], "repeats": n}


def wrong(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(pairs of layouts predicted in the wrong order, pairs that can be told apart)."""
    apart = bad = 0
    for r, s in combinations(rows, 2):
        if (r["model"], r["processes"]) == (s["model"], s["processes"]):
            first, second = sorted((r, s), key=lambda x: x["measured_s"])
            if first["interval_s"][1] < second["interval_s"][0]:
                apart += 1
                bad += first["predicted_s"] > second["predicted_s"]
    return bad, apart


def main() -> None:
    a = parse()
    from autopar.hardware.calibrate.world import spawned

    os.environ["OMP_NUM_THREADS"] = "1"
    start, rows, texts, load = time.monotonic(), [], {}, []
    for n in map(int, a.processes.split(",")):
        load.append(os.getloadavg()[0])
        on_progress = functools.partial(_tell, start, n)
        (got, text), *_ = spawned(functools.partial(taken, a=a), n, 3600.0, on_progress)
        texts[n] = text
        for r in got:
            r["error"] = r["predicted_s"] / r["measured_s"] - 1
            low, high = r["interval_s"]
            print(
                f"{r['model']:<7}{r['layout']:<6}{n:>2} processes{1e3 * r['measured_s']:>9.1f} ms [{1e3 * low:.1f}, {1e3 * high:.1f}]"
                f"{1e3 * r['predicted_s']:>9.1f} predicted {100 * r['error']:>+6.1f} %   "
                + ", ".join(
                    f"{k} {1e3 * v:.0f}" for k, v in {**r["stages_s"], **r["accounts_s"], "blocking": r["blocking_s"]}.items() if v
                ),
                flush=True,
            )
        rows += got
        _report(a, rows, texts, load)


def _report(a: argparse.Namespace, rows: Sequence[dict[str, Any]], texts: dict[int, str], load: Sequence[float]) -> None:
    """Of what there is: a result is kept after every number of processes."""
    errors = [abs(r["error"]) for r in rows]
    bad, apart = wrong(rows)
    summary = {
        "cases": len(rows), "mean_error": statistics.mean(errors), "median_error": statistics.median(errors), "max_error": max(errors),
        "within_15_percent": sum(e <= 0.15 for e in errors), "wrong_order": bad, "pairs_apart": apart, "load_average": list(load),
        "mean_error_by_processes": {n: statistics.mean(abs(r["error"]) for r in rows if r["processes"] == n) for n in texts},
    }  # fmt: skip
    print(summary)
    write(a.out, "python -m benchmarks.steps", {"summary": summary, "cases": list(rows), "calibrations": texts})


def _tell(start: float, n: int, line: str) -> None:
    print(f"{time.monotonic() - start:6.1f} s  {n} processes: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
