"""TRL: supervised fine-tuning, and preferences (DPO) with a frozen reference, of a small model made from a config.

    python examples/train_trl.py --plain [--dpo | --packing]                  one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_trl.py [--dpo | --packing]     four processes, the same losses

Their trainers put a forward of their own into the model before they train it, so the model is passed as it is, and compiled by the class that `autopar.trainer` makes.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import autopar

GLOBAL_BATCH, WORDS, LENGTH = 8, 20, 24


def words() -> list[str]:
    """Of a text that every machine has."""
    return re.findall(r"[a-z]+", inspect.getsource(argparse).lower())


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; nothing is downloaded."""
    known = ["<pad>", "<unk>", "<eos>", *sorted(set(words()))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def rows(dpo: bool) -> Dataset:
    text = words()
    pieces = [text[i * WORDS : (i + 1) * WORDS] for i in range(64)]
    if not dpo:
        return Dataset.from_list([{"text": " ".join(p[: WORDS - i % 7])} for i, p in enumerate(pieces)])
    return Dataset.from_list(
        [{"prompt": " ".join(p[:8]), "chosen": " " + " ".join(p[8:]), "rejected": " " + " ".join(reversed(p[8:]))} for p in pieces]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--dpo", action="store_true", help="preferences; default: supervised fine-tuning")
    parser.add_argument(
        "--packing", action="store_true", help='examples joined and cut into rows of one length (packing_strategy="wrapped")'
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", default="runs/trl", help="of the checkpoints; all processes see it")
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokens = tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    world = 1
    kind: Any = DPOTrainer if args.dpo else SFTTrainer
    if not args.plain:
        dist.init_process_group("gloo")
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        kind = autopar.trainer(kind, mesh, layout=args.layout, backend=args.backend)

    options: dict[str, Any] = {
        "output_dir": args.folder,
        "max_steps": args.steps,
        "per_device_train_batch_size": GLOBAL_BATCH // world,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": args.steps,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "max_length": LENGTH,
        "pad_to_multiple_of": LENGTH,  # a length is a program
    }
    if args.packing:
        options |= {"packing": True, "packing_strategy": "wrapped", "dataloader_drop_last": True}
    more: dict[str, Any] = {"args": (DPOConfig if args.dpo else SFTConfig)(**options)}
    if args.dpo:
        more["ref_model"] = copy.deepcopy(model)
    trainer = kind(model=model, processing_class=tokens, train_dataset=rows(args.dpo), **more)
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "grad_norm" in entry:
                told = entry["rewards/margins"] if args.dpo else entry["mean_token_accuracy"]
                print(
                    f"step {entry['step'] - 1} told {told:.6f} loss {float(entry['loss']):.6f} norm {float(entry['grad_norm']):.6f}",
                    flush=True,
                )

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
