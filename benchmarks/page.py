"""docs/benchmarks.md and its figures, of what `benchmarks/results/` holds. Nothing is measured here.

    python -m benchmarks.page

Every number of the page is read from a result; run this after a benchmark has written a new one. Figures need matplotlib (`pip install "autopar[docs]"`), the text does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.page_elastic import failures, surviving
from benchmarks.page_parts import Result, case, listed, origin, share, size, table
from benchmarks.page_plans import by_hand, context, freedoms, layouts, patterns, planning, published_experts, toys
from benchmarks.page_steps import image_steps, launches, pipeline_steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"

# What people call the files of published rows.
SOURCES = {
    "hagemann_a100": "Hagemann et al., Llama-13B on A100",
    "kwai_h800": "Kuaishou, Llama on H800",
    "llm_foundry_fsdp": "LLM Foundry, FSDP on A100 and H100",
    "megatron_2021_a100": "Megatron-LM, A100",
    "megatron_core_h100": "Megatron-LM, H100",
    "nanotron_h100": "nanotron, H100",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-figures", action="store_true", help="write the text alone")
    a = parser.parse_args()
    results = read()
    PAGE.write_text(page(results), encoding="utf-8")
    if not a.no_figures:
        from benchmarks.charts import draw

        draw(results, FIGURES)


def read(folder: Path = RESULTS) -> dict[str, Result]:
    """Results by the name of their file."""
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}


def page(results: dict[str, Result]) -> str:
    """The text of docs/benchmarks.md."""
    parts = [HEAD, *(section(results) for section in SECTIONS)]
    return "\n\n".join(p.strip("\n") for p in parts) + "\n"


HEAD = """# Benchmarks

