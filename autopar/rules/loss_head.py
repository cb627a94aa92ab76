"""Log-probabilities of targets by a linear layer that makes no logits (`autopar.kernels.loss_head`): t tokens, v words, d features.

t d!, v d!, v?, t -> t, t, t                              three numbers a token; of the whole vocabulary on every rank, put together inside (vocabulary-parallel)
t, t?, t, t d!, v d!, v?, t, t -> t d!, v d!, v           gradients of h are sums over words, those of w and b over tokens
"""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line

FORWARD, BACKWARD = "autopar.linear_log_prob_v1.default", "autopar.linear_log_prob_backward_v1.default"


@rule(FORWARD)
def _log_prob(op: Op) -> Line:
    bias = ["v"] if isinstance(op.args[2], Tensor) else []
    # Where no total is wanted it is an empty tensor, the same on all ranks (`:all`).
    t, total = ("t", "t") if op.args[4] else ("t:all", "1")
    return Line(f"{', '.join([f'{t} d!', 'v:all^ d!', *bias, 't'])} -> t, {total}, t", kind="matmul")


@rule(BACKWARD)
def _log_prob_backward(op: Op) -> Line:
    total, bias = (isinstance(op.args[i], Tensor) for i in (1, 5))
    given = ["t+", *["t"] * total, "t", "t d!", "v+^ d!", *["v"] * bias, "t", "t"]
    made = [text if x else "1" for text, x in zip(("t d!", "v d!", "v"), op.args[11], strict=True)]
    return Line(f"{', '.join(given)} -> {', '.join(made)}", "0&1&2" if total else "0&1", "matmul")
