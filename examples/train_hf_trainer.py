"""Hugging Face's Trainer, with its data loading, schedule, clipping and logging.

    python examples/train_hf_trainer.py --plain                      one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_hf_trainer.py         four processes, the same losses

The Trainer gives each process its own rows (hence `inputs="local"`) and expects to wrap the model itself. Two lines tell it that the model
already is what it should be: not to be wrapped in DDP, and with a loss that is already the mean over all processes. The Trainer's own saving
cannot write sharded parameters (hence `save_strategy="no"`): use `autopar.checkpoint`.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autopar

SEQ, ROWS, GLOBAL_BATCH = 64, 64, 8


class Text(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a text that every machine has."""

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
        self.rows = text[: ROWS * SEQ].view(ROWS, SEQ)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--steps", type=int, default=8)
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
    model: Any = LlamaForCausalLM(config)
    world = 1
    if not args.plain:
        dist.init_process_group("gloo")
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, inputs="local", layout=args.layout, backend=args.backend)
        model._is_accelerate_prepared = True
    model.accepts_loss_kwargs = False

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=GLOBAL_BATCH // world,
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            label_names=["labels"],
            remove_unused_columns=False,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Text())
        trainer.train()
        if trainer.is_world_process_zero():
            for entry in trainer.state.log_history:
                if "grad_norm" in entry:
                    print(f"step {entry['step'] - 1} loss {float(entry['loss']):.6f} norm {float(entry['grad_norm']):.6f}", flush=True)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
