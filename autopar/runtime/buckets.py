"""Batches padded to one of a few lengths (`buckets=` of autopar.compile), so that a model that must have a program for each has few; and to the longest of the ranks',
where each passes its own part of a batch and has padded it by itself.

Padding is put behind the last token, where what it is filled with cannot matter: masks hide it (a mask is made where the model takes one and none is given), labels are
ignored (-100), and causal tokens do not look ahead. An argument that is as long as the tokens, and of which nobody said what to fill it with, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar import _torch
from autopar.distributed.agreement import agreed, all_gathered
from autopar.distributed.groups import Groups
from autopar.errors import InputError

IGNORED = -100  # of cross entropy
TOKENS = ("input_ids", "decoder_input_ids")
# What an argument of this name is filled with; None: with the model's token for padding, where it has one.
FILLED: Mapping[str, int | None] = {
    "input_ids": None,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": IGNORED,
    "decoder_input_ids": None,
    "decoder_attention_mask": 0,
}
# (ENCODER for an encoder's of two, else "", padded length) -> length as it was.
Lengths = dict[tuple[str, int], int]
ENCODER = "encoder_"
DECODER = "decoder_"
Targets = dict[str, int]  # what to pad to: "" the tokens, DECODER those of a decoder beside them
_FIX = "pad it yourself, or leave buckets= out: sizes that vary need no buckets where a model can be compiled once for all of them"


class Buckets:
    """lengths: those that batches are padded to; none: they keep theirs. forward: of the model."""

    def __init__(self, lengths: Sequence[int], model: nn.Module) -> None:
        self.lengths = tuple(sorted(lengths))
        self.names = tuple(inspect.signature(model.forward).parameters)
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
        self.token = pad if isinstance(pad, int) and pad >= 0 else 0

    def targets(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Targets:
        """The lengths that a call is padded to. Raises InputError where it has no tokens, or too many."""
        given = self._by_name(args, kwargs)
        tokens, decoded = given["input_ids"], self._decoded(given)
        found = {"": self._target("input_ids", tokens.shape[1])}
        return found if decoded is None else found | {DECODER: self._target("decoder_input_ids", decoded.shape[1])}

    def padded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Targets | None = None) -> tuple[dict[str, Any], Lengths]:
        """The call's arguments by name, padded to `targets` (by default, the buckets'); and what lengths became.

        Raises InputError where it is not known how to."""
        given = self._by_name(args, kwargs)
        to = targets or self.targets(args, kwargs)
        out, cut = self._side(given, "input_ids", "attention_mask", given["input_ids"].shape[1], to[""])
        other = self._decoded(given)
        if other is None:
            return out, cut
        decoded, more = self._side(out, "decoder_input_ids", "decoder_attention_mask", other.shape[1], to[DECODER], other)
        return decoded, {(ENCODER, n): m for (_, n), m in cut.items()} | more

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.names):
            raise InputError(f"{len(args)} arguments cannot be told apart, forward names {len(self.names)}", fix="pass them by name")
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            raise InputError(
                "calls are padded that have input_ids of shape [batch, length], and there are none",
                where=f"arguments {sorted(given)}",
                fix=_FIX,
            )
        return given

    def _decoded(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """What is as long as the tokens of the decoder, of a model that has one."""
        if "decoder_input_ids" not in self.names:
            return None
        other = given.get("decoder_input_ids", given.get("labels"))
        return other if isinstance(other, torch.Tensor) and other.dim() == 2 else None

    def _target(self, tokens: str, length: int) -> int:
        target = next((n for n in self.lengths if n >= length), None) if self.lengths else length
        if target is None:
            raise InputError(
                f"a batch of length {length} is longer than the longest bucket, {self.lengths[-1]}",
                where=f"input {tokens}",
                fix="add a longer one to buckets=, or cut the batch",
            )
        return target

    def _side(
        self, given: Mapping[str, Any], tokens: str, mask: str, length: int, target: int, shape: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], Lengths]:
        """`given`, with what belongs to `tokens` padded. Of an encoder and a decoder each has its own."""
        decodes = "decoder_input_ids" in self.names
        mine = {n for n in FILLED if not decodes or n.startswith("decoder_") == (tokens != "input_ids")} - (
            {"labels"} if decodes else set()
        )
        mine |= {"labels"} if decodes and tokens != "input_ids" else set()
        out = dict(given)
        like = given.get(tokens, shape)
        if isinstance(like, torch.Tensor) and mask in self.names and given.get(mask) is None:
            out[mask] = torch.ones(like.shape, dtype=torch.int64, device=like.device)
        for name, t in list(out.items()):
            if not isinstance(t, torch.Tensor) or t.dim() < 2 or t.shape[1] != length or target == length:
                continue
            if name in mine and t.dim() == 2:
                fill = FILLED[name]
                out[name] = torch.nn.functional.pad(t, (0, target - length), value=self.token if fill is None else fill)
            elif name not in FILLED or (name in mine and t.dim() > 2):
                raise InputError(
                    f"{name}, of shape {tuple(t.shape)}, is as long as {tokens}, and it is not known what to pad it with",
                    where=f"input {name}",
                    fix=_FIX,
                )
        return out, {("", target): length} if target != length else {}


def to_longest(groups: Groups, padding: Buckets, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Lengths]:
    """The call's arguments by name, padded to the longest of the ranks' calls. Raises InputError on all ranks. Collective."""
    mine = agreed(groups, lambda: (padding.targets(args, kwargs), {}))
    everyone = all_gathered(groups, mine)
    longest = {side: max(theirs.get(side, 0) for theirs in everyone) for side in mine}
    return agreed(groups, lambda: (padding.padded(args, kwargs, longest), {}))


def cut(result: Any, lengths: Lengths) -> Any:
    """Outputs without what they have of padding: of those whose dim 1 is a padded length."""

    def of(path: Any, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.dim() < 2:
            return t
        side = ENCODER if ENCODER in _torch.pytree.keystr(path[:1]) else ""
        length = lengths.get((side, t.shape[1]))
        return t if length is None else t[:, :length]

    return _torch.pytree.tree_map_with_path(of, result)


def checked(buckets: Sequence[int] | None) -> tuple[int, ...] | None:
    """Raises InputError for anything but lengths."""
    if buckets is None:
        return None
    found = tuple(buckets) if isinstance(buckets, (list, tuple)) else ()
    if not found or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in found):
        raise InputError(
            f"buckets={buckets!r} are no lengths", fix="pass the lengths that batches are padded to, such as buckets=(512, 1024)"
        )
    return found