<!-- Written by `python -m benchmarks.page` from benchmarks/results/*.json. Do not edit: change the script, or measure again. -->

What was measured, how, and on what. Three kinds of numbers appear, and each table says which it has.

- *Published*: step times and peaks that other people measured on GPUs with their own programs. Our cost model is compared with them.
- *Measured*: run on two CPU cores, over gloo where there are several processes; in the first section on one GPU.
- *Predicted*: by the cost model, for GPUs that were not there.

No run of autopar on several GPUs has been recorded yet. How to measure again stands under each section; what a fair comparison must hold equal stands in
`benchmarks/README.md`."""


# ---- sections ----------------------------------------------------------------------------------------------------


def one_gpu(results: dict[str, Result]) -> str:
    r = results["gpu"]
    ways = {w["way"]: w for w in r["ways"] if "failed" not in w}
    ours, theirs, tokens = ways["autopar"], ways["torch.compile"], r["batch"] * r["sequence"]
    rows = []
    for name, w in ways.items():
        said = [f"{w['predicted_s'] * 1e3:.1f}", size(w["predicted_bytes"])] if "predicted_s" in w else ["", ""]
        rows.append(
            [name, f"{w['step_s'] * 1e3:.1f}", f"{tokens / w['step_s']:,.0f}", size(w["peak_bytes"]), *said, f"{w['losses'][-1]:.5f}"]
        )
    steps = len(ours["seconds"]) * 5 + 4
    return f"""## One GPU

A Llama of {ours["parameters"] / 1e9:.2f} billion parameters ({r["layers"]} layers, width {r["width"]}, vocabulary {r["vocabulary"]:,}, tied), {r["batch"]} x {r["sequence"]} tokens, bf16 throughout,
fused AdamW, on one {r["gpu"]}. `autopar.compile` takes {ours["step_s"] / theirs["step_s"]:.2f} of the time of `torch.compile` and {ours["peak_bytes"] / theirs["peak_bytes"]:.2f} of its memory. Times
are medians of windows of five steps that follow one another, one process at a time; memory is what the allocator had given out at most; the loss is that after {steps} steps on one batch.

{table(["", "ms a step", "tokens/s", "peak", "predicted ms", "predicted peak", "loss"], rows)}

With "budget", `torch._functorch.config.activation_memory_budget` is 0.5. The prediction is of the H100's description, which is fitted to published runs of many GPUs: a lone card is faster
than it says. Of what the predicted peak lacks, {size(4 * tokens * r["vocabulary"])} are a float32 [tokens, vocabulary] that the loss's gradient filled with zeros: found in this run, gone since, and not
measured again. The card copied {r["limits"]["copy_Bps"] / 1e12:.2f} TB/s (read and written), multiplied at {r["limits"]["product_flops"] / 1e12:.0f} TFLOP/s (bf16, 8192 x 8192 x 8192), and moved {r["limits"]["to_host_Bps"] / 1e9:.0f} GB/s to pinned memory.

{origin(results, "gpu")}"""


def one_curve(results: dict[str, Result]) -> str:
    r = results["demo"]
    plain = r["losses"]["one process"]
    rows = []
    for name, losses in r["losses"].items():
        if name != "one process":
            far = max(abs(a - b) for a, b in zip(losses, plain[len(plain) - len(losses) :], strict=True))
            rows.append([name, str(len(losses)), f"{far:.1e}"])
    return f"""## The same losses as on one process

`make demo`: a Llama of {r["parameters"] / 1e6:.1f} million parameters, float32, AdamW, Inductor, over {len(plain)} steps; a checkpoint after step {r["resumed_at"]} is resumed on half as many
processes. The loss falls from {plain[0]:.3f} to {plain[-1]:.3f}. The largest difference of any step's loss from one process in plain PyTorch:

{table(["run", "steps", "largest difference of the loss"], rows)}

The second process sees the rows of every batch in reverse order, which changes nothing but the order of sums: so far rounding alone drifts. The demo fails where a difference is larger than that
explains. It measures no speed: the processes share two cores.

{origin(results, "demo")}"""


def published(results: dict[str, Result]) -> str:
    r = results["published"]
    ways = {
        "fitted": "fitted to",
        "random parts of each source left out": "a random fifth left out",
        "sources left out": "the whole source left out",
    }
    rows = [
        [
            SOURCES[s],
            f"{e['rows']}",
            *(f"{share(r['step time'][way][s]['mean'])} ({share(r['step time'][way][s]['median'])})" for way in ways),
        ]
        for s, e in r["step time"]["fitted"].items()
    ]
    memory, fits = r["peak memory"]["kwai_h800"], r["out of memory"]
    sweeps = {name: v for name, v in r["ranks"].items() if name != "all"}
    first = sum(v["place of the best"] == 1 for v in sweeps.values())
    constants = len(r["constants"])
    alone: Result = next((v for k, v in r["step time"].items() if k.startswith("left out: ")), {})
    two = "".join(
        f"Two runs of Llama-175B with 8k tokens on 256 H800 were left out together: {share(v['mean'])} off on average, {share(v['max'])} at most."
        for v in alone.values()
    )
    return f"""## Predicted against published

The cost model has {constants} constants (products, attention, memory, links, overlap, one slowdown a framework). They are fitted to {len(r["rows"])} published step times.
The table has the mean error of a step time, and the median in brackets: of rows that the constants were fitted to, of rows that were left out at random, and of a whole source that was left out.

{table(["source", "rows", *ways.values()], rows)}

![Predicted against published and measured step times](figures/predicted.svg)

{two}

Peak memory, to which nothing is fitted: {share(memory["mean"])} off on average over {memory["rows"]} runs on H800, {share(memory["max"])} at most. Of {fits["rows"]} runs of the
Llama-13B sweep, {share(fits["right"])} are told right whether they fit: {fits["said to fit, did not"]} were said to fit and did not, {fits["said not to fit, did"]} the other way round.
What allocators lose in that sweep's pipelines is fitted to that. In {first} of the sweep's {len(sweeps)} groups the layout that is predicted fastest was the fastest.

The result also lists what was assumed where a source does not say, and {len(r["not priced"])} rows that could not be priced, with the reason.

{origin(results, "published")}"""


def steps(results: dict[str, Result]) -> str:
    cases = [c for name in ("steps", "steps_4") for c in results[name]["cases"]]
    rows = []
    for n in sorted({c["processes"] for c in cases}):
        errors = [abs(c["error"]) for c in cases if c["processes"] == n]
        rows.append([str(n), str(len(errors)), share(statistics.mean(errors)), share(max(errors))])
    by = {n: results[f"collectives_{n}"]["summary"] for n in (2, 4)}
    sent = [c["sent_bytes"] for c in results["collectives_4"]["cases"]]
    models = sorted({c["model"] for c in cases})
    layouts = sorted({c["layout"] for c in cases})
    return f"""## Predicted against measured, on this machine

`autopar calibrate` measures a machine; then steps of {listed(models)} under {listed(layouts)} are predicted and run: gloo, two cores, float32.

{table(["processes", "cases", "mean error of the step", "largest"], rows)}

Collectives over gloo, {size(min(sent))} to {size(max(sent))}: the median error is {share(by[2]["median_error"])} between two processes ({by[2]["cases"]} cases) and
{share(by[4]["median_error"])} among four ({by[4]["cases"]} cases). Repetitions of one case differ by {share(by[2]["median_spread"])} and {share(by[4]["median_spread"])} (medians).

{origin(results, "steps", "steps_4", "collectives_2", "collectives_4")}"""


def equal_memory(results: dict[str, Result]) -> str:
    runs = [r for name in ("memory", "memory_t5") for r in results[name]["runs"]]
    rows: list[list[str]] = []
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for model in dict.fromkeys(r["model"] for r in runs):
        row = [model]
        for fusion in ("planned", "compiled"):
            ratios = [x["ours"]["ratio"] for r in runs if (r["model"], r["fusion"]) == (model, fusion) for x in r["rows"]]
            won = [x["ours"]["dominated"] for r in runs if (r["model"], r["fusion"]) == (model, fusion) for x in r["rows"]]
            counts[fusion][0] += sum(won)
            counts[fusion][1] += len(won)
            row += [f"{min(ratios):.3f} to {max(ratios):.3f}", f"{sum(won)} of {len(won)}"]
        rows.append(row)
    (p, p_all), (c, c_all) = counts["planned"], counts["compiled"]
    return f"""## Time at equal memory

Every way to save activation memory that people use, on a model of four layers and one H100: torch's min-cut partitioner, its memory budget, checkpoints by operator and by layer, Kuaishou's
balanced rule. Each setting has a peak and a time. The planner is then asked for the fastest step within that peak. The ratio is our time over theirs: below one, the plan is faster.
Nothing was run: both are priced by the simulator, once as the integer program prices recomputation ("planned") and once as a compiler fuses it with backward ("compiled").

{table(["model", "planned: ratio", "no worse", "compiled: ratio", "no worse"], rows)}

"No worse" means within the gap to the optimum that the plan itself states: {p} of {p_all} settings by planned prices, {c} of {c_all} by compiled ones.

![Time at equal memory](figures/memory.svg)

{origin(results, "memory", "memory_t5")}"""


def equal_memory_measured(results: dict[str, Result]) -> str:
    r = results["memory_measured"]
    rows = []
    above = 0
    total = 0
    for m in r["measured"]:
        ratios = [x["ratio"] for x in m["rows"]]
        total += len(ratios)
        above += sum(x["low"] > 1 for x in ratios)
        rows.append([m["model"], str(len(ratios)), f"{min(x['median'] for x in ratios):.2f} to {max(x['median'] for x in ratios):.2f}"])
    most = results["resident"]["rows"]
    return f"""### Run on a CPU

The same comparison with forward and backward executed, at equal measured peaks of live tensors, {r["arguments"]["repeats"]} interleaved rounds, beside other work on the machine.

{table(["model", "settings", "median ratio of times"], rows)}

The 95% interval lies wholly above 1 in {above} of {total} settings.

Compiled by Inductor, the resident memory of the whole process falls in the order of the predicted peaks{"" if results["resident"]["same_order"] else " (it does not)"}:

{table(["predicted peak", "resident peak", "operators that run again"], [[size(x["predicted_bytes"]), size(x["resident_peak_bytes"]), str(x["made_again"])] for x in most])}

{origin(results, "memory_measured", "resident")}"""


def offloaded(results: dict[str, Result]) -> str:
    r = results["nvme"]
    rows = []
    for c in r["cases"]:
        name = c["case"].split(",")[0]
        for x in c["rows"]:
            if "lower_by" in x:
                rows.append([name, share(x["lower_by"]), f"{x['longer_by']:.2%}", str(x["away"]), str(x["recomputed"])])
    return f"""### Offload to files

Predicted, for one A100 with SSDs of {r["write_GBps"]} GB/s to write and {r["read_GBps"]} GB/s to read; models of four layers and hidden size 8192.

{table(["model", "activation peak lower by", "step longer by", "values in files", "operators that run again"], rows)}

{origin(results, "nvme")}"""


def restructured(results: dict[str, Result]) -> str:
    r = results["before_after"]
    rows = [
        [case(x["case"]), "the same" if x["same"] else "differs", f"{min(x['before_s']):.1f} s", f"{min(x['after_s']):.1f} s"]
        for x in r["rows"]
    ]
    return f"""## Plans before and after the package was taken apart

Revision {r["before"]}, before its files were put into rooms, and what came after: all that a plan's file says (but for the solver's seconds and what is new in it), and the
time of the command with its imports, of both in turn.

{table(["model, cluster, mesh, batch", "plan", "before", "after"], rows)}

{origin(results, "before_after")}"""


def building(results: dict[str, Result]) -> str:
    init = results["init_memory"]
    loads = [
        [
            x["way"],
            size(x["load_peak_growth_bytes"]),
            f"{x['load_of_shards']:.2f}",
            size(x["save_peak_growth_bytes"]),
            f"{x['save_of_whole']:.2f}",
        ]
        for x in results["load_memory"]["rows"]
    ]
    whole = results["load_memory"]["rows"][0]
    rows = [
        [str(x["layers"]), f"{x['before_lowering_s']:.1f} s", f"{x['lowering_s']:.1f} s", str(x["backward"]["distinct_layers"])]
        for x in results["compile_time_llama"]["runs"]
    ]
    return f"""## The first step

Compiling a narrow Llama with Inductor, on one process: equal layers are compiled once, so depth costs graph work, not compile time.

{table(["layers", "until it is lowered", "lowering", "distinct layers in backward"], rows)}

Initialising {init["parameters"] / 1e9:.2f} billion parameters that start on the meta device, on {init["ranks"]} processes: each grows by {size(init["peak_growth_bytes"])} at its peak,
{init["ratio"]:.3f} times its shard of {size(init["shard_bytes"])}. The whole model is never on one process.

Loading a pretrained Llama in the shape of the one of eight billion parameters, scaled to {size(whole["whole_bytes"])} in {whole["ranks"]} shards of
{size(whole["shard_bytes"])}: `autopar.from_pretrained` (parts), and transformers' `from_pretrained` with `autopar.compile` (whole), which reads through a mapping. Writing
it holds a file's worth on the first process, and a tensor's on the others.

{table(["way", "loading grows by", "of a shard", "writing grows by", "of the whole"], loads)}

{origin(results, "compile_time_llama", "init_memory", "load_memory")}"""


def lengths(results: dict[str, Result]) -> str:
    r = results["lengths"]
    names = {"torch.compile": "torch.compile, one process", "autopar": "autopar, two processes"}
    rows = [
        [said, str(len(x["calls_that_compiled"])), f"{x['compilation_s']:.0f} s", f"{x['largest_relative_loss_difference']:.1e}"]
        for name, said in names.items()
        for x in [r["runs"][name]]
    ]
    return f"""## Batches of all lengths

A Llama trained on 200 batches of lengths from 64 to 512: how often something was compiled, with empty caches, and how far a loss was from plain PyTorch's at most.
Rounding alone, by batches with their rows in reverse order: {r["runs"]["reversed"]["largest_relative_loss_difference"]:.1e}. Compilation takes {r["compilation_ratio"]:.2f} of
torch.compile's; the machine was busy, so only the ratio says something.

{table(["", "calls that compiled", "compilation", "losses off by"], rows)}

{origin(results, "lengths")}"""


def second_start(results: dict[str, Result]) -> str:
    r = results["second_start"]
    runs, ahead = r["runs"], r["runs"].get("elsewhere, with artifacts")
    stages = list(dict.fromkeys(stage for x in runs.values() for stage in x["stages_s"]))
    rows = [
        [
            name,
            f"{x['total_s']:.1f} s",
            f"{x['imports_s']:.1f} s",
            *(f"{x['stages_s'][s]:.1f} s" if s in x["stages_s"] else "" for s in stages),
            *([str(x["compiled"])] if ahead else []),
        ]
        for name, x in runs.items()
    ]
    also = ""
    if ahead:
        also = f""" Then with `artifacts=`: a first run on empty caches, and
one "elsewhere", whose caches are empty and which has the folder that the first one wrote: {ahead["total_s"]:.1f} s to the first step, where the first start without took {runs["first"]["total_s"]:.1f} s. "compiled" counts the graphs
that Inductor had to compile. Other work, and more or less of it, ran on the cores meanwhile, up to a dozen processes each, so seconds say something by their order alone, stages of one start beside each other; an idle
machine takes a tenth of them."""
    return f"""## The second start of a program

From the start of the interpreter to the end of the first optimizer step of the demo's program on {r["processes"]} processes of two cores, as rank 0 tells it: with empty caches, then with plans
and Inductor's kernels kept by the first start, then with kernels alone.{also}

{table(["start", "in all", "imports", *stages, *(["compiled"] if ahead else [])], rows)}

{origin(results, "second_start")}"""


def experts(results: dict[str, Result]) -> str:
    r = results["experts"]
    rows = [
        [
            f"{x['model']}, {x['cluster']}",
            str(x["sequences"]),
            f"{x['plan']['step_time_s']:.3f} s",
            f"{x['fsdp']['step_time_s']:.3f} s",
            f"{x['fsdp']['step_time_s'] / x['plan']['step_time_s']:.2f}",
            "sent to ranks" if "experts" in x["plan"]["experts"] else "weights gathered",
        ]
        for x in r["rows"]
    ]
    return f"""## Mixtures of experts

Predicted steps of sequences of {r["tokens"]:,} tokens, planned freely and kept to FSDP, by the same prices. With few tokens on a device, rows of tokens are sent to the
nodes that have their experts, and weights are gathered inside of nodes alone; with many, gathering all weights is cheaper. Experts are taken to be equally busy.

{table(["case", "sequences a device", "plan", "FSDP", "ratio", "experts"], rows)}

{origin(results, "experts")}"""


def loss_head(results: dict[str, Result]) -> str:
    r = results["loss_head"]
    rows = []
    for x in results["loss_head_planned"]["predicted"]:
        layers = f", {x['layers']} layers" if x["layers"] else ""
        case = f"{x['model']}{layers}, {x['cluster']}, {x['sequences']} x {x['tokens']:,}, {x['optimizer']}"
        for memory in ("fastest", "least"):
            plain, chunked = (x[f"{form}, {memory}"] for form in ("plain", "chunked"))
            times = [f"{1e3 * p['step_time_s']:,.1f} ms" for p in (plain, chunked)]
            rows.append([case, size(x["logits_bytes"]), memory, *(size(p["peak_memory_bytes"]) for p in (plain, chunked)), *times])
    runs = [[x["form"], size(x["resident_more_bytes"]), f"{x['step_s']:.2f} s", f"{x['loss']:.6f}"] for x in r["measured"]]
    a = r["arguments"]
    return f"""## A head without logits

Predicted steps with all logits in memory, and with logits that are made tile by tile and again in backward, in bfloat16. Of each form the fastest plan,
and the plan of least memory; logits are those of the whole step, in float32.

{table(["case", "logits", "plan", "peak, plain", "chunked", "step, plain", "chunked"], rows)}

Measured on this machine's CPU, a Llama of one layer, {a["tokens"]:,} tokens, a vocabulary of {a["vocabulary"]:,} and width {a["width"]} in {a["dtype"]} ({size(r["logits_bytes"])} of logits), {"compiled by Inductor" if a["backend"] == "inductor" else "call by call"}: what a process has resident
at most beyond what it has between steps, and a step's time, {"one process" if a["repeats"] == 1 else f"medians of {a['repeats']} processes"} each. Other work ran on the machine meanwhile. Nothing was measured on a GPU.

{table(["head", "resident more", "step", "loss"], runs)}

{origin(results, "loss_head", "loss_head_planned")}"""


def overlap(results: dict[str, Result]) -> str:
    r = results["overlap"]
    s = r["setting"]
    alpha_us, mega = map(float, s["link"].split(","))
    rows = [
        [n, f"{c['collectives']['median']:.0f}", *(f"{1e3 * c[k]['median']:,.0f} ms" for k in ("step_s", "busy_s", "exposed_s"))]
        for n, c in r["cases"].items()
    ]
    ratios = [[f"{x['of']} / {x['to']}", f"{x['median']:.3f}", f"{x['low']:.3f} to {x['high']:.3f}"] for x in r["ratios"]]
    how = "call by call, torch's too" if s["backend"] != "inductor" else "compiled by Inductor"
    return f"""## Buckets over a slow link

Training steps of a Llama of {s["layers"]} layers and width {s["width"]} on {s["processes"]} processes, {how}. gloo moves the data, and a collective is complete when a link of
{alpha_us / 1e3:g} ms and {mega:g} MB/s would have carried it, which takes no core: so what overlaps is seen, though all processes share this machine's cores. "single" is without
buckets. Waiting is what a step stood still for; DDP's reducer waits elsewhere.

{table(["case", "collectives", "step", "link busy", "waiting"], rows)}

Cases took turns; a ratio is of two steps of one turn, its median over {s["rounds"]} turns with the interval that holds it at 95 %. Other work ran on the machine meanwhile, so only
ratios say something. gloo was later than the link by {share(r["late_s"] / r["busy_s"])} of the time that the link was busy.

{table(["steps", "median ratio", "interval"], ratios)}

{origin(results, "overlap")}"""


SECTIONS: tuple[Callable[[dict[str, Result]], str], ...] = (
    one_gpu, one_curve, published, steps, equal_memory, equal_memory_measured, offloaded, planning, restructured, layouts, by_hand, toys, context, building, overlap, lengths, second_start, experts, published_experts, loss_head, patterns, surviving, failures, launches, image_steps, pipeline_steps, freedoms,
)  # fmt: skip


if __name__ == "__main__":
    main()
