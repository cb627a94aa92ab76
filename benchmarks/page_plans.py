"""Sections of docs/benchmarks.md about plans: how long they take, what they win over layouts made by hand, how they split long sequences."""

from __future__ import annotations

from benchmarks.page_parts import Result, case, origin, size, table


def planning(results: dict[str, Result]) -> str:
    rows = []
    for x in results["planning"]["rows"]:
        gap = f"{x['gap']:.2%}" if "gap" in x else f"{x['points']} plans"
        rows.append([case(x["case"]), f"{x['command_s'] - x['imports_s']:.1f} s", f"{x['imports_s']:.1f} s", f"{x['peak_GB']:.2f} GB", gap])
    return f"""## Planning time

The command `autopar plan`, from the start of the process to the plan on disk, on two CPU cores. Imports (torch, transformers) are apart: they are the same for every plan. Sequences of
{results["planning"]["seq"]:,} tokens. The last column says how far from the optimum the plan may be at most, or how many plans of a frontier were made.

{table(["model, cluster, mesh, batch", "planning", "imports", "memory", "gap"], rows)}

Depth and the number of devices hardly matter, since equal layers are planned once. The mesh does: two axes are solved whole, more are merged first.

![Planning time by layers, devices and mesh axes](figures/planning.svg)

{origin(results, "planning", "planning_growth")}"""


def layouts(results: dict[str, Result]) -> str:
    r, h = results["layouts"], results["hand"]
    rows = []
    for x in r["runs"]:
        ours = f"{x['plan']['step_time_s'] * 1e3:,.1f} ms" if "step_time_s" in x["plan"] else "nothing fits"
        rows.append([x["model"], x["mesh"], str(x["batch"]), ours, x["best"] or "none possible", f"{x['ratio']:.2f}" if x["ratio"] else ""])
    hands = []
    for x in h["runs"]:
        won = f"{x['ratio']:.2f}" if x["ratio"] else "no layout fits"
        ours = f"{x['search']['step_time_s']:.3f} s" if x["search"] else ""
        hands.append(
            [x["model"], x["cluster"], str(x["batch"]), x["search"]["layout"] if x["search"] else "", ours, won, f"{x['search_s']:.0f} s"]
        )
    return f"""## Against layouts made by hand

Predicted, by one price for both. First the plan against the best plan that is `ddp`, `fsdp`, `tp` or `fsdp+tp`, on H100; no layout is given to the solver as a hint.
The last column is the time of the best layout over the plan's: above one, the plan is faster. It is worse in {r["summary"]["plan_worse"]} of {r["summary"]["cases"]} cases.

{table(["model", "mesh", "batch", "plan's step", "best layout", "layout / plan"], rows)}

Then `autopar search` against layouts as the usual guides write them, with every micro-batch and recomputation. It is worse in {h["summary"]["worse"]} of {h["summary"]["cases"]} cases.

{table(["model", "cluster", "batch", "found", "its step", "hand / found", "search took"], hands)}

{origin(results, "layouts", "hand")}"""


