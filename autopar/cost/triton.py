"""Which passes of our operators Triton kernels make on the devices that are planned for, as bodies of `autopar.kernels` decide it on tensors. Torch-free.

scores    the loss head's, over tiles of scores                      h and w of a dtype that kernels take
merge     of attentions over several sets of keys, forward           keys that go round, or queries that a rank has some of; of causal attention without a mask
gate      between the products of routed experts                     the same, and a gate of a known form
combine   rows of routed experts put in order, weighted, summed      the same, of scores too
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from autopar.cost.compute import is_backward, is_causal
from autopar.cost.experts import is_experts
from autopar.cost.loss_head import dtype, is_loss_head
from autopar.cost.ring import ring_axes
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.kernels.triton_takes import has_form
from autopar.rules import lookup
from autopar.rules.strategy import Strategy

TRITON = "triton"  # of a plan's solver
ATTENTION = "autopar.attention_v2.default"
WhyNot = Callable[..., str]  # of dtypes of operands: `Device.why_no_triton`, or what a device at hand says


class Use(NamedTuple):
    """kernel: a file of `kernels/triton`; why_not: why its operator does the same in torch, "" where it does not."""

    kernel: str
    operator: str
    why_not: str


def uses(op: Op, strategy: Strategy, mesh: Mesh, why_not: WhyNot) -> Iterator[Use]:
    """Of an operator under its strategy: nothing where it makes no pass that there is a kernel for."""
    name = re.sub(r"_v\d+$", "", op.target.split(".")[1])
    if is_loss_head(op):
        yield Use("scores", name, why_not(dtype(op)))
    elif is_experts(op):
        x, _, scores, w1, w2 = (t.dtype for t in op.inputs[is_backward(op) : 5 + is_backward(op)])
        form = "" if has_form(str(op.args[9 + is_backward(op)])) else "it computes what no kernel does"
        yield Use("gate", name, why_not(w1, *([scores] if is_backward(op) else [])) or form)
        yield Use("combine", name, why_not(w2, x, *([] if is_backward(op) else [scores])))
    elif op.target == ATTENTION:
        some = any(letter == "q" for a, (letter, _) in strategy.items() if mesh.axis_size(a) > 1)
        if ring_axes(lookup(op), strategy, mesh) or (some and is_causal(op)):
            yield Use("merge", name, why_not(op.inputs[0].dtype))


def told_of(ops: Iterable[tuple[Op, Strategy, int]], mesh: Mesh, why_not: WhyNot) -> dict[str, str]:
    """What a plan's solver says of operators under their strategies, and of how many each stands for: "scores in linear_log_prob (1 x); gate in experts (24 x) by
    torch: it computes what no kernel does". Nothing where none has a pass that there is a kernel for."""
    found: dict[str, dict[str, Counter[str]]] = {}  # by reason and kernel
    for op, strategy, n in ops:
        for use in uses(op, strategy, mesh, why_not):
            found.setdefault(use.why_not, {}).setdefault(use.kernel, Counter())[use.operator] += n
    said = {
        reason: "; ".join(
            f"{kernel} in {', '.join(f'{o} ({n} x)' for o, n in sorted(some.items()))}" for kernel, some in sorted(kernels.items())
        )
        for reason, kernels in sorted(found.items())
    }
    parts = [said.pop("", "none"), *(f"{what} by torch: {reason}" for reason, what in said.items())]
    return {TRITON: "; ".join(parts)} if found else {}
