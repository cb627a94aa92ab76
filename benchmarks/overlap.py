"""Steps of a small Llama by layout, with small collectives joined and each by itself (tensor parallelism: with products beside its collectives and each waited for at once), beside
torch's DDP, FSDP2 and tensor parallelism, over a slow link or plain gloo.

    python -m benchmarks.overlap --processes 2 --link 1000,50 --out benchmarks/results/overlap.json
    python -m benchmarks.overlap --processes 2 --link gloo
    python -m benchmarks.overlap --processes 2 --layouts tp --width 512 --batch 4

Over a slow link (`benchmarks/slow_link`: microseconds, MB a second) waiting takes no core, so communication hides as it does behind a network card; the plan is made for a cluster with
that link. Plain gloo copies on the cores that compute. All cases are in the same processes and take turns, step by step; a ratio is of two steps of one turn, told as
the median of all turns with an order-statistics interval of 95 %. exposed_s: seconds that a step stood waiting (DDP's reducer waits otherwise, and shows none); late_s: that gloo took
longer than the link, over the whole run: where that is not close to nothing the link is too fast for the machine, and the result is not written.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.measure import median
from benchmarks.record import write

LAYOUTS = ("ddp", "fsdp", "planned", "tp")
WHOLE = ("tp", "torch tp")  # what splits no batch
PEERS = {"ddp": "torch ddp", "fsdp": "torch fsdp2", "tp": "torch tp"}
WITHOUT = {layout: "blocking" if layout in WHOLE else "single" for layout in LAYOUTS}  # the same without what is measured
LATE = 0.02  # of what the links were busy: more, and the run tells nothing
SAME = 1e-3  # losses, relative


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--link", default="1000,50", help="microseconds and MB a second, or gloo")
    parser.add_argument("--layouts", default="ddp,fsdp,planned", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="inductor", help="aot_eager runs the graphs call by call, and torch's modules eagerly")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def built(a: argparse.Namespace) -> Any:
    import torch
    import transformers as T

    torch.manual_seed(0)
    w, heads = a.width, a.width // 32
    return T.LlamaForCausalLM(
        T.LlamaConfig(
            vocab_size=a.vocabulary, hidden_size=w, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=8 * w // 3 // 32 * 32,
            num_hidden_layers=a.layers, max_position_embeddings=a.sequence, attn_implementation="sdpa",
        )
    )  # fmt: skip


@dataclass
class Case:
    """loss: of a step, which has yet to go backward; joined: what the plan says of buckets."""

    loss: Callable[[], Any]
    optimizer: Any
    joined: str


def torch_case(name: str, a: argparse.Namespace, mesh: Any) -> Any:
    import torch

    model = built(a)
    if name == "torch ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if name == "torch tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns, rows = (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
            ("self_attn.o_proj", "mlp.down_proj"),
        )
        for layer in model.model.layers:
            parallelize_module(layer, mesh, {**{n: ColwiseParallel() for n in columns}, **{n: RowwiseParallel() for n in rows}})
        return model
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def waited_for(each: bool) -> Iterator[None]:
    """each: compiled here, collectives of activations are waited for at once."""
    from autopar.passes import manager

    before = manager.beside
    if each:
        manager.beside = lambda gm, *_: gm
    try:
        yield
    finally:
        manager.beside = before


def case(name: str, a: argparse.Namespace, meshes: dict[bool, Any], ids: Any, local: Any) -> Case:
    import torch

    import autopar

    compiled, layout, joined = a.backend == "inductor", name.split()[0], ""
    mesh = meshes[name in WHOLE or layout in WHOLE]
    mine = ids if name in WHOLE or layout in WHOLE else local
    if layout == "torch":
        model = torch_case(name, a, mesh)
        run = torch.compile(model) if compiled else model
    else:
        with waited_for(name.endswith("blocking")):
            model = autopar.compile(
                built(a), mesh, layout=None if layout == "planned" else layout, cluster=cluster(a), inputs="global" if layout in WHOLE else "local",
                backend=a.backend, bucket_collectives=not name.endswith("single"), example_inputs={"input_ids": mine, "labels": mine},
            )  # fmt: skip
        run = model
        joined = str(model.plan.solver.get("buckets", ""))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=name != "torch tp")
    return Case(lambda: run(input_ids=mine, labels=mine).loss, optimizer, joined)


def cluster(a: argparse.Namespace) -> Any:
    """This machine's processes over the link that is asked for."""
    from autopar.hardware.cluster import Cluster
    from autopar.hardware.parts import Link

    found = Cluster.of(f"cpu:1x{a.processes}")
    if a.link == "gloo":
        return found
    alpha_us, mega = map(float, a.link.split(","))
    link = Link(bandwidth_Bps=mega * 1e6, efficiency=1.0, latency_s=alpha_us * 1e-6)
    return found.model_copy(update={"name": "slow", "intra": link, "contention": 0.0, "scatters_whole": False})


