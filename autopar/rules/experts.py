"""Routed experts (`autopar.kernels.experts`): T = (p t) tokens, E = (p q) experts, K chosen for each, D features in and out, F = f features between.

    (p t) d!, (p t) k!, (p t) k!, (p q!) (u! f+) d!, (p q!) d! f+, b1? (p q!) (u! f), b2? (p q!) d! -> (p t) d!

An axis on
    t   splits tokens, with all experts' weights there (data parallelism; sharded storage makes it FSDP)
    f   splits what an expert computes inside, all tokens there: a sum is left (tensor parallelism of experts)
    p   splits experts and tokens together: rows go to their experts and come back, inside of the operator (expert parallelism). Which tokens a rank has does not
        matter to it, so the letter may stand for both; it is exact though the line, read as an einsum, would only see a block diagonal.
The features u of the first product, gate and up, stand before or behind f as the module has them; the letter of gate and up is never split.
"""

from __future__ import annotations

import math

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line

FORWARD, BACKWARD = "autopar.experts_v1.default", "autopar.experts_backward_v1.default"


def _sizes(tokens: int, w1: Tensor, w2: Tensor, transposed: bool) -> dict[str, int]:
    """p: what both the number of experts and that of tokens have in common."""
    hidden, features = w1.shape[2 if transposed else 1], w2.shape[1 if transposed else 2]
    p = math.gcd(w1.shape[0], tokens)
    return {"p": p, "q": w1.shape[0] // p, "u": hidden // max(features, 1), "f": features}


def _weights(transposed: bool, interleaved: bool) -> tuple[str, str, str, str]:
    """w1, w2, b1, b2."""
    inner = "(f+ u!)" if interleaved else "(u! f+)"
    return (
        f"(p q!) d! {inner}" if transposed else f"(p q!) {inner} d!",
        "(p q!) f+ d!" if transposed else "(p q!) d! f+",
        f"(p q!) {inner}",
        "(p q!) d!",
    )


@rule(FORWARD)
def _experts(op: Op) -> Line:
    x, w1, w2 = op.args[0], op.args[3], op.args[4]
    transposed, interleaved = map(bool, op.args[7:9])
    given = _weights(transposed, interleaved)
    biases = [text for text, b in zip(given[2:], op.args[5:7], strict=True) if isinstance(b, Tensor)]
    operands = ["(p t) d!", "(p t) k!", "(p t) k!", *given[:2], *biases]
    return Line(f"{', '.join(operands)} -> (p t) d!", kind="moe", sizes=_sizes(x.shape[0], w1, w2, transposed))


@rule(BACKWARD)
def _experts_backward(op: Op) -> Line:
    """Linear in the gradient. Gradients of weights are sums over tokens, those of x and the scores sums over features. Where there is no bias its gradient is an
    empty tensor, the same on all ranks (`:all`)."""
    x, w1, w2 = op.args[1], op.args[4], op.args[5]
    transposed, interleaved = map(bool, op.args[8:10])
    given = _weights(transposed, interleaved)
    has = [isinstance(b, Tensor) for b in op.args[6:8]]
    biases = [text for text, there in zip(given[2:], has, strict=True) if there]
    operands = ["(p:all t+) d!", "(p t+) d!", "(p t+) k!", "(p t+) k!", *given[:2], *biases]
    made = ["(p t) d!", "(p t) k!", *given[:2], *(text if there else "1" for text, there in zip(given[2:], has, strict=True))]
    return Line(f"{', '.join(operands)} -> {', '.join(made)}", linear="0", kind="moe", sizes=_sizes(x.shape[0], w1, w2, transposed))
