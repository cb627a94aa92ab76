"""Hugging Face's Trainer: its data loading, schedule, accumulation, clipping, metrics, checkpoints and best model.

    python examples/train_hf_trainer.py --plain                      one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_hf_trainer.py         four processes, the same losses

    ... --folder runs/a --killed-after 4                             all processes end without a word after the save at step 4
    ... --folder runs/a --resume                                     goes on from there, to the same losses

One line differs: the class of the trainer is `autopar.trainer(Trainer, mesh)`. It compiles the model, gives each process its own rows, and saves and loads by parts.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import autopar

SEQ, GLOBAL_BATCH, ACCUMULATED = 64, 8, 2


class Text(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a text that every machine has; of each, only a part counts, so that rows have different numbers of targets."""

    def __init__(self, rows: int, first: int = 0) -> None:
        text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
        self.rows = text[first * SEQ : (first + rows) * SEQ].view(rows, SEQ)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index * 7 % (SEQ // 2)] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    right = prediction.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if dist.is_initialized():
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", default="runs/hf_trainer", help="of the checkpoints; all processes see it")
    parser.add_argument("--killed-after", type=int, default=0, metavar="STEP")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    world, kind = 1, Trainer
    callbacks: list[Any] = [Killed(args.killed_after)]
    if not args.plain:
        dist.init_process_group("gloo")
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        kind = autopar.trainer(Trainer, mesh, layout=args.layout, backend=args.backend)
        callbacks.append(autopar.monitor_callback(every=2))

    settings = TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=GLOBAL_BATCH // world,
        per_device_eval_batch_size=GLOBAL_BATCH // world,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = kind(
        model=model,
        args=settings,
        train_dataset=Text(128),
        eval_dataset=Text(16, first=128),
        compute_metrics=accuracy,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    best = trainer.evaluate()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "grad_norm" in entry:
                print(f"step {entry['step'] - 1} loss {float(entry['loss']):.6f} norm {float(entry['grad_norm']):.6f}", flush=True)
            elif "eval_loss" in entry:
                print(f"step {entry['step'] - 1} loss {entry['eval_loss']:.6f} accuracy {entry['eval_accuracy']:.6f}", flush=True)
        print(f"best loss {best['eval_loss']:.6f} accuracy {best['eval_accuracy']:.6f}", flush=True)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
