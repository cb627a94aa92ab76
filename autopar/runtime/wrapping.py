"""What makes a compiled model look like the model that it wraps: its attributes and methods, its name, its parameters and weights, as others ask for them.

Not its call, which is `module.ParallelModule`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar, overload

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.build import Builder
from autopar.runtime.eager_calls import is_method_of, run_whole
from autopar.runtime.inputs import InputReader
from autopar.runtime.staged_calls import StagedCalls, refusing_away

StateDict = TypeVar("StateDict", bound=dict[str, torch.Tensor])


class LoadedKeys(Protocol):
    """What torch says of a state_dict that was loaded."""

    @property
    def missing_keys(self) -> list[str]: ...
    @property
    def unexpected_keys(self) -> list[str]: ...


class WrappingModule(nn.Module):
    """Has the submodules, parameters and buffers of another module under their own names; that module is `_wrapped`."""

    _builder: Builder
    _reader: InputReader
    _stages: StagedCalls | None

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.__dict__["_wrapped"].training = mode
        return self

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """In a pipeline, of this rank's stages alone, once they are known: from the first call on."""
        away = self._builder.pipeline.away if self._builder.pipeline is not None else ()
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            if not away or name.removeprefix(prefix + "." if prefix else "") not in away:
                yield name, p

    @overload
    def state_dict(self, *, destination: StateDict, prefix: str = ..., keep_vars: bool = ...) -> StateDict: ...

    @overload
    def state_dict(self, *, prefix: str = ..., keep_vars: bool = ...) -> dict[str, torch.Tensor]: ...

    def state_dict(self, *args: object, **kwargs: object) -> object:
        found = self.__dict__["_wrapped"].state_dict(*args, **kwargs)
        if self._stages is not None:
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            for name in self._stages.pipeline.away:
                found.pop(f"{prefix}{name}", None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, object], *args: object, **kwargs: object) -> LoadedKeys:
        if self._stages is not None:
            mine: LoadedKeys = self._stages.load(self.__dict__["_wrapped"], state_dict, *args, **kwargs)
            return mine
        loaded: LoadedKeys = self.__dict__["_wrapped"].load_state_dict(state_dict, *args, **kwargs)
        return loaded

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not this module's own is the model's: its forward reads it there."""
        if name == "forward" and "_made" in self.__dict__:
            raise AutoparError(
                f"forward is replaced after autopar.compile, by {getattr(value, '__qualname__', type(value).__qualname__)}: the compiled step would not run it",
                where=type(self.__dict__["_wrapped"]).__name__,
                fix="replace it first and compile then; for a Trainer that does it, such as TRL's, pass the model uncompiled to autopar.trainer(SFTTrainer, mesh)(...)",
            )
        own = "_made" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        if own or isinstance(value, (nn.Module, nn.Parameter)):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_wrapped"], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._parameters or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self.__dict__["_wrapped"], name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__["_wrapped"]
            found = getattr(wrapped, name)
            if not is_method_of(wrapped, found):
                return found
            whole = run_whole(wrapped, found, self._builder.groups, self._reader.mode == "local")
            return whole if self._stages is None else refusing_away(self._stages.pipeline, name, whole)

    def _get_name(self) -> str:
        """The model's class: libraries decide by it how a loss is made."""
        return str(type(self.__dict__["_wrapped"]).__name__)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """accelerate asks: this is a distributed model already, which it leaves as it is, and so without the autocast that it would put around forward."""
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        wanted = getattr(state, "_shared_state", {}).get("_mixed_precision", "no")
        if wanted != "no" and not self.__dict__.get("_autocast_is_met"):
            raise AutoparError(
                f"accelerate's mixed_precision={wanted!r} would be dropped: a compiled model is left as it is",
                fix='leave it out and pass precision="bf16" to autopar.compile, or call the model under torch.autocast; autopar.trainer does that for a Trainer',
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """It is, whatever they find."""
