"""What one run, or `autopar compile`, has compiled is what all ranks of the next run load, and they compute what eager computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError
from tests.dist.launch import run


def _counts(compiled: Any) -> dict[str, float]:
    (step,) = compiled._programs.steps()
    halves = [step.stats["forward"], *step.stats["backward"].values()]
    return {k: sum(h[k] for h in halves) for k in ("hit", "miss")}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def _start(folder: str, inductor: str) -> tuple[float, float, dict[str, float]]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    torch.manual_seed(1)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    model = _model()
    eager = nn.functional.mse_loss(model(x), y)
    compiled = autopar.compile(model, (2,), loss_fn=nn.functional.mse_loss, artifacts=folder)
    loss = compiled(x, y)
    loss.backward()
    return loss.item(), eager.item(), _counts(compiled)


def _refused(folder: str, inductor: str) -> str:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    try:
        _start(folder, inductor)
    except AutoparError as e:
        return e.what
    return ""


def test_the_second_run_compiles_nothing_on_any_rank(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    first = run(_start, 2, kept, str(tmp_path / "one"))
    second = run(_start, 2, kept, str(tmp_path / "two"))
    # The other rank finds in Inductor's folder what the first one of the node compiled.
    assert [counts for *_, counts in first] == [{"hit": 0, "miss": 2}, {"hit": 2, "miss": 0}]
    assert [counts for *_, counts in second] == [{"hit": 2, "miss": 0}] * 2
    assert [p.name for p in Path(kept).glob("*.zip")] == ["dp2.rank0.zip"]
    for loss, eager, _ in (*first, *second):
        assert loss == pytest.approx(eager, rel=1e-6)
    Path(kept, "dp2.rank0.zip").chmod(0o666)
    assert all("can be written by others" in said for said in run(_refused, 2, kept, str(tmp_path / "three")))


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}


def _loads(folder: str, inductor: str, plan: str) -> tuple[float, float, dict[str, float]]:
    import transformers as T

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**SIZES, max_position_embeddings=64, use_cache=False))
    ids = torch.randint(96, (4, 16))
    eager = model(input_ids=ids, labels=ids).loss
    compiled = autopar.compile(model, (dist.get_world_size(),), plan=plan, artifacts=folder, precision="fp32")
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), eager.item(), _counts(compiled)


@pytest.mark.wide
def test_ranks_load_what_the_command_compiled(tmp_path: Path) -> None:
    """`autopar compile` is one process, which is none of the mesh's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "max_position_embeddings": 64}))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "one"), "OMP_NUM_THREADS": "1"}
    step = [str(tmp_path), "--batch", "4", "--seq", "16", "--precision", "fp32"]
    plan, kept = str(tmp_path / "plan.json"), str(tmp_path / "kept")
    for words in (["plan", *step, "--cluster", "cpu:1x2", "-o", plan], ["compile", *step, "--plan", plan, "-o", kept]):
        done = subprocess.run([sys.executable, "-m", "autopar", *words], env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    for loss, eager, counts in run(_loads, 2, kept, str(tmp_path / "two"), plan):
        assert counts == {"hit": 2, "miss": 0} and loss == pytest.approx(eager, rel=1e-5)