def by_hand(results: dict[str, Result]) -> str:
    h = results["hand_plan"]
    told = h["summary"]
    rows = []
    for x in h["runs"]:
        plan, hand = x["plan"], x["by hand"]
        rows.append(
            [
                x["model"], x["cluster"], f"{x['batch']:,} x {x['tokens']:,}", hand["layout"] if hand else "none fits",
                f"{plan['step_time_s']:.4g} s" if plan else "nothing fits", f"{plan['gap']:.2%}" if plan else "", f"{x['ratio']:.3f}" if x["ratio"] else "", f"{x['plan_s']:.0f} s",
            ]
        )  # fmt: skip
    again = [x for x in h["runs"] if x["by hand"] and x["by hand"].get("by_program")]
    lower = max((x["by hand"]["by_program"] / x["by hand"]["step_time_s"] - 1 for x in again), default=0.0)
    freedoms = [[name, str(f["cases"]), f"{f['mean ratio']:.3f}"] for name, f in told["by freedom"].items()]
    return f"""## Plans against the best of many layouts

By one price for both: DDP, ZeRO-1 to -3, HSDP, tensor and context parallelism and their combinations, with every micro-batch and kind of recomputation, against `autopar plan` with
`--micro-batches auto`. The plan is faster in {told["wins"]} of {told["cases"]} cases, by up to {told["largest ratio"]:.2f}; slower by more than its gap, or than a hundredth, in {told["worse"]}.
Layouts are priced by `autopar predict`; where by its word a plan is worse, the integer program was given that layout, and its word counts: {len(again)} cases, by up to {lower:.2%}.
The last columns: the best layout's time over the plan's, and how long planning took, beside other work on the machine.

{table(["model", "cluster", "batch", "best by hand", "plan's step", "gap", "hand / plan", "planning"], rows)}

What plans that win do and no single layout says:

{table(["freedom", "cases", "mean of hand / plan"], freedoms)}

{origin(results, "hand_plan")}"""


def toys(results: dict[str, Result]) -> str:
    t = results["toys"]
    rows = [
        [x["model"], x["error"], "", "", ""]
        if "error" in x
        else [x["model"], f"{x['capture_s']:.1f} s", f"{x['plan_s']:.1f} s", f"{x['step_time_s'] * 1e3:.2f} ms", f"{x['gap']:.0%}"]
        for x in t["rows"]
    ]
    return f"""## Planning small models

Random models of two or so layers of {len(rows)} families of transformers, on {t["mesh"]} devices of {t["cluster"]}: where a step takes milliseconds, planning takes seconds and says what gap is left.
The slowest took {t["slowest_plan_cpu_s"]:.1f} s of the processor to plan, beside other work on the machine.

{table(["head, family", "capture", "planning", "step", "gap"], rows)}

{origin(results, "toys")}"""


def context(results: dict[str, Result]) -> str:
    names = ("context", "context_70b", "context_qwen3")
    rows = []
    for c in (results[n] for n in names):
        for x in c["rows"]:
            split = ("" if x["rings"] else "without rings: ") + ("; ".join(x["split"]) if "split" in x else x["error"])
            step, exposed, peak = (
                (f"{x['step_time_s']:.4g} s", f"{x['exposed_s'] / x['step_time_s']:.1%}", size(x["peak_bytes"]))
                if "split" in x
                else ("", "", "")
            )
            rows.append(
                [c["model"], f"{c['cluster']}, {c['mesh']}", f"{x['tokens']:,}", split, step, exposed, peak, f"{x['seconds']:.0f} s"]
            )
    return f"""## Long sequences

What plans do with one sequence as it grows: attention's heads over devices, by splitting the products that make them (tensor parallel) or by an all-to-all from where the sequence is split
(Ulysses); its queries, with keys and values gathered or going round (ring attention), in blocks where that balances causal work. Predicted; each planned with and without rings, on a machine
on which torch and transformers take 8 s to import.

{table(["model", "devices, mesh", "tokens", "attention is split", "step", "exposed", "peak", "planning"], rows)}

{origin(results, *names)}"""


def freedoms(results: dict[str, Result]) -> str:
    rows = []
    for x in results["ablation"]["rows"]:
        steps, names = x["step_s"], ("by hand", "even, 1f1b", "cut by time", "by stage", "schedule")
        cells = [f"{steps[n]:.4g} s" if n in steps else x["what"].get(n, "") for n in names]
        rows.append(
            [
                x["case"].replace(",", ", "),
                *cells,
                ", ".join(reversed(x["what"]["schedule"].split(", ")[:2])),
                f"{steps['schedule'] / steps.get('by hand', float('nan')) - 1:+.1%}",
            ]
        )
    return f"""## What the freedoms of a pipeline bring

The best hand layout with as many stages, by search; then plans on the mesh, each with one freedom more than the one before: every operator's (as many layers on each stage, 1f1b), the cuts', what
each stage keeps for backward, the schedule's. The same prices, each with its fastest number of micro-batches of those that were planned within 300 s. All fit on
every rank, by what its layers need.

{table(["case", "by hand", "free choice, even, 1f1b", "cut by time", "memory by stage", "schedule chosen", "which", "to by hand"], rows)}

{origin(results, "ablation")}"""


