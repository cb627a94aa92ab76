"""Where the linear layer under a loss is found in what people write, and that what takes its place makes no logits and rounds as they do."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.capture.capture import Call, Captured, capture, off_cache
from autopar.capture.fusions import log_prob
from autopar.capture.fusions.table import LOSS_HEAD, fused
from autopar.kernels.tiles import TILE
from autopar.rules.loss_head import BACKWARD, FORWARD
from tests.heads import HEADS, LARGER, NO_HEADS, WORDS, Output, Plain, plain
from tests.sweep.heads import found
from tests.wide import cases, wide

BATCH, SEQ = 4, 12


def captured(model: nn.Module, given: dict[str, Any], loss_fn: Any = None, **how: Any) -> Captured:
    call = Call.of((), off_cache(model, given))
    return capture(model.train(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), loss_fn=loss_fn, **how)


def built(name: str) -> Captured:
    torch.manual_seed(0)
    return captured(*{**HEADS, **NO_HEADS}[name](BATCH, SEQ))


def called(gm: fx.GraphModule, target: str) -> int:
    return sum(str(n.target) == target for n in gm.graph.nodes)


@pytest.mark.parametrize("name", HEADS)
def test_no_logits_are_left(name: str) -> None:
    c = built(name)
    words, tokens = {WORDS, LARGER}, {BATCH * SEQ, BATCH * (SEQ - 1), BATCH * SEQ // 2}

    def logits(gm: fx.GraphModule) -> list[str]:
        return [n.name for n in gm.graph.nodes if (s := shape(n))[-1:] and s[-1] in words and math.prod(s[:-1]) in tokens]

    made = fused(c)
    assert logits(c.gm) and not logits(made.gm)
    heads = len(LOSS_HEAD.find(c.gm.graph))
    assert [called(made.gm, target) for target in (FORWARD, BACKWARD)] == [heads, heads] and heads >= 1
    assert not LOSS_HEAD.find(made.gm.graph)
    assert fused(made) is made
    assert not called(c.gm, FORWARD), "the captured program is changed"


def shape(n: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(n.meta.get("val"), "shape", ()))


@pytest.mark.parametrize("name", NO_HEADS)
def test_what_is_another_loss_is_left(name: str) -> None:
    c = built(name)
    assert fused(c) is c


def test_logits_that_are_asked_for_are_made() -> None:
    """The same model, once for its loss alone, once for all it returns."""
    model, given, _ = HEADS["llama"](BATCH, SEQ)
    assert fused(captured(model, given)) is not (c := captured(model, given))
    everything = captured(model, given, loss_only=False)
    assert fused(everything) is everything
    assert LOSS_HEAD.find(c.gm.graph)


class Kept(Plain):
    """The user wants the logits kept for backward."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(self.loss(autopar.must_save(self.head(torch.tanh(self.inner(x)))), labels))


def test_logits_that_are_to_be_kept_are_made() -> None:
    c = captured(*plain(Kept)(BATCH, SEQ))
    assert fused(c) is c


def test_evaluation_has_no_logits_either() -> None:
    model, given, _ = HEADS["llama"](BATCH, SEQ)
    made = fused(captured(model, given, grad=False))
    assert called(made.gm, FORWARD) == 1 and called(made.gm, BACKWARD) == 0


def test_a_scale_is_of_what_is_capped() -> None:
    """cap tanh(s u / cap), where a model may scale before, and granite divides."""
    head = LOSS_HEAD.find(built("capped").gm.graph)[0].logits
    assert (head.cap, head.scale) == (2.0, pytest.approx(0.7)) and head.b is not None
    head = LOSS_HEAD.find(built("granite").gm.graph)[0].logits
    assert (head.cap, head.scale) == (0.0, 0.25)
    assert LOSS_HEAD.find(built("gemma2").gm.graph)[0].logits.cap == 3.0


def run(c: Captured, model: nn.Module, given: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """What the captured step gives on these numbers, in forward and backward."""
    state = dict(model.state_dict(keep_vars=True))
    tensors = list(given.values())
    values = []
    for role, n in zip(c.inputs, (n for n in c.gm.graph.nodes if n.op == "placeholder"), strict=True):
        if role.kind in ("param", "buffer"):
            t = state[role.name].detach() if role.name in state else dict(model.named_buffers())[role.name]
            values.append(t.to(dtype) if t.is_floating_point() and n.meta["val"].dtype == dtype else t)
        else:
            values.append(torch.ones((), dtype=n.meta["val"].dtype) if role.kind == "tangent" else tensors[role.index])
    with torch.no_grad():
        return [t for t in fx.Interpreter(flat(c.gm)).run(*values) if t is not None]


def flat(gm: fx.GraphModule) -> fx.GraphModule:
    """As passes read it: what it returns is one list."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


@pytest.mark.parametrize(("name", "tile"), cases(product(["llama", "gemma2", "granite"], [TILE, 300]), [("llama", TILE)]))
def test_in_bfloat16_it_rounds_as_the_plain_step(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same step in float32, errors are no larger than those of the captured step in bfloat16 that makes its logits."""
    monkeypatch.setattr(log_prob, "TILE", tile)
    torch.manual_seed(0)
    model, given, _ = HEADS[name](BATCH, SEQ)
    exact = run(captured(model, given), model, given, torch.float32)
    model = model.bfloat16()
    plain_step = captured(model, given)
    theirs, ours = (run(c, model, given, torch.bfloat16) for c in (plain_step, fused(plain_step)))
    assert len(theirs) == len(ours) == len(exact)
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        mine, its = (float((t.float() - e).norm() / e.norm().clamp(min=1e-30)) for t in (a, b))
        assert mine <= 1.25 * its + 1e-3, (i, mine, its)


@pytest.mark.parametrize("target", [WORDS, WORDS + 7, -1, -99])
def test_a_target_that_is_no_class_is_an_error(target: int) -> None:
    model, given, _ = HEADS["plain"](BATCH, SEQ)
    given["labels"][2, 1] = target
    c = fused(captured(model, given))
    with pytest.raises(IndexError, match="out of bounds"):
        run(c, model, given, torch.float32)


CAUSAL = """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 granite olmo olmo2 olmoe mixtral qwen3_moe gpt2 gpt_neox gptj opt bloom falcon cohere cohere2
    stablelm starcoder2 glm glm4 smollm3 helium codegen mpt ernie4_5 exaone4 persimmon xglm biogpt gpt_oss deepseek_v3 mamba modernbert-decoder""".split()  # noqa: SIM905
MASKED = "bert roberta albert electra distilbert camembert xlm-roberta deberta-v2 modernbert bart".split()  # noqa: SIM905
SEQ2SEQ = "t5 mt5 bart mbart pegasus marian".split()  # noqa: SIM905
EVERY = [*(("causal", k) for k in CAUSAL), *(("masked", k) for k in MASKED), *(("seq2seq", k) for k in SEQ2SEQ)]


@wide
@pytest.mark.parametrize(("head", "kind"), EVERY, ids=str)
def test_found_in_transformers(head: str, kind: str) -> None:
    losses, places = found(head, kind)
    assert losses == places == 1
