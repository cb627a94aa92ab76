"""The sweep's models trained on gloo processes, by `autopar.compile` as anyone calls it, beside one device: loss, every gradient, parameters after each step of AdamW.

    python -m tests.sweep.processes --mesh pp=2 [--micro-batches 2] [--schedule 1f1b] [--layout fsdp] [--heads causal] [--models bert,llama] [--shard 0/2] [--seconds 600] [--layers 4] [--outputs]

--outputs: then all that they return in evaluation, too.

What simulated ranks do not show is run here: pipelines, whose stages are cut from whatever a model is.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import traceback
from collections import Counter
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from tests.dist.launch import run
from tests.dist.trained import difference, trained_beside
from tests.sweep.small import HEADS_OF, LAYERS, classes, deep, inputs, model

SEED, STEPS = 3, 2
NEAR = 1e-6  # of the largest element, in double precision: there are gradients that are nothing but noise, such as of a bias of keys


def evaluated(reference: nn.Module, compiled: Any, batch: dict[str, Any]) -> float:
    """The largest difference of any tensor that they return."""
    with torch.no_grad():
        pairs = zip(*(torch.utils._pytree.tree_leaves(dict(m.eval()(**batch))) for m in (reference, compiled)), strict=True)
        return max(difference(a.double(), b.double()) for a, b in pairs if isinstance(a, torch.Tensor))


def trained(head: str, kind: str, mesh: dict[str, int], how: dict[str, Any], layers: int = LAYERS, outputs: bool = False) -> dict[str, Any]:
    """What became of it: differences, or what was refused or failed."""
    deep(layers)
    torch.manual_seed(SEED)
    try:
        reference, (_, batch) = model(head, kind, torch.float64), inputs(head, kind, torch.float64)
        reference.train()
        torch.manual_seed(SEED)
        loss = copy.deepcopy(reference)(**batch).loss
        if loss is None or not torch.isfinite(loss):
            return {"unfit": f"its loss is {loss}"}
        loss.backward()
    except Exception as e:
        return {"unfit": f"{type(e).__name__}: {e}"}
    try:
        compiled = autopar.compile(copy.deepcopy(reference), mesh, backend="aot_eager", **how)
        found: dict[str, Any] = dict(trained_beside(reference, compiled, batch, SEED, STEPS))
        return {**found, "outputs": evaluated(reference, compiled, batch)} if outputs else found
    except AutoparError as e:
        return {"refused": str(e)}
    except Exception:
        return {"failed": traceback.format_exc()}


def told(got: dict[str, Any]) -> tuple[str, str]:
    for what in ("unfit", "refused", "failed"):
        if what in got:
            return what, got[what]
    far = {k: v for k, v in got.items() if not (math.isfinite(v) and v <= NEAR)}
    return ("differs", str(far)) if far else ("equal", "")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--mesh", default="pp=2")
    a.add_argument("--micro-batches", type=int, default=2)
    a.add_argument("--schedule", default=None)
    a.add_argument("--layout", default="fsdp")
    a.add_argument("--heads", default=",".join(HEADS_OF))
    a.add_argument("--models", default="", help="model types, such as bert,llama; default: all")
    a.add_argument("--shard", default="0/1", help="k/n: every n-th model, from the k-th")
    a.add_argument("--seconds", type=float, default=1e9)
    a.add_argument("--layers", type=int, default=LAYERS)
    a.add_argument("--outputs", action="store_true")
    o = a.parse_args()
    mesh = {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}
    how = {"layout": o.layout, "micro_batches": o.micro_batches, **({"schedule": o.schedule} if o.schedule else {})}
    k, n = map(int, o.shard.split("/"))
    wanted = [(h, t) for h in o.heads.split(",") for t in classes(h) if not o.models or t in o.models.split(",")][k::n]
    start, came = time.monotonic(), Counter[str]()
    for head, kind in wanted:
        if time.monotonic() - start > o.seconds:
            break
        began = time.monotonic()
        try:
            ranks = run(trained, math.prod(mesh.values()), head, kind, mesh, how, o.layers, o.outputs, timeout=400, patience_s=300)
            what, text = max((told(got) for got in ranks), key=lambda x: ("equal", "unfit", "refused", "differs", "failed").index(x[0]))
        except AssertionError as e:
            what, text = "failed", str(e)
        came[what] += 1
        print(f"{head:12} {kind:28} {time.monotonic() - began:5.1f} s  {what}  {text}".rstrip(), flush=True)
    print(f"{sum(came.values())} models in {time.monotonic() - start:.0f} s: {dict(came)}")


if __name__ == "__main__":
    main()
