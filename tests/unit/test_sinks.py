"""Attention with sinks: as an extra score of each row's softmax, and as it is captured of transformers' models, which make scores of queries x keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Call, capture, off_cache
from autopar.kernels.sinks import attention_with_sinks
from tests.wide import cases

pytestmark = pytest.mark.usefixtures("one_process")


def by_formulas(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, is_causal: bool, scale: float) -> Tensor:
    heads = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(heads, 1).mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)
    s = s if bias is None else s + bias
    s = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v.repeat_interleave(heads, 1)


def operands(dtype: torch.dtype, queries: int = 6, keys: int = 6) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), (1, 4, queries, keys), (4,))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("bias", "is_causal", "keys"), [(False, True, 6), (False, False, 9), (True, False, 9), (True, True, 6)])
def test_an_extra_score(bias: bool, is_causal: bool, keys: int) -> None:
    q, k, v, b, sinks = operands(torch.float64, keys=keys)
    given = b if bias else None
    got, want = (f(q, k, v, given, sinks, is_causal, 0.3) for f in (attention_with_sinks, by_formulas))
    torch.testing.assert_close(got, want)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [q, k, v, *([b] if bias else []), sinks]
    for x, y in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(x, y)
    assert torch.autograd.gradcheck(lambda q, s: attention_with_sinks(q, k, v, given, s, is_causal, 0.3), (q, sinks))


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_row_without_keys_has_its_sink_alone(hidden: float) -> None:
    q, k, v, _, sinks = operands(torch.float32)
    bias = torch.zeros(1, 1, 6, 6)
    bias[:, :, 2] = hidden
    out = attention_with_sinks(q, k, v, bias, sinks, False, 0.3)
    assert out[:, :, 2].abs().max() == 0
    out.square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v, sinks))


def test_in_half_precision() -> None:
    low, high = operands(torch.bfloat16, 64, 64), operands(torch.float32, 64, 64)
    got, want = attention_with_sinks(*low[:3], None, low[4], True, 0.3), by_formulas(*high[:3], None, high[4], True, 0.3)
    torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.03)
    got.float().sum().backward()
    want.sum().backward()
    assert low[4].grad is not None and high[4].grad is not None
    torch.testing.assert_close(low[4].grad.float(), high[4].grad, rtol=0.05, atol=0.2)


# ---- captured ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "num_hidden_layers": 2, "sliding_window": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "MiMoV2Flash": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def model_of(name: str, **config: Any) -> nn.Module:
    made = getattr(T, f"{name}Config", None)
    if made is None:
        pytest.skip(f"transformers {T.__version__} has no {name}")
    torch.manual_seed(0)
    model: nn.Module = getattr(T, f"{name}ForCausalLM")(made(**{**SIZES, **MODELS[name], **config})).float()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith("sinks"):
                p.normal_()
    return model


def targets(model: nn.Module, **inputs: Any) -> list[str]:
    call = Call.of((), off_cache(model, inputs))
    found = capture(model.train(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors))
    return [str(n.target) for n in found.gm.graph.nodes if n.op == "call_function"]


def batch(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "labels": ids, **({"attention_mask": mask} if padded else {})}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", cases(MODELS, ["GptOss"]))
def test_models(name: str, padded: bool) -> None:
    one = model_of(name)
    ours = autopar.compile(copy.deepcopy(one), backend="aot_eager")
    got, want = ours(**batch(padded)).loss, one(**batch(padded)).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.backward()
    want.backward()
    total = sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None) ** 0.5
    for (n, p), q in zip(one.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            assert float((q.grad.full_tensor() - p.grad).norm()) <= 2e-5 * float(p.grad.norm()) + 1e-6 * total, n
    (step,) = ours._programs.steps()
    calls = [str(n.target) for n in step.captured.gm.graph.nodes]
    assert calls.count("autopar.attention_v2.default") == calls.count("autopar.attention_backward_v3.default") == 2
    assert one.config._attn_implementation == ours.config._attn_implementation == "eager"


def test_what_asks_for_probabilities_or_drops_them_stays() -> None:
    plain = model_of("GptOss")
    assert "autopar.attention_v2.default" in targets(plain, **batch(False))
    assert "autopar.attention_v2.default" not in targets(model_of("GptOss", attention_dropout=0.1), **batch(False))
    assert "autopar.attention_v2.default" not in targets(plain, **batch(False), output_attentions=True)


def test_flex_attention_means_the_same() -> None:
    """It scales by the log-sum-exp, which is not captured by itself."""
    model = model_of("GptOss")
    want = targets(model, **batch(True))
    model.config._attn_implementation = "flex_attention"
    assert targets(model, **batch(True)) == want
    assert model.config._attn_implementation == "flex_attention"
