"""Attention. Heads are (g r): g key/value heads, each read by r query heads.

    b (g r) q e!, b g s e!, b g s d!, bias? -> b (g r) q d!, b (g r) q        causal: needs the queries' global indices

An axis on
    b, g, r   splits samples and heads (from a split of the sequence to one of heads and back: all-to-all, as DeepSpeed-Ulysses, Jacobs et al., 2023)
    q         splits queries, each rank having all keys (they are gathered)
    s         splits keys, and the same of the queries with them (`Rule.alongside`): keys and values go round (`autopar.kernels.ring`). As many queries as keys.
              A bias has all columns, t, of the queries that are here; one that wants its gradient keeps backward's keys together.
"""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line


def _heads(q: Tensor, k: Tensor) -> tuple[int, int]:
    groups = k.shape[1]
    return groups, q.shape[1] // groups


def bounds(op: Op) -> tuple[int, int]:
    """What is known of the bias: how far before and behind it a query sees keys; below zero: as far as there are any."""
    at = 11 if "_backward" in op.target else 7
    before, after = op.arg(at, "before", -1), op.arg(at + 1, "after", -1)
    assert isinstance(before, int) and isinstance(after, int)
    return before, after


def _bias(bias: Tensor, s: str) -> str:
    """The bias broadcasts in batch, heads and queries. s: keys, as the line has them; the columns of one whose keys may be split are a loop of their own."""
    b = "b" if bias.shape[0] != 1 else "1"
    h = "(g r)" if bias.shape[1] != 1 else "1"
    i = "q" if bias.shape[2] != 1 else "1"
    return f"{b} {h} {i} {'s!' if s == 's!' else 't!'}"


def _index(op: Op, at: int) -> str:
    return ", q" if isinstance(op.arg(at), Tensor) else ""


def _keys(q: Tensor, k: Tensor, q_index: object, bias_grad: bool = False) -> tuple[str, dict[str, str]]:
    """How the line has keys, and what an axis on them takes along."""
    circulate = q.shape[2] == k.shape[2] and not isinstance(q_index, Tensor) and not bias_grad
    return ("s:all", {"s": "q"}) if circulate else ("s!", {})


@rule("autopar.attention_v2.default")
def _attention(op: Op) -> Line:
    q, k, _, bias = op.args[:4]
    g, r = _heads(q, k)
    s, alongside = _keys(q, k, op.arg(6))
    mask = f", {_bias(bias, s)}" if isinstance(bias, Tensor) else ""
    return Line(
        f"b (g r) q e!, b g {s} e!, b g {s} d!{mask}{_index(op, 6)} -> b (g r) q d!, b (g r) q",
        kind="attention", sizes={"g": g, "r": r}, alongside=alongside,
    )  # fmt: skip


@rule("autopar.attention_backward_v3.default")
def _attention_backward(op: Op) -> Line:
    """dk and dv are sums over the queries and query heads that read them, dbias over what it broadcasts.

    All are linear in the gradient of out.
    """
    q, k, bias = op.args[1], op.args[2], op.args[6]
    g, r = _heads(q, k)
    wanted = isinstance(bias, Tensor) and bool(op.arg(10, "bias_grad"))
    s, alongside = _keys(q, k, op.arg(9), wanted)
    mask = f", {_bias(bias, s)}" if isinstance(bias, Tensor) else ""
    # Without a gradient of the bias that output is an empty tensor, whose one dim is no loop.
    dbias = _bias(bias, s) if isinstance(bias, Tensor) and wanted else "1"
    return Line(
        f"b+ (g+ r+) q+ d!, b (g r) q e!, b g {s} e!, b g {s} d!, b (g r) q d!, b (g r) q{mask}{_index(op, 9)} "
        f"-> b (g r) q e!, b g {s} e!, b g {s} d!, {dbias}",
        linear="0", kind="attention", sizes={"g": g, "r": r}, alongside=alongside,
    )  # fmt: skip
