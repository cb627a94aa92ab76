"""Routed experts (`autopar.kernels.experts`): t tokens, E = (x0 x1 ...) experts, a letter for each prime factor, k chosen for each token, d features in and out, f
between.

    t d!, t k!, t k!, (x0 x1 ..) (u! f+) d!, (x0 x1 ..) d! f+, b1? (x0 x1 ..) (u! f), b2? (x0 x1 ..) d! -> t d!

An axis on
    t         splits tokens, with all experts' weights there (data parallelism; sharded storage makes it FSDP)
    f         splits what an expert computes inside, all tokens there: a sum is left (tensor parallelism of experts)
    x0, ...   splits experts and tokens together: rows go to their experts and come back, inside of the operator (expert parallelism). Which tokens a rank has does
              not matter to it, so an axis takes any digit of t along (`Rule.pairs`). It is exact though the line, read as an einsum, would see a block diagonal.
u: gate and what it gates, before or behind f as the module has them; never split.
"""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.graph.mesh import primes
from autopar.rules import rule
from autopar.rules.grammar import Line

FORWARD, BACKWARD = "autopar.experts_v1.default", "autopar.experts_backward_v1.default"


def _line(operands: list[str], made: list[str], w1: Tensor, w2: Tensor, transposed: bool, linear: str = "") -> Line:
    hidden, features = w1.shape[2 if transposed else 1], w2.shape[1 if transposed else 2]
    experts = {f"x{i}": p for i, p in enumerate(primes(w1.shape[0]))}
    sizes = {**experts, "u": hidden // max(features, 1), "f": features}
    return Line(f"{', '.join(operands)} -> {', '.join(made)}", linear, "moe", sizes, dict.fromkeys(experts, "t"))


def _weights(w1: Tensor, transposed: bool, interleaved: bool) -> tuple[str, str, str, str]:
    """w1, w2, b1, b2."""
    inner = "(f+ u!)" if interleaved else "(u! f+)"
    # Where there is no bias its gradient is an empty tensor, the same on all ranks (`:all`).
    each = " ".join(f"x{i}:all" for i, _ in enumerate(primes(w1.shape[0])))
    e = f"({each})" if each else "1"
    return (
        f"{e} d! {inner}" if transposed else f"{e} {inner} d!",
        f"{e} f+ d!" if transposed else f"{e} d! f+",
        f"{e} {inner}",
        f"{e} d!",
    )


@rule(FORWARD)
def _experts(op: Op) -> Line:
    w1, w2 = op.args[3:5]
    transposed, interleaved = map(bool, op.args[7:9])
    given = _weights(w1, transposed, interleaved)
    biases = [text for text, b in zip(given[2:], op.args[5:7], strict=True) if isinstance(b, Tensor)]
    return _line(["t d!", "t k!", "t k!", *given[:2], *biases], ["t d!"], w1, w2, transposed)


@rule(BACKWARD)
def _experts_backward(op: Op) -> Line:
    """Linear in the gradient. Gradients of weights are sums over tokens, those of x and the scores sums over features."""
    w1, w2 = op.args[4:6]
    transposed, interleaved = map(bool, op.args[8:10])
    given = _weights(w1, transposed, interleaved)
    has = [isinstance(b, Tensor) for b in op.args[6:8]]
    biases = [text for text, there in zip(given[2:], has, strict=True) if there]
    made = ["t d!", "t k!", *given[:2], *(text if there else "1" for text, there in zip(given[2:], has, strict=True))]
    return _line(["t+ d!", "t+ d!", "t+ k!", "t+ k!", *given[:2], *biases], made, w1, w2, transposed, "0")
