"""What people ask of a step besides its seconds: how much it learns from a second, what of the devices' peak it uses, what communication adds.

In: the folded program, and the decision of a solved problem. Out: numbers, some of them only where they have a meaning:

    tokens_per_s, samples_per_s   of all devices. Tokens where an input has a row of whole numbers for each sequence, else samples
    mfu                           model FLOPs (Chowdhery et al., "PaLM", appendix B) of the peak of the dtype that most of them are computed in: products forward
                                  and backward, attention three times its forward, half of it where it is causal; what runs again does not count
    exposed_s                     what communication adds to the kernels' time: collectives that are waited for at once, what others take from compute that
                                  runs beside them, and links that are busy for longer than a stage computes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.cost import compute, experts, loss_head
from autopar.graph.graph import Tensor
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.storage import batch_size
from autopar.rules import lookup
from autopar.solver.fold import Folded
from autopar.solver.problem import FORWARD, Decision, Problem, Times

ATTENTION_BACKWARD = 2.0  # of the model's FLOPs: the kernel computes the scores once more, which does not count
LINKS = ("intra", "inter")


def figures(
    folded: Folded, mesh: Mesh, cluster: Cluster, problem: Problem, decision: Decision, step_s: float, hidden: Mapping[int, float]
) -> dict[str, float]:
    """The numbers of the module's head, by name. hidden: per stage, seconds of collectives inside operators that these hide themselves."""
    out = {"exposed_s": exposed_s(problem, decision, hidden)}
    if step_s <= 0:
        return out
    if tokens := tokens_of(folded.graph.inputs):
        out["tokens_per_s"] = tokens / step_s
    elif samples := batch_size(folded.graph.inputs):
        out["samples_per_s"] = samples / step_s
    flops = model_flops(folded, mesh)
    if flops:
        peak = cluster.device.peak(max(flops, key=lambda dtype: (flops[dtype], dtype)))
        out["mfu"] = sum(flops.values()) / (step_s * mesh.size * peak)
    return out


def tokens_of(inputs: tuple[Tensor, ...]) -> int:
    """Of all sequences of a step; 0 where no input has tokens."""
    return next((t.shape[0] * t.shape[1] for t in inputs if len(t.shape) == 2 and t.dtype in ("int64", "int32")), 0)


def model_flops(folded: Folded, mesh: Mesh) -> dict[str, float]:
    """Of all devices, by the dtype that is computed in."""
    out: dict[str, float] = defaultdict(float)
    for op in folded.graph.ops:
        times = folded.count.get(op.name, 0)  # one of every class stands for all
        if not times:
            continue
        rule = lookup(op)
        once = compute.flops(op, rule, {}, mesh)
        if rule.kind == "attention" and compute.is_backward(op):
            once *= ATTENTION_BACKWARD / compute.ATTENTION_BACKWARD
        elif loss_head.is_loss_head(op) and compute.is_backward(op):
            once *= 1 - 1 / loss_head.products(op)  # the scores are made once more
        elif experts.is_experts(op):
            once -= experts.remade_flops(op, compute.local_sizes(rule, {}, mesh))
        if once:
            out[compute.compute_dtype(op)] += times * once
    return out


def exposed_s(problem: Problem, decision: Decision, hidden: Mapping[int, float]) -> float:
    """How much shorter the step would be if nothing was communicated."""
    busy: dict[tuple[int, str], float] = defaultdict(float)
    kernels: dict[int, float] = defaultdict(float, hidden)  # by stage; what is hidden is in no account of compute
    for times, moves in _paid(problem, decision):
        for a, seconds in times.items():
            stage, resource = problem.accounts[a].stage, problem.accounts[a].resource
            busy[stage, resource] += seconds
            if not moves and resource == "compute":
                kernels[stage] += seconds
            elif not moves and resource in LINKS:  # a collective inside an operator, whose seconds its compute has too
                kernels[stage] -= seconds
    return sum(max(0.0, max(busy[s, r] for r in ("compute", *LINKS)) - kernels[s]) for s in range(len(problem.stages)))


def once_s(problem: Problem, decision: Decision) -> dict[str, float]:
    """Of a step that stands for several: what links are busy with that is done once for all of them, what compute loses to that, and what forward and backward take without it."""
    busy: dict[tuple[int, str], float] = defaultdict(float)
    once: dict[tuple[int, str], float] = defaultdict(float)
    for times, _ in _paid(problem, decision):
        for a, seconds in times.items():
            busy[problem.accounts[a].stage, problem.accounts[a].resource] += seconds
    for (v, direction), used in decision.arcs.items():
        flow = problem.values[v].forward if direction == FORWARD else problem.values[v].backward
        assert flow is not None
        for a in used:
            for i, seconds in flow.arcs[a].once.items():
                once[problem.accounts[i].stage, problem.accounts[i].resource] += seconds

    def alone(stage: int) -> float:
        return max(t - once[s, r] for (s, r), t in [*busy.items(), ((stage, ""), 0.0)] if s == stage)

    def of_links(stage: int) -> float:
        return max(once[stage, r] for r in LINKS)

    lost = sum(seconds for (_, r), seconds in once.items() if r == "compute")
    told = {"forward_alone_s": alone(0), "backward_alone_s": alone(1), "contended_once_s": lost}
    return {**told, "gathered_once_s": of_links(0), "reduced_once_s": of_links(1)}


def _paid(problem: Problem, decision: Decision) -> Iterator[tuple[Times, bool]]:
    """What operators take, also to keep their results, and what moves values (True): that is all communication, whatever account it is in."""
    x = decision.strategies
    for c, choice in enumerate(problem.choices):
        yield choice.times[x[c]], False
    for r in decision.rerun:
        yield problem.reruns[r].times[x[problem.reruns[r].choice]], False
    for v, kept in decision.kept.items():  # written and read by kernels; what carries it elsewhere is in accounts of its own
        for k in kept:
            yield problem.values[v].policies[k].times, False
    for (v, direction), used in decision.arcs.items():
        flow = problem.values[v].forward if direction == FORWARD else problem.values[v].backward
        assert flow is not None
        for a in used:
            yield flow.arcs[a].times, True