def published_experts(results: dict[str, Result]) -> str:
    r = results["published_experts"]
    rows = []
    for x in r["rows"]:
        if "refused" in x:
            rows.append([x["row"], "", "", x["refused"], "", ""])
            continue
        flat, levels = x["all at once"], x["once a node"]
        mine = x[x["dispatch"]]
        rows.append([
            x["row"], f"{x['measured']:,.0f} {x['unit'].split()[0]}", f"{mine['rate']:,.0f}", f"{mine['error']:+.1%}",
            f"{flat['error']:+.1%}, {levels['error']:+.1%}", ("" if mine["fits"] else "does not fit; ") + mine["layout"],
        ])  # fmt: skip
    left = "\n".join(f"- {what}: {why}." for what, why in r["not priced"].items())
    priced = [abs(x["error"]) for x in r["rows"] if "error" in x]
    return f"""## Mixtures of experts against published runs

Published training runs of mixtures of experts on H100, tokens forced to go evenly to experts, predicted by constants that were fitted to other runs, those of
dense models: nothing is fitted here. Rates are of a device. What a row does not state is the fastest that fits of micro-batches of 1, 2 and 4, of 1, 2 and 4
virtual stages, and of what is made again. The fifth column has the errors where each row of a token is sent to its expert on its own, and where a copy of a
token is sent to each node. {sum(e <= 0.1 for e in priced)} of {len(priced)} rows are within a tenth.

{table(["run", "measured", "predicted", "error", "all at once, once a node", "layout"], rows)}

Where a row is off: DeepSeek-V3 waits here for what experts exchange, all of which is taken to be exposed, with a token on as many nodes as chance has it; its
router allows four, and the run may have had some of it beside compute. gpt-oss under FSDP waits for gathered weights, so its rate follows the batch and the
micro-batches, neither of which is stated. Qwen3-30B-A3B fits here only where all of a layer is made again. Nothing says whether these are all of the causes.

Not priced:

{left}

{origin(results, "published_experts")}"""


def patterns(results: dict[str, Result]) -> str:
    r = results["patterns"]
    told = [x for x in r["rows"] if "found" in x]
    left = [f"{x['class'] or x['model']} ({x['error'].partition(':')[0]})" for x in r["rows"] if "error" in x]
    columns = ("attention", "softmax", "random", "experts", "gates of a known form")
    rows = [
        [x["model"], f"{x['found']['loss head']} of {x['found']['losses over classes']}", *(str(x["found"][c] or "") for c in columns)]
        for x in told
    ]
    heads = sum(x["found"]["loss head"] for x in told)
    losses = sum(x["found"]["losses over classes"] for x in told)
    return f"""## What is found in models

Training calls of {len(told)} architectures of transformers, unmodified, of small sizes and random numbers: calls of forward in the captured program that are, or become, operators of ours. Of
losses over classes {heads} of {losses} are found with the linear layer under them, which then makes no logits. Attention is one operator where a model calls torch's, without dropout of its weights;
what else has a softmax (attention of a model's own, routers of experts) stands in the column beside it. Random operators draw from a counter. A gate of a known form runs as a Triton kernel on GPUs that have them.
{f"Not captured at these sizes: {', '.join(left)}." if left else "All are captured."}

{table(["head, model", "loss head", "attention", "other softmax", "random", "experts", "their gates"], rows)}

{origin(results, "patterns")}"""
