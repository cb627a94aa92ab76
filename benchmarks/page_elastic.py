"""Parts of docs/benchmarks.md: runs that lose processes, and what failures cost."""

from __future__ import annotations

from typing import Any

from benchmarks.page_parts import Result, origin, size, table

LLAMA_3_H = 54 * 24 * 16384 / 419  # of a device: "The Llama 3 Herd of Models", 2024, section 3.3.4


def surviving(results: dict[str, Result]) -> str:
    r = results["elastic"]
    cost = [
        [f"copies every {c['every']}" if c["every"] else "without `elastic=`", f"{1e3 * c['step_s']:,.1f} ms", f"{c['ratio']:.3f}"]
        for c in r["cost"]
    ]
    names = ("detect_s", "group_s", "state_s", "step_s", "total_s")
    meshes = {"dp 4": r, "dp 2 x tp 2": results["elastic_tp"], "pp 2 x dp 2": results["elastic_pp"]}
    losses = [
        [mesh, str(x["rank"]), *(f"{1e3 * x[k]:,.0f} ms" for k in names), size(x["moved_bytes"])]
        for mesh, of in meshes.items()
        for x in of["losses"]
    ]
    parts = ("wait_s", "pause_s", "group_s", "state_s", "step_s")
    joins = [
        [
            str(x["rank"]),
            f"{x['start_s']:.1f} s",
            str(x["steps_meanwhile"]),
            *(f"{1e3 * x[k]:,.0f} ms" for k in parts),
            size(x["moved_bytes"]),
        ]
        for x in results["elastic_joins"]["joins"]
    ]
    ahead = results["elastic_templates"]
    plans = [
        [str(x["devices"]), f"{x['step_s']:.2f} s", size(x["memory_bytes"]), size(x["moved_bytes"]), str(x["idle"])] for x in ahead["sizes"]
    ]
    return f"""## Surviving a process

A Llama of {r["layers"]} layers and width {r["hidden"]}, `{r["layout"]}` on {r["processes"]} gloo processes of this machine ({r["backend"]}), under [the supervisor](elastic.md). From a kill in the midst of
a step to the next finished one, by part; the slowest survivor's times. Nothing is captured or compiled in it. The machine was shared with other programs.

{table(["mesh", "rank", "seen", "new group", "state moved", "step", "all", "moved"], losses)}

{_ahead(results)}
The same training, where another process takes the place of the one that was killed (`--rejoin 1`): from its start until it is
ready, with imports, capture and compilation, beside the others' steps on the same two cores; until all are between two steps; for how long the others stand still
for it, with its two parts; the first step. Other programs ran on the machine, too.

{table(["rank", "ready after", "steps meanwhile", "let in", "others stand", "new group", "state moved", "first step", "moved"], joins)}

{_soaked(results.get("elastic_soak"))}A step's time where nobody is lost, medians over {r["rounds"]} rounds in which cases took turns. On gloo a copy takes the cores that compute meanwhile; a network of its own
would not. Each rank kept {size(r["held_bytes"])} in host memory at most.

{table(["case", "step", "ratio"], cost)}

{_cost(results.get("elastic_cost"))}[Plans ahead](elastic.md#plans-ahead) of {ahead["model"]} on {ahead["cluster"]}, {ahead["batch"]} sequences of {ahead["tokens"]:,}, by the cost model's prices, made in
{ahead["seconds"]:.0f} s. "moves": from the number above, at most.

{table(["devices", "step", "memory", "moves", "idle"], plans)}

{origin(results, "elastic", "elastic_tp", "elastic_pp", "elastic_joins", "elastic_templates")}"""


def _ahead(results: dict[str, Result]) -> str:
    names = [n for n in ("elastic_moved", "elastic_moved_tp", "elastic_moved_pp") if n in results]
    if not names:
        return ""
    rows = [
        [_mesh(results[n]), str(x["rank"]), size(x["moved_bytes"]), size(x["least_bytes"]), "1.000" if x["moved_bytes"] == x["least_bytes"] else f"{x['moved_bytes'] / (x['least_bytes'] or 1):.3f}",
         f"{x['first_s']:.1f} s", f"{x['ahead_s']:.1f} s"]
        for n in names for x in results[n]["losses"]
    ]  # fmt: skip
    return f"""What moves, beside the least that must: what new shards have of which their ranks hold neither their own nor their partner's copy. And what the first step took, with capture and
compilation, and after it the steps for the mesh that is left, which training waits for; on a machine that others kept busy, so only their ratio tells anything.

{table(["mesh", "rank", "moved", "at least", "ratio", "first step", "steps ahead"], rows)}

{origin(results, *names)}

"""


