"""Hugging Face's Trainer and TRL's, made of `autopar.trainer`: one process' curves, metrics and best model, also after the processes were killed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autopar
from tests.dist.launch import run
from tests.wide import wide

ROOT = Path(__file__).resolve().parents[2]


def ran(folder: Path, script: str, *options: str, processes: int, killed: bool = False) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [
        *(launcher if processes else [sys.executable]),
        str(ROOT / "examples" / script),
        *options,
        *([] if processes else ["--plain"]),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode != 0) == killed, done.stdout + done.stderr
    if killed:
        assert "SIGKILL" in done.stderr or "Signal 9" in done.stderr or done.returncode == -9, done.stderr
    return done.stdout


def lines(printed: str) -> list[list[float]]:
    return [
        [float(x) for x in re.findall(r"[-\d.]+(?:e[-+]\d+)?", line)]
        for line in printed.splitlines()
        if line.startswith(("step ", "best "))
    ]


def same(mine: str, one_process: str, rel: float = 1e-5) -> None:
    found, expected = lines(mine), lines(one_process)
    assert len(expected) >= 8 and expected[-1][-2] < expected[0][-2], "the reference does not learn: the comparison would show little"
    assert len(found) == len(expected), mine
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=rel, rel=rel), f"{a} instead of {b}"


@wide
def test_killed_after_its_save_and_resumed(tmp_path: Path) -> None:
    expected = ran(tmp_path, "train_hf_trainer.py", processes=0)
    options = ["--layout", "fsdp", "--folder", "runs/killed"]
    ran(tmp_path, "train_hf_trainer.py", *options, "--killed-after", "4", processes=2, killed=True)
    at = sorted(p.name for p in (tmp_path / "runs/killed").glob("checkpoint-*"))
    assert at == ["checkpoint-2", "checkpoint-4"]
    cut_off = tmp_path / "runs/killed/checkpoint-6"  # a later one, whose save did not come to its end
    shutil.copytree(tmp_path / "runs/killed/checkpoint-4", cut_off)
    (cut_off / "trainer_state.json").write_text("{")
    (cut_off / "model.safetensors").write_bytes(b"")
    same(ran(tmp_path, "train_hf_trainer.py", *options, "--resume", processes=2), expected)

    # It was watched.
    history = json.loads((tmp_path / "runs/killed/checkpoint-8/trainer_state.json").read_text())["log_history"]
    watched = [e for e in history if "autopar/step_s" in e]
    assert watched and all(e["autopar/peak_bytes"] > 1e6 for e in watched)

    # What the Trainer saved is what transformers reads.
    at = sorted(p.name for p in (tmp_path / "runs/killed").glob("checkpoint-*"))
    assert "checkpoint-8" in at and len(at) == 2
    one = LlamaForCausalLM.from_pretrained(tmp_path / "runs/killed/checkpoint-8")
    other = LlamaForCausalLM.from_pretrained(tmp_path / "runs/hf_trainer/checkpoint-8")
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), name


@wide
@pytest.mark.parametrize("processes", [2, 4])
def test_planned(processes: int, tmp_path: Path) -> None:
    same(ran(tmp_path, "train_hf_trainer.py", processes=processes), ran(tmp_path, "train_hf_trainer.py", processes=0))


@wide
@pytest.mark.parametrize("what", [["--dpo"], [], ["--packing"]])
def test_trl(what: list[str], tmp_path: Path) -> None:
    expected = ran(tmp_path, "train_trl.py", *what, processes=0)
    same(ran(tmp_path, "train_trl.py", *what, "--layout", "fsdp", "--folder", "runs/two", processes=2), expected)
    assert (tmp_path / "runs/two/checkpoint-8/model.safetensors").is_file()


@wide
def test_fabric(tmp_path: Path) -> None:
    same(ran(tmp_path, "train_fabric.py", "--layout", "fsdp", processes=2), ran(tmp_path, "train_fabric.py", processes=0))


def _llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    )


def _refused(doing: Callable[[], object], says: str) -> None:
    with pytest.raises(autopar.AutoparError, match=says) as e:
        doing()
    assert e.value.fix


def _adapters_and_refusals(folder: str) -> None:
    """peft's adapters go out and come back alone; and what cannot be met says what to do."""
    import safetensors.torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from peft import LoraConfig, PeftModel, get_peft_model

    mesh = (2,)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    plain = get_peft_model(_llama(), lora)
    state = {n: t.clone() for n, t in plain.state_dict().items()}
    model = autopar.compile(plain, mesh, layout="fsdp", backend="aot_eager")
    model.save_pretrained(folder)
    dist.barrier()
    assert not (Path(folder) / "model.safetensors").exists()
    alone = PeftModel.from_pretrained(_llama(), folder)
    for name, t in alone.state_dict().items():
        assert torch.equal(t, state[name]), name
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.zero_()
    model.load_pretrained(folder)
    for name, t in model.state_dict().items():
        assert torch.equal(t.full_tensor() if hasattr(t, "full_tensor") else t, state[name]), name
    _refused(lambda: model.load_pretrained(folder + "/nowhere"), "the adapter cannot be read")

    settings: dict[str, Any] = {"output_dir": folder, "report_to": [], "use_cpu": True}
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4
    whole = _llama()
    given = {"args": TrainingArguments(**settings), "train_dataset": rows}
    made = autopar.trainer(Trainer, mesh, layout="tp", backend="aot_eager")
    _refused(lambda: made(model=_llama(), **given), "splits the batch 1 ways")
    made = autopar.trainer(Trainer, mesh, layout="fsdp", backend="aot_eager")
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    _refused(lambda: made(model=whole, optimizers=(optimizer, None), **given), "before it was compiled")
    _refused(lambda: made(model=_llama(), **given).train(resume_from_checkpoint=folder), "safetensors checkpoint")
    _refused(lambda: autopar.trainer(TrainingArguments), "needs a class made of transformers' Trainer")
    _refused(lambda: autopar.trainer(Trainer, mesh, inputs="global"), "its own rows")

    class Packs(Trainer):
        """As TRL's SFTTrainer, where its arguments say so."""

        padding_free = True

    packs = autopar.trainer(Packs, mesh, layout="fsdp", backend="aot_eager")
    _refused(lambda: packs(model=_llama(), **given), "joins the rows of a process into one without padding")

    compiled = autopar.compile(whole, mesh, layout="fsdp", inputs="local", backend="aot_eager")
    _refused(lambda: setattr(compiled, "forward", lambda x: x), "forward is replaced after autopar.compile")
    if dist.get_rank() == 0:  # as the Trainer does by itself
        _refused(
            lambda: safetensors.torch.save_file(compiled.state_dict(), folder + "/x.safetensors"), "no memory that one of them could save"
        )
    AcceleratorState._reset_state(True)
    _refused(lambda: Accelerator(cpu=True, mixed_precision="bf16").prepare(compiled), "would be dropped")


def test_adapters_and_what_cannot_be_met(tmp_path: Path) -> None:
    run(_adapters_and_refusals, 2, str(tmp_path), timeout=200)
