"""What a training call returns when only its loss was computed."""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import AutoparError


class NotComputedError(AutoparError, AttributeError, KeyError, IndexError):
    """A field of the model's output that the training step does not compute."""

    __str__ = AutoparError.__str__


class LossOutput(dict[str, Any]):
    """`.loss`, `["loss"]` and `[0]`; every other field says how to get it."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__(loss=loss)

    def __getattr__(self, name: str) -> Any:
        if name == "loss":
            return super().__getitem__("loss")
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing(name)

    def __getitem__(self, key: Any) -> Any:
        if key in ("loss", 0):
            return super().__getitem__("loss")
        if isinstance(key, slice):
            return tuple(self.values())[key]
        raise _missing(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def _missing(name: Any) -> NotComputedError:
    return NotComputedError(
        f"output {name!r} is not computed in training: only the loss is, so that (for one) logits need not exist",
        fix='pass outputs="all" to autopar.compile, or call the model in eval() mode',
    )
