"""Activation checkpointing: regions of a model are run again in backward, but for what a policy saves of them.

    by layer      `torch.utils.checkpoint.checkpoint` around regions of k layers each, or around every k-th layer (as torchtitan's selective option)
    by op list    the same around every layer, with `create_selective_checkpoint_contexts` and a list of operators whose results are saved:
                  all that is heavy (torch's recipe), all but every n-th product (torchtitan's policy has n = 2), attention alone

The policies are torch's, asked about every operator in order; a new one for every region, as `checkpoint` makes. A bias that is added to a product is asked
about with it, as torch's `addmm` is one operator (captured it is two). What a region hands on is another's
input, and outlives it; what lies outside of regions keeps all that backward reads ("eager"). Under `torch.compile` regions are tags that
min-cut keeps to, which then decides of the rest ("compiled").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from autopar.graph.graph import MUST_SAVE, PREFER_RECOMPUTE
from benchmarks.baselines.program import Program
from benchmarks.baselines.torch_partitioner import min_cut

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default)
ATTENTION = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)
HEAVY = (*PRODUCTS, *ATTENTION)

Regions = Mapping[str, int]  # operator of forward -> number of its region, in the order of the program
Policy = Callable[..., CheckpointPolicy]


def regions(program: Program, segment: int = 1, every: int = 1) -> Regions:
    """segment: layers to a region; every: of so many regions one is checkpointed."""
    numbers: dict[tuple[str, int], int] = {}
    found = {}
    for op in program.graph.ops:
        if op.name in program.layers:
            stack, layer = program.layers[op.name]
            if layer // segment % every == 0:
                found[op.name] = numbers.setdefault((stack, layer // segment), len(numbers))
    return found


def save_list(ops: Collection[Any]) -> Policy:
    return create_selective_checkpoint_contexts(list(ops))[0].policy_fn


def all_but_every(n: int) -> Policy:
    """Saves what is heavy, but not the n-th product, 2n-th, ..."""
    seen = 0

    def policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += op in PRODUCTS
        saves = op in HEAVY and not (op in PRODUCTS and seen % n == 0)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)[0].policy_fn


def tagged(program: Program, regions: Regions, policy: Callable[[], Policy] | None) -> dict[str, tuple[int, str]]:
    """Operator -> (its region, what the policy says of it). policy: makes a region's; None saves nothing."""
    targets = {n.name: n.target for n in program.captured.gm.graph.nodes}
    context = SelectiveCheckpointContext(is_recompute=False)
    product = biased(program)
    asked: dict[int, Policy] = {}
    out: dict[str, tuple[int, str]] = {}
    for name, region in regions.items():
        saves = False
        if policy is not None:
            if region not in asked:
                asked[region] = policy()
            if name in product:
                saves = out[product[name]][1] == MUST_SAVE
            else:
                target = ATTENTION[0] if program.rules[name].kind == "attention" else targets[name]
                saves = asked[region](context, target) in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        out[name] = (region, MUST_SAVE if saves else PREFER_RECOMPUTE)
    return out


def biased(program: Program) -> dict[str, str]:
    """Addition of a bias -> the product that it follows."""
    made_by = {op.out.name: op.name for op in program.graph.ops if op.target == "aten.mm.default"}
    sums = (op for op in program.graph.ops if op.target == "aten.add.Tensor" and len(op.inputs) == 2)
    return {op.name: made_by[op.inputs[0].name] for op in sums if op.inputs[0].name in made_by and len(op.inputs[1].shape) == 1}


def compiled(program: Program, tags: Mapping[str, tuple[int, str]]) -> frozenset[str]:
    """What is kept where the checkpointed model is compiled."""
    return min_cut(program, tags=tags)


def eager(program: Program, tags: Mapping[str, tuple[int, str]]) -> frozenset[str]:
    """What is kept where it is not."""
    handed = handed_on(program, {name: region for name, (region, _) in tags.items()})
    saved = set()
    for op in program.graph.ops:
        if op.direction == "forward":
            all_of_it = tags.get(op.name, (0, MUST_SAVE))[1] == MUST_SAVE
            saved |= {t.name for t in op.outputs if t is not None and (all_of_it or t.name in handed)}
    return frozenset(saved)


def handed_on(program: Program, regions: Regions) -> set[str]:
    """Results of regions that another region reads, or what is outside of them, or the user."""
    region_of = {t.name: regions[op.name] for op in program.graph.ops if op.name in regions for t in op.outputs if t is not None}
    out = {t for t in program.graph.outputs if t in region_of}
    for op in program.graph.ops:
        if op.direction == "forward":
            out |= {t.name for t in op.inputs if t.name in region_of and region_of[t.name] != regions.get(op.name)}
    return out
