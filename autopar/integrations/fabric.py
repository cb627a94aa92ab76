"""Lightning's Fabric, for a model on a mesh.

    fabric = Fabric(accelerator="cuda", devices=8, strategy=autopar.strategy(DDPStrategy)())
    model = fabric.setup(model)                            compiled here, with `inputs="local"`
    optimizer = fabric.setup_optimizers(AdamW(model.parameters()))

The subclass of Fabric's DDPStrategy starts processes and deals out data as that does. Instead of wrapping the model it compiles it, and what `fabric.save` and `fabric.load` are given goes to
and comes from `autopar.checkpoint`, by parts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autopar import checkpoint
from autopar.api import compile as compile_model
from autopar.errors import AutoparError
from autopar.runtime.module import ParallelModule

T = TypeVar("T")


def strategy(cls: type[T], mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None = None, **options: object) -> type[T]:
    """A subclass of `cls`, which is Lightning Fabric's DDPStrategy, whose models train on `mesh`.

    mesh, options: those of `autopar.compile`; `inputs` is "local", and `outputs` "all", since Fabric looks at everything that a model returns.

    Raises AutoparError where `cls` is another class; where an optimizer is set up with a model that is not compiled yet; where a checkpoint holds more than one model
    and its optimizer, and numbers.
    """
    if not isinstance(cls, type) or not hasattr(cls, "setup_module") or not hasattr(cls, "_setup_distributed"):
        raise AutoparError(f"autopar.strategy needs Fabric's class DDPStrategy, not {cls!r}", fix="autopar.strategy(DDPStrategy)()")
    if options.get("inputs", "local") != "local":
        raise AutoparError('Fabric gives every process its own rows: inputs="global" cannot be met', fix="leave inputs= out")
    named = {"_autopar": (mesh, {"outputs": "all", **options, "inputs": "local"}), "__module__": cls.__module__}
    made: Any = type(cls.__name__, (_Compiles, cls), named)
    found: type[T] = made
    return found


class _NoSync:
    def no_backward_sync(self, module: ParallelModule, enabled: bool) -> Any:
        return module.no_sync() if enabled else contextlib.nullcontext()


class _Compiles:
    """What Fabric does otherwise with a model on a mesh."""

    _autopar: tuple[Any, dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> ParallelModule:
        mesh, options = self._autopar
        return module if isinstance(module, ParallelModule) else compile_model(module, mesh, **options)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        if not isinstance(module, ParallelModule):
            raise AutoparError(
                "fabric.setup(model, optimizer) would leave the optimizer with parameters that nothing updates any more",
                fix="model = fabric.setup(model), and then optimizer = fabric.setup_optimizers(Optimizer(model.parameters()))",
            )
        return module, optimizers, scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """A rank's device never has the whole of it."""

    def save_checkpoint(self, path: str | os.PathLike[str], state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        if storage_options is not None or filter is not None:
            raise AutoparError(
                "storage_options= and filter= cannot be met: a checkpoint is whole",
                fix="leave them out, or use autopar.checkpoint.state_dict",
            )
        model, optimizer, rest = _parts(state)
        checkpoint.save(path, model, optimizer, extra=rest)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not isinstance(state, dict):
            raise AutoparError(
                "a checkpoint is loaded into what was saved", fix='fabric.load(path, {"model": model, "optimizer": optimizer, ...})'
            )
        model, optimizer, rest = _parts(state)
        found: Any = checkpoint.load(path, model, optimizer)["extra"]
        if strict and set(found) != set(rest):
            raise AutoparError(
                f"the checkpoint has {', '.join(sorted(found)) or 'nothing'} besides model and optimizer, asked for is {', '.join(sorted(rest)) or 'nothing'}"
            )
        for name in rest:
            if name in found:
                if hasattr(state[name], "load_state_dict"):
                    state[name].load_state_dict(found.pop(name))
                else:
                    state[name] = found.pop(name)
        return dict(found)


def _parts(state: Mapping[str, Any]) -> tuple[ParallelModule, Optimizer | None, dict[str, Any]]:
    models = [v for v in state.values() if isinstance(v, nn.Module)]
    optimizers = [v for v in state.values() if isinstance(v, Optimizer)]
    if len(models) != 1 or len(optimizers) > 1 or not isinstance(models[0], ParallelModule):
        raise AutoparError(
            f"a checkpoint of Fabric's has one compiled model and at most one optimizer; here are {len(models)} and {len(optimizers)}",
            fix="save each model with autopar.checkpoint.save in a folder of its own",
        )
    return models[0], optimizers[0] if optimizers else None, dict(_rest(state))


def _rest(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, v in state.items():
        if not isinstance(v, (nn.Module, Optimizer)):
            yield name, v.state_dict() if hasattr(v, "state_dict") else v