def _mesh(r: Result) -> str:
    axes = {"pp": r["pp"], "dp": r["processes"] // (r["pp"] * r["tp"]), "tp": r["tp"]}
    return " x ".join(f"{a} {n}" for a, n in axes.items() if n > 1)


def _target(ratio: dict[str, Any]) -> str:
    """Beside what copies that hide should cost at most."""
    if ratio["high"] <= 1.02:
        return "That is within the 2 % that copies should cost at most."
    return (
        "That is not shown to be within the 2 % that copies should cost at most."
        if ratio["low"] <= 1.02
        else "That is more than the 2 % that copies should cost at most."
    )


def _cost(r: Result | None) -> str:
    if r is None:
        return ""
    c, s = r["ratio"], r["step_s"]
    where = (
        "the link that the step's collectives take"
        if r["copies"] == "shared"
        else f"a link of their own of {r['copies'].split(',')[1]} MB a second"
    )
    return f"""Over a slow link, on which waiting takes no core (`benchmarks/slow_link`), {r["processes"]} processes, `{r["layout"]}`, a copy after each step over {where}: {s["with"]:.2f} s a step, without
`elastic=` {s["without"]:.2f}; in turns of some steps each, with by without, {c["median"]:.3f} ({c["low"]:.3f} to {c["high"]:.3f}). {_target(c)} A copy is {size(r["copy_bytes"])} a rank, which that link carries in
{r["link_needs_s"]:.2f} s: it is predicted {"to hide" if r["hides"] else "not to hide"}. Kept in host memory: {size(r["held_bytes"])}, predicted {size(r["predicted_bytes"])}. Copying the shard and the sums over it and its partner's are waited for; gloo moves the bytes on the cores that compute, which a network would not; and other programs kept
these busy. Steps are of {r["batch"] * r["sequence"]:,} tokens.

{origin({"elastic_cost": r}, "elastic_cost")}

"""


def _soaked(r: Result | None) -> str:
    if r is None:
        return ""
    rows = [
        [str(s["seed"]), ", ".join(s["ways"]), "yes" if s["rejoin"] else "", str(s["runs"]), str(s["kills"]), str(s["joins"]), f"{s['seconds']:,.0f} s", str(s["failures"])]
        for s in r["soaks"]
    ]  # fmt: skip
    kills, runs = (sum(s[k] for s in r["soaks"]) for k in ("kills", "runs"))
    return f"""Processes killed at random places of random steps, {kills} in {runs} runs of four, some two at once or in a recovery, some with another process in their place. A run is a failure
where its losses, parameters, buffers or schedule are not those of one process of plain PyTorch, or where it does not end.

{table(["seed", "ways", "rejoin", "runs", "killed, survived", "joins", "time", "failures"], rows)}

{origin({"elastic_soak": r}, "elastic_soak")}

"""


def failures(results: dict[str, Result]) -> str:
    r = results["elastic_simulate"]
    first = r["cases"][0]
    s = first["setting"]
    rates = [c for c in r["cases"] if c["setting"] == s]
    slower = [c for c in r["cases"] if c["setting"] != s]
    by_rate = [[o["name"], *(f"{_named(c, o['name'])['goodput']:.2%}" for c in rates)] for o in first["outcomes"][1:]]
    causes = ("slower", "copies", "writing", "lost", "recovering", "waiting")
    spent = [
        [o["name"], f"{o['goodput']:.2%}", f"{o['held']:.2%}", f"{o['in_use']:.1%}", f"{o['undone']:,}", str(o["restarts"]), *(f"{o['seconds'][k] / 864 / first['days']:.2f} %" for k in causes)]
        for o in first["outcomes"][1:]
    ]  # fmt: skip
    ours = [o["name"] for o in first["outcomes"] if o["name"].startswith("templates")]
    by_regroup = [[f"{c['setting']['regroup_s']:g} s", *(f"{_named(c, n)['goodput']:.2%}" for n in ours)] for c in (first, *slower)]
    sizes = {x["units"]: x["step_s"] for x in r["sizes"]}
    one_less = sizes[first["units"] - 1] / sizes[first["units"]] - 1
    return f"""## What failures cost

[Failures](elastic.md#what-failures-cost) drawn for {first["days"]:g} days of {first["model"]} on {first["cluster"]}, {r["batch"]:,} sequences of {r["tokens"]:,}, a node in repair for {r["repair"]}, replayed on predicted steps; nothing was
run at this size. Llama 3's rate, 419 interruptions in 54 days of 16,384 H100, is one in {LLAMA_3_H / r["devices"]:.1f} h here. Goodput, where the whole cluster has one failure in so long:

{table(["", *(f"one in {c['mtbf']} ({c['failures']})" for c in rates)], by_rate)}

Where the time goes at one in {first["mtbf"]}. "Of all held" is the goodput over all nodes, those that stand by too; "done again" counts whole steps. The best interval between checkpoints that are waited for is
{first["best_s"]:,.0f} s (Daly's formula says {first["daly_s"]:,.0f}, Young's {first["young_s"]:,.0f}); one takes {first["write_s"]:.2f} s, a restart {s["restart_s"]:g} s, which is assumed.

{table(["", "goodput", "of all held", "in use", "done again", "restarts", "units missing", "copies", "writing", "done in vain", "recovering", "waiting"], spent)}

![Where the time goes, and hours behind a run without failures](figures/failures.svg)

One node less makes a step {one_less:.0%} longer here: sequences are whole, and everybody has one more. With spares, and without, that is most of what templates lose; a batch
of more sequences a device loses less. Regrouping and joining were measured on four processes; if they took longer, at the same failures:

{table(["both take", *ours], by_regroup)}

Plans for {first["units"]} down to {first["covered"]} nodes were made in {r["planned_s"]:.0f} s, all replays took {r["replayed_s"]:.1f} s.

{origin(results, "elastic_simulate")}"""


def _named(case: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(o for o in case["outcomes"] if o["name"] == name)
    return found
