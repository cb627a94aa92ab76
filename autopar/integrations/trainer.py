"""Hugging Face's Trainer, and those made of it (TRL's), for a model on a mesh.

    trainer = autopar.trainer(Trainer, mesh)(model=model, args=args, ...)

The subclass compiles the model once the Trainer has looked at it (and a loop like TRL's has put its own forward into it), with `inputs="local"`: the Trainer deals out the data. It
meets those of the Trainer's hooks that expect a whole model in one process:

    save, load, best model       weights as safetensors, which transformers reads, written and read by parts; adapters of peft alone where there are some
    optimizer                    `autopar.checkpoint`, in the folder `autopar` of the Trainer's checkpoint
    losses by number of items    the Trainer divides what a process has by the items of all processes, and multiplies by their number

The last is right for a loss of this process' rows, as logits give it. The loss that the model returns is that of all rows already, so the number that the model is told is multiplied, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import checkpoint
from autopar.api import compile as compile_model
from autopar.checkpoint.adapters import has_adapters
from autopar.distributed.agreement import from_first
from autopar.errors import AutoparError, CheckpointError
from autopar.integrations.fused_head import capturable, is_fused
from autopar.runtime.module import ParallelModule

T = TypeVar("T")
OURS = "autopar"  # the folder of the optimizer's state in a checkpoint of the Trainer's
MET = ("_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler")
SCHEDULER, ARGUMENTS, STATE = "scheduler.pt", "training_args.bin", "trainer_state.json"  # the Trainer's own names


def trainer(cls: type[T], mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None = None, **options: object) -> type[T]:
    """A subclass of `cls`, which is transformers' Trainer or a subclass of it, that trains its model on `mesh`.

    mesh, options: those of `autopar.compile`, which is called on the model (and on a `ref_model`) once `cls` is made. `inputs` is "local". A model that
        was compiled before is taken as it is.

    The Trainer saves, resumes and loads the best model by itself then, on any number of processes. Raises AutoparError where `cls` is no Trainer, or lacks
    what is overridden; where an optimizer was made before the model was compiled; where ranks that share a batch would be given different ones.
    """
    lacking = [name for name in MET if not callable(getattr(cls, name, None))]
    if not isinstance(cls, type) or lacking:
        raise AutoparError(
            f"autopar.trainer needs a class made of transformers' Trainer; {cls!r} lacks {', '.join(lacking) or 'everything'}",
            fix="pass the class itself, not a trainer; for a loop of another library use autopar.compile and autopar.checkpoint",
        )
    if options.get("inputs", "local") != "local":
        raise AutoparError('a Trainer gives every process its own rows: inputs="global" cannot be met', fix="leave inputs= out")
    made: Any = type(cls.__name__, (_Sharded, cls), {"__module__": cls.__module__, "_autopar": (mesh, {**options, "inputs": "local"})})
    found: type[T] = made
    return found


class _Sharded:
    """What a Trainer does otherwise with a model on a mesh."""

    _autopar: tuple[Any, dict[str, Any]]
    model: Any
    model_wrapped: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signature = getattr(self, "_set_signature_columns_if_needed", None)
        if signature is not None:
            signature()  # of the forward that people wrote
        if getattr(self, "padding_free", False) and self.args.world_size > 1:
            raise AutoparError(
                f"{type(self).__name__} joins the rows of a process into one without padding (padding_free=True, or packing with a strategy that implies it): "
                "there is no batch to split, and processes have sequences of other lengths",
                fix='pass packing_strategy="wrapped", whose rows are all of one length, or padding_free=False',
            )
        switches = has_adapters(self.model)
        self.model = self.model_wrapped = self.callback_handler.model = self._compiled(self.model, "model")
        reference = getattr(self, "ref_model", None)
        if reference is None and hasattr(self, "ref_model") and switches and not getattr(self, "precompute_ref_logps", False):
            raise AutoparError(
                f"{type(self).__name__} without ref_model switches the adapters of its model off and on, which a compiled model does not see",
                fix="pass ref_model=, a copy of the base model; it is compiled, too",
            )
        if isinstance(reference, nn.Module):
            self.ref_model = self._compiled(reference, "ref_model")
        precision = self.accelerator.mixed_precision
        if precision not in ("no", "bf16"):
            raise AutoparError(
                f"mixed precision {precision!r} is not there on a mesh", fix='pass bf16=True, or precision="bf16" to autopar.trainer'
            )
        self.model.__dict__["_autocast_is_met"] = True
        if self.args.average_tokens_across_devices:
            self.model.register_forward_pre_hook(self._counted, with_kwargs=True)
        else:
            self.model_accepts_loss_kwargs = False  # a count of this process' items alone

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A rank's device never has the whole of it."""

    def _compiled(self, model: nn.Module, which: str) -> ParallelModule:
        mesh, options = self._autopar
        if not isinstance(model, ParallelModule):
            if which == "model" and self.optimizer is not None:
                raise AutoparError(
                    "optimizers= has parameters of the model before it was compiled, which nothing updates any more",
                    fix="pass optimizer_cls_and_kwargs=, or compile the model and make the optimizer of it, and pass both",
                )
            if is_fused(model):
                capturable(model)
                options = {"outputs": "all", **options}  # its losses are made of log-probabilities
            model = compile_model(model, mesh, **options)
        if model.data_world != self.args.world_size:
            raise AutoparError(
                f"the Trainer gives each of {self.args.world_size} processes rows of its own, and the layout of {which} splits the batch {model.data_world} ways",
                fix='leave layout= and plan= out, or use layout="fsdp" on a mesh of one axis',
            )
        return model

    def _counted(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        items = kwargs.get("num_items_in_batch")
        if items is not None:
            kwargs["num_items_in_batch"] = items * self.args.world_size
        return args, kwargs

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The autocast that accelerate would put around forward."""
        if self.accelerator.mixed_precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16)

    # ---- saving: all processes call these, and the first one writes ----------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        self.model.save_pretrained(folder)
        if not self.args.should_save:
            return
        processor: Any = getattr(self, "processing_class", None) or getattr(getattr(self, "data_collator", None), "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        torch.save(self.args, folder / ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(Path(output_dir) / OURS, self.model, _bare(self.optimizer), weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    # ---- loading: every process reads its parts -------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer takes the last folder by its number; one whose save was cut short is passed over."""
        if resume_from_checkpoint is True:
            where = Path(self.args.output_dir)
            resume_from_checkpoint = from_first(self.model._builder.groups, lambda: str(_last_whole(where)))
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        _load_weights(self.model, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / OURS).is_dir():
            raise AutoparError(
                "the checkpoint has no state of an optimizer that autopar wrote",
                where=str(folder),
                fix="a checkpoint of a Trainer on one process, or with save_only_model=True, starts a new run: load its weights into the model before",
            )
        _load_optimizer(folder / OURS, self.model, _bare(self.optimizer))
        if (folder / SCHEDULER).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))


def _last_whole(folder: Path) -> Path:
    """The latest of a Trainer's checkpoints that has all of it: the state of the Trainer, which is written last."""
    found = sorted((int(p.name.rpartition("-")[2]), p) for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit())
    for _, path in reversed(found):
        try:
            json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            warnings.warn(f"{path} is passed over: its save was cut short ({STATE} is not there, or not whole)", stacklevel=2)
        else:
            return path
    raise CheckpointError(
        "there is no whole checkpoint to resume from",
        where=str(folder),
        fix="leave resume_from_checkpoint= out to start anew, or pass a path",
    )


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """What accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.load(folder, model, optimizer)


def _load_weights(model: Any, folder: str | os.PathLike[str]) -> None:
    model.load_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()  # a rank that goes on might remove the folder