def names(a: argparse.Namespace) -> list[str]:
    layouts = a.layouts.split(",")
    ours = [n for layout in layouts for n in (layout, f"{layout} {WITHOUT[layout]}")]
    return [*(PEERS[x] for x in layouts if x in PEERS), *ours]


def rank(rank: int, store: str, out: str, a: argparse.Namespace) -> None:
    import json

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(a.processes), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(a.processes))
    torch.set_num_threads(1)
    slow = a.link != "gloo"
    from benchmarks import slow_link

    dist.init_process_group("slow" if slow else "gloo", store=dist.FileStore(store, a.processes), rank=rank, world_size=a.processes)
    if slow:
        alpha_us, mega = map(float, a.link.split(","))
        slow_link.configure(alpha_us * 1e-6, mega * 1e6)
    meshes = {whole: init_device_mesh("cpu", (a.processes,), mesh_dim_names=("tp" if whole else "dp",)) for whole in (False, True)}
    ids = torch.randint(4, a.vocabulary, (a.batch, a.sequence), generator=torch.Generator().manual_seed(1))
    local = ids.chunk(a.processes)[rank].contiguous()
    cases = {n: case(n, a, meshes, ids, local) for n in names(a)}
    found: dict[str, dict[str, list[float]]] = {n: {} for n in cases}
    for turn in range(-2, a.rounds):  # two to warm up
        for n, c in cases.items():
            dist.barrier()
            if slow:
                slow_link.stats()
            start, cpu = time.perf_counter(), time.process_time()
            loss = c.loss()
            loss.backward()
            c.optimizer.step()
            c.optimizer.zero_grad()
            row = {"step_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu, "loss": float(loss.detach())}
            if slow:
                s = slow_link.stats()
                row |= {"collectives": s.count, "busy_s": s.busy_s, "exposed_s": s.exposed_s, "late_s": s.late_s}
            for k, v in row.items() if turn >= 0 else ():
                found[n].setdefault(k, []).append(float(v))
        if rank == 0:
            print(f"turn {turn}", flush=True)
    losses = {n: mean_loss(torch.tensor(v["loss"])) for n, v in found.items()}
    if rank == 0:
        Path(out).write_text(json.dumps({"runs": found, "buckets": {n: c.joined for n, c in cases.items()}, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def mean_loss(losses: Any) -> list[float]:
    """Over ranks: torch's modules give a rank its own loss, ours the mean."""
    import torch.distributed as dist

    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def ratio(runs: dict[str, Any], a: str, b: str) -> dict[str, Any]:
    """Steps of `a` by those of `b`, turn by turn."""
    return {"of": a, "to": b, **median([x / y for x, y in zip(runs[a]["step_s"], runs[b]["step_s"], strict=True)])}


def main() -> None:
    import json

    import torch.multiprocessing as mp

    a = parse()
    if a.link != "gloo":
        from benchmarks import slow_link

        slow_link.build()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        mp.spawn(rank, (str(Path(folder) / "store"), out, a), nprocs=a.processes)
        got = json.loads(Path(out).read_text())
    runs = got["runs"]
    first = next(iter(got["losses"].values()))
    for n, losses in got["losses"].items():
        assert all(math.isclose(x, y, rel_tol=SAME) for x, y in zip(losses, first, strict=True)), (
            f"{n} does not train as the others: {losses}, {first}"
        )
    cases = {}
    for n, r in runs.items():
        cases[n] = {k: median(v) for k, v in r.items() if k != "loss"} | {"buckets": got["buckets"][n]}
        said = "".join(f"  {k} {cases[n][k]['median'] * 1e3:.0f} ms" for k in ("cpu_s", "busy_s", "exposed_s", "late_s") if k in cases[n])
        print(
            f"{n:<16} step {cases[n]['step_s']['median'] * 1e3:.0f} ms{said}  collectives {cases[n].get('collectives', {}).get('median', '')}"
        )
    ratios = []
    for layout in a.layouts.split(","):
        ratios.append(ratio(runs, layout, f"{layout} {WITHOUT[layout]}"))
        ratios += [ratio(runs, layout, peer) for peer in PEERS.values() if peer in runs and PEERS.get(layout, peer) == peer]
    for r in ratios:
        print(f"{r['of']} / {r['to']}: {r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})")
    late, busy = (sum(sum(r.get(k, [])) for r in runs.values()) for k in ("late_s", "busy_s"))
    print(f"late {late:.3f} s of {busy:.3f} s that the link was busy")
    if late > LATE * busy:
        print("the link is too fast for this machine now: nothing is written")
        return
    setting = {k: v for k, v in vars(a).items() if k != "out"}
    write(a.out, "python -m benchmarks.overlap", {"setting": setting, "late_s": late, "busy_s": busy, "cases": cases, "ratios": ratios})


if __name__ == "__main__":
    main()
