"""Parts of docs/benchmarks.md: steps on this machine beside torch's own."""

from __future__ import annotations

import statistics

from benchmarks.page_parts import Result, origin, table


def image_steps(results: dict[str, Result]) -> str:
    names = ("formats_32", "formats", "formats_96")
    rows = []
    for x in (results[n] for n in names):
        to = [
            f"{x[k]['median']:.3f} ({x[k]['interval'][0]:.3f} to {x[k]['interval'][1]:.3f})"
            for k in ("autopar / torch.compile", "autopar / eager")
        ]
        fastest = min(x["seconds"]["autopar"]) / min(x["seconds"]["torch.compile"])
        rows.append([f"{x['setting']['batch']} x {x['setting']['size']} px", f"{fastest:.3f}", *to, str(x["copies"]["run"])])
    s = results["formats"]["setting"]
    return f"""## Steps of a channels_last ResNet

Forward, backward and SGD of a ResNet of width {s["width"]} with {s["depth"]} blocks a stage, on one process, under Inductor: the time of ours over that of the same model under torch.compile and in
eager PyTorch, steps of each in turn. Median, and its interval of 95%; fastest: of ours over the fastest of torch.compile's. The C allocator keeps freed memory (`--keep-memory`): left alone it returns
and fetches pages in the middle of steps. Where steps are short it shows what a call and its gradients, which are DTensors, cost the host.

{table(["batch", "fastest", "over torch.compile", "over eager", "copies that change a layout"], rows)}

{origin(results, *names)}"""


def pipeline_steps(results: dict[str, Result]) -> str:
    names = ("pipelines_2", "pipelines_4")
    rows = []
    for x in (results[n] for n in names):
        for key, ratio in ((k, v) for k, v in x.items() if k.startswith("ours, ")):
            mine, other = key.split(" / ")
            schedule = mine.removeprefix("ours, ")
            ran = x["cut"][schedule]["schedule"]
            rows.append(
                [
                    str(x["setting"]["processes"]),
                    schedule if schedule == ran else f"{schedule} ({ran})",
                    f"{1e3 * statistics.median(x['seconds'][mine]):.0f} ms",
                    f"{1e3 * statistics.median(x['seconds'][other]):.0f} ms ({other.removeprefix('torch, ')})",
                    f"{ratio['median']:.3f} ({ratio['interval'][0]:.3f} to {ratio['interval'][1]:.3f})",
                    _predicted(x, schedule, mine),
                ]
            )
    s = results[names[0]]["setting"]
    return f"""## Steps of a pipeline beside torch.distributed.pipelining

A decoder of {s["layers"]} layers of {s["width"]} features, {s["batch"]} sequences of {s["sequence"]} tokens in {s["micro_batches"]} micro-batches, forward, backward and SGD on gloo processes with a
thread each. torch's stages are cut by hand where ours are and compiled as ours, but for ZB-V's, which torch takes uncompiled alone. Steps of each in turn, the same losses and parameters afterwards.
Chosen: the schedule of `autopar.plan`, against the best of torch's. Four processes on two cores show what is done, not what waits: a rank that waits leaves its core to others, so there is no prediction for them. Predicted: by the cluster that `autopar calibrate`
makes of two processes here, over what was measured.

{table(["processes", "schedule", "ours", "torch's", "ratio, and its interval of 95%", "predicted"], rows)}

{origin(results, *names)}"""


def _predicted(x: Result, schedule: str, mine: str) -> str:
    said = x.get(f"predicted, {schedule}")
    return "" if said is None else f"{1e3 * said:.0f} ms, {said / statistics.median(x['seconds'][mine]) - 1:+.1%}"


def launches(results: dict[str, Result]) -> str:
    r = results["launches"]
    rows, optimizers = [], []
    for x in r["rows"]:
        for who in ("torch.compile", "autopar"):
            halves = [x[who][half] for half in ("forward", "backward")]
            counts = [str(h[kind]) for h in halves for kind in ("triton", "library")]
            rows.append([x["model"], who, *counts, str(sum(n for h in halves for n in h.values()))])
        optimizers += [[x["model"], name, str(n)] for name, n in x["optimizer"].items()]
    return f"""## Kernels that a step launches

Counted in the code that Inductor writes for CUDA (sm{r["capability"]}), without a GPU, of one device's step in {r["dtype"]}: {r["layers"]} layers, width {r["width"] or "small"}, {r["batch"]} x {r["sequence"]} tokens, all logits made. What the code
calls is counted as often as it is called; "library" is a call of a product, of attention or of another operator by name, each counted as one though some launch more. torch.compile's is the same captured program,
decomposed, cut by torch's min-cut partitioner, and each half compiled whole. There are no CUDA graphs: every launch is paid on the host. None of this has been timed on a GPU.

{table(["model", "code", "forward: Triton", "library", "backward: Triton", "library", "in all"], rows)}

Operators that a step of torch's AdamW calls, with parameters as they are stored; a fused or a foreach one launches one kernel, or a few where tensors are many. "Compiled" is of the parameters of a compiled
model, whose step runs on their local parts.

{table(["model", "optimizer", "operators"], optimizers)}

{origin(results, "launches")}"""
