"""Features that were each tested alone, together: a few steps on gloo processes beside one device.

python -m tests.dist.test_combinations --model gpt2 --processes 4
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.dist.launch import run
from tests.dist.trained import trained_beside
from tests.models import ZOO
from tests.wide import cases

SEED, STEPS = 3, 3
HOST = autopar.Offload(host=True)
# What is asked of autopar.compile; the mesh is one axis over all processes, `pp`, `tp` or `dp`.
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "stages, a head without logits": ("pp", {"layout": "fsdp", "micro_batches": 4, "loss_head": "chunked"}),
    "planned stages, a head without logits": ("pp", {"micro_batches": 4, "loss_head": "chunked"}),
    "stages, offload": ("pp", {"layout": "fsdp", "micro_batches": 4, "offload": HOST}),
    "micro-batches, a head without logits, buckets": (
        "dp", {"layout": "fsdp", "micro_batches": 2, "loss_head": "chunked", "bucket_collectives": True},
    ),
    "planned micro-batches, offload": ("dp", {"micro_batches": 2, "offload": HOST}),
    "micro-batches, columns and rows": ("tp", {"layout": "tp", "micro_batches": 2}),
    "micro-batches, columns and rows, a head without logits": ("tp", {"layout": "tp", "micro_batches": 2, "loss_head": "chunked"}),
    "micro-batches of any length": ("dp", {"layout": "fsdp", "micro_batches": 2, "dynamic": True}),
    "any length, a head without logits, buckets": ("dp", {"layout": "fsdp", "dynamic": True, "loss_head": "chunked", "bucket_collectives": True}),
    "local micro-batches, a head without logits": ("dp", {"layout": "fsdp", "micro_batches": 2, "inputs": "local", "loss_head": "chunked"}),
}  # fmt: skip
NOW = ("stages, a head without logits", "micro-batches, a head without logits, buckets", "micro-batches, columns and rows")


def together(what: str, name: str) -> float:
    """The largest difference of losses, gradients and parameters."""
    axis, asked = TOGETHER[what]
    torch.manual_seed(SEED)
    reference, batch = ZOO[name].build(2).train(), ZOO[name].inputs(8, 16)
    local = asked.get("inputs") == "local"
    if local:
        batch["labels"] = batch["input_ids"]  # as many on every rank, so that the mean over ranks is the batch's
    torch.manual_seed(SEED)
    compiled = autopar.compile(
        copy.deepcopy(reference),
        {axis: dist.get_world_size()},
        backend="aot_eager",
        options=None if "layout" in asked else {"seconds": 5},
        **asked,
    )
    return max(trained_beside(reference, compiled, batch, SEED, STEPS, local).values())


@pytest.mark.parametrize("what", cases(TOGETHER, NOW))
def test_equals_one_device(what: str) -> None:
    assert max(run(together, 2, what, "toy-dropout")) < 2e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy-dropout", choices=sorted(ZOO))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    for what in TOGETHER:
        print(f"{what:56} {max(run(together, args.processes, what, args.model)):.1e}", flush=True)


if __name__ == "__main__":
    main()
