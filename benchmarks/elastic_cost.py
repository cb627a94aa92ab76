"""What copies cost where nobody is lost, over a slow link: steps with a copy after each, beside those of the same model without `elastic=`, and what is kept in host memory.

    python -m benchmarks.elastic_cost --out benchmarks/results/elastic_cost.json
    python -m benchmarks.elastic_cost --link 1000,50 --copies 1000,50 --batch 32

Over a slow link (`benchmarks/slow_link`: microseconds, MB a second) waiting takes no core, so that what travels beside a step hides as it does behind a network card. Copies go over a link of their own
(`--copies`: from host memory, as over a host's network), or over the one that the step's collectives take (`--copies shared`). Both cases are in the same processes and take turns, some steps
each, of which the first is not counted: a copy of the last turn may still travel in it. A ratio is of the medians of two turns that follow each other, told as the median of all with an order-statistics
interval of 95 %.

A copy is predicted to hide where its bytes take the link less long than a step takes, with what the step's collectives take of it where it is theirs. Predicted in host memory: parameters and two moments
of this rank in float32, in two versions, beside a partner's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.baselines.measure import median
from benchmarks.record import write

TURN = 4  # steps of one case, of which the first is not counted
LATE = 0.02  # of what the links were busy: more, and the run tells nothing


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--link", default="1000,50", help="microseconds and MB a second")
    p.add_argument("--copies", default="1000,50", help="the same, of a link that copies have to themselves; or shared")
    p.add_argument("--layout", default="fsdp")
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=2048)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--sequence", type=int, default=128)
    p.add_argument("--turns", type=int, default=12)
    p.add_argument("--backend", default="inductor")
    p.add_argument("--out", type=Path)
    p.add_argument("--worker", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        work(a, Path(a.worker))
        return
    from autopar.elastic.supervisor import Supervisor, started
    from benchmarks import slow_link

    slow_link.build()
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []
        command = ["-m", "benchmarks.elastic_cost", *sys.argv[1:], "--worker", folder]
        if Supervisor(started(command), a.processes, a.processes, said.append).run(1500.0):
            sys.exit("\n".join(said))
        ranks = [json.loads(f.read_text()) for f in sorted(Path(folder).iterdir())]
    turns = [[max(of) for of in zip(*(r[case] for r in ranks), strict=True)] for case in ("with", "without")]
    ratio = median([x / y for x, y in zip(*turns, strict=True)])
    step_s = {case: statistics.median(t) for case, t in zip(("with", "without"), turns, strict=True)}
    late, busy = (sum(r[k] for r in ranks) for k in ("late_s", "busy_s"))
    copy_bytes, step_busy_s = max(r["copy_bytes"] for r in ranks), statistics.median(r["step_busy_s"] for r in ranks)
    rate = float((a.link if a.copies == "shared" else a.copies).split(",")[1]) * 1e6
    needs_s = copy_bytes / rate + (step_busy_s if a.copies == "shared" else 0.0)
    held, predicted = max(r["held_bytes"] for r in ranks), max(r["predicted_bytes"] for r in ranks)
    print(
        f"step {1e3 * step_s['with']:.0f} ms with copies after each, {1e3 * step_s['without']:.0f} without elastic=: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
    )
    print(
        f"a copy is {copy_bytes / 1e6:.1f} MB a rank; the link takes {needs_s:.2f} s for it{' beside the step' if a.copies == 'shared' else ''}: hides: {needs_s < step_s['without']}"
    )
    print(
        f"kept in host memory: {held / 1e6:.2f} MB a rank, predicted {predicted / 1e6:.2f}; late {late:.2f} s of {busy:.2f} s that links were busy"
    )
    if late > LATE * busy:
        print("the link is too fast for this machine now: nothing is written")
        return
    what = {
        k: getattr(a, k)
        for k in ("processes", "link", "copies", "layout", "width", "layers", "vocabulary", "batch", "sequence", "turns", "backend")
    }
    result = {
        **what, "ratio": ratio, "step_s": step_s, "copy_bytes": copy_bytes, "link_needs_s": needs_s, "hides": needs_s < step_s["without"], "held_bytes": held, "predicted_bytes": predicted,
        "late_s": late, "busy_s": busy,
    }  # fmt: skip
    write(a.out, "python -m benchmarks.elastic_cost", result)


# ---- a worker ----------------------------------------------------------------------------------------------------


def work(a: argparse.Namespace, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    import autopar
    from benchmarks import slow_link
    from benchmarks.overlap import built

    torch.set_num_threads(1)
    dist.init_process_group("slow")
    configured(a.link, slow_link.LINK)

    def compiled(elastic: Any) -> tuple[Any, Any]:
        model = autopar.compile(built(a), {"dp": a.processes}, layout=a.layout, backend=a.backend, optimizer="adamw", elastic=elastic)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    plain, plain_optimizer = compiled(None)
    model, optimizer = compiled(autopar.Elastic(silence_s=600.0, survive=1))
    session = autopar.elastic.Session(model, optimizer)
    if a.copies != "shared":
        slow_link.route(lambda ranks: "copies")
        configured(a.copies, "copies")
    assert session.copies is not None
    session.copies.wait()
    session.copies.group = dist.new_group(backend="slow")  # in place of gloo, which takes the cores that compute
    ids = torch.randint(4, a.vocabulary, (a.batch, a.sequence), generator=torch.Generator().manual_seed(1))

    def step(of: Any, by: Any) -> None:
        of(input_ids=ids, labels=ids).loss.backward()
        by.step()
        by.zero_grad()

    found: dict[str, Any] = {"with": [], "without": []}
    busy: list[float] = []
    loader: Iterator[Any] = itertools.repeat(ids, TURN * (a.turns + 1))
    times: list[float] = []
    slow_link.stats()
    late = carried = 0.0
    begun = time.perf_counter()
    for number, _ in enumerate(session.batches(loader)):
        with session.step():
            step(model, optimizer)
        times.append(time.perf_counter() - begun)
        if number % TURN == TURN - 1:
            seen = slow_link.stats()
            late, carried = late + seen.late_s, carried + seen.busy_s
            others = []
            for _ in range(TURN):
                begun = time.perf_counter()
                step(plain, plain_optimizer)
                others.append(time.perf_counter() - begun)
                seen = slow_link.stats()
                busy.append(seen.busy_s)
                late, carried = late + seen.late_s, carried + seen.busy_s
            if number >= TURN:  # the first turn compiles
                found["with"].append(statistics.median(times[1:]))
                found["without"].append(statistics.median(others[1:]))
            times.clear()
        begun = time.perf_counter()
    shard = sum(p.to_local().numel() for p in model.parameters())
    kept = [packed.buffer.numel() for packed in session.holdings.own.values()]
    found |= {
        "late_s": late, "busy_s": carried, "step_busy_s": statistics.median(busy), "copy_bytes": max(kept), "held_bytes": session.holdings.bytes(), "predicted_bytes": math.prod((4, 3, 4, shard)),
    }  # fmt: skip
    (folder / os.environ["AUTOPAR_WORKER"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def configured(link: str, name: str) -> None:
    from benchmarks import slow_link

    alpha_us, mega = map(float, link.split(","))
    slow_link.configure(alpha_us * 1e-6, mega * 1e6, name)


if __name__ == "__main__":
    main()
