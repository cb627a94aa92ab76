"""In which of transformers' architectures the linear layer under the loss is found (`autopar.capture.fusions`).

python -m tests.sweep.heads --heads causal,masked,seq2seq --models bert,llama
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from autopar.capture.capture import Call, capture, off_cache
from autopar.capture.fusions.table import LOSS_HEAD, fused
from autopar.rules.loss_head import FORWARD
from tests.sweep.small import HEADS_OF, classes, inputs, model

LOSSES = ("causal", "masked", "seq2seq")


def found(head: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Losses of a small model of `kind` that read scores of classes, and how many of them are found and replaced."""
    made, (_, kwargs) = model(head, kind, dtype).train(), inputs(head, kind, dtype)
    call = Call.of((), off_cache(made, kwargs))
    captured = capture(made, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors))
    losses = sum("nll_loss" in str(n.target) and "forward" in str(n.target) for n in captured.gm.graph.nodes)
    places = len(LOSS_HEAD.find(captured.gm.graph))
    assert places == sum(str(n.target) == FORWARD for n in fused(captured).gm.graph.nodes)
    return losses, places


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--heads", default=",".join(LOSSES), help=f"of {', '.join(HEADS_OF)}")
    a.add_argument("--models", default="", help="model types, such as bert,llama; default: all")
    o = a.parse_args()
    came = Counter[str]()
    for head in o.heads.split(","):
        for kind in classes(head):
            if o.models and kind not in o.models.split(","):
                continue
            start = time.monotonic()
            try:
                losses, places = found(head, kind)
            except Exception as e:
                what, text = "not captured", f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"[:150]
            else:
                what = "found" if losses and places == losses else "no loss over classes" if not losses else "left as it is"
                text = f"{places} of {losses}"
            came[what] += 1
            print(f"{head:8} {kind:28} {time.monotonic() - start:5.1f} s  {what:20}  {text}", flush=True)
    print(f"{sum(came.values())} models: {dict(came)}")


if __name__ == "__main__":
    main()
