"""`AUTOPAR_CHECK=1`: every value of a step's first run held against what was traced, and against one device.

Both halves of the first step are run once more, call by call: every value must have the recorded shape and dtype (other strides are told, since what depends on
them is seen to when a graph is lowered), and what was really run must return the same. Rank 0 runs the captured graph as well, at global shapes on whole
parameters and inputs, where its memory allows; the first operator whose shard differs from that is named. Collective: all ranks set the variable, or none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured, Role
from autopar.capture.describe import tensor_name
from autopar.errors import AutoparError
from autopar.graph.calls import nbytes
from autopar.graph.placement import Placement
from autopar.hardware.host_memory import free_bytes
from autopar.kernels.random import EagerRandom
from autopar.passes.sharding.operators import HOLDS
from autopar.runtime.step import Step
from autopar.tensors.memory_format import same_strides

# Of a value's norm: sums in another order, products with other tiles.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_SHARE = 0.5  # of the free memory, which rank 0 may take to run as one device


class CheckError(AutoparError):
    """AUTOPAR_CHECK found a value that is not what it should be."""


def asked() -> bool:
    return os.environ.get("AUTOPAR_CHECK", "0") not in ("", "0")


class OneDevice:
    """The captured graph on whole tensors: forward at once, what needs tangents when they are there."""

    def __init__(self, captured: Captured, values: Mapping[Role, torch.Tensor], counters: torch.Tensor) -> None:
        self.captured = captured
        self.values: dict[str, torch.Tensor] = {}
        self.made = {tensor_name(n): n for n in captured.gm.graph.nodes}
        self._env: dict[fx.Node, Any] = {}
        self._random = EagerRandom(int(counters[0]), int(counters[1]))
        self._places = dict(zip((n for n in captured.gm.graph.nodes if n.op == "placeholder"), captured.inputs, strict=True))
        self.run(values)

    def run(self, values: Mapping[Role, torch.Tensor]) -> None:
        """Everything that follows from what is known and `values`."""
        with torch.no_grad(), self._random:
            for n in self.captured.gm.graph.nodes:
                if n in self._env or n.op == "output":
                    continue
                if n.op == "placeholder":
                    if self._places[n] in values:
                        whole, like = values[self._places[n]], n.meta["val"]
                        self._env[n] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(whole)
                elif n.op == "get_attr":
                    self._env[n] = _torch.get_attribute(self.captured.gm, str(n.target))
                elif all(a in self._env for a in n.all_input_nodes):
                    args, kwargs = fx.map_arg((n.args, n.kwargs), self._env.__getitem__)
                    self._env[n] = n.target(*args, **kwargs)
                if isinstance(self._env.get(n), torch.Tensor):
                    self.values[tensor_name(n)] = self._env[n]


class CallByCall(fx.Interpreter):
    """A half of the step, each value looked at as it is made."""

    def __init__(self, gm: fx.GraphModule, look: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(gm)
        self.look = look

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.op != "output":
            self.look(n, out)
        return out


class FirstStep:
    """The checks of one step's first run. cut: this rank's part of a whole tensor."""

    def __init__(self, step: Step, cut: Callable[[torch.Tensor, Placement], torch.Tensor], rank: int) -> None:
        self.step, self.cut, self.rank = step, cut, rank
        self.one: OneDevice | None = None
        self.told = False
        self._expected: Any = ()

    def forward(self, values: Mapping[Role, torch.Tensor], wholes: Callable[[], dict[Role, torch.Tensor]]) -> None:
        """Call before the real one, on all ranks."""
        wanted = sum(nbytes(n) for n in self.step.captured.gm.graph.nodes if n.op != "output")
        whole = wholes()
        if self.rank == 0 and wanted > _SHARE * free_bytes():
            warnings.warn(f"AUTOPAR_CHECK: one device would need {wanted / 1e9:.1f} GB: values are not compared with it", stacklevel=2)
        elif self.rank == 0:
            self.one = OneDevice(self.step.captured, {r: t.cpu() for r, t in whole.items()}, values[Role("seed")].cpu())
        parts = self.step.base
        self._expected = self._run(parts.forward, [values[r] for r in parts.forward_inputs], "forward")

    def ran(self, outputs: Sequence[tuple[Role, torch.Tensor | None]], saved: Sequence[torch.Tensor]) -> None:
        """What the real forward returned, against the same call by call."""
        if self.step.plan.offload:
            return
        names = [*(_said(r) for r, _ in outputs), *(f"saved value {n}" for n in self.step.base.saved)]
        self._same(names, [*(t for _, t in outputs), *saved], self._expected, "forward")
        self._expected = ()

    def backward(
        self, saved: Sequence[torch.Tensor], values: Mapping[Role, torch.Tensor], wholes: Callable[[], dict[Role, torch.Tensor]]
    ) -> None:
        parts = self.step.base
        assert parts.backward is not None
        whole = wholes()
        if self.step.plan.offload:
            warnings.warn("AUTOPAR_CHECK: activations that are away are read once: backward is not checked", stacklevel=2)
            self.one = None
            return
        if self.one is not None:
            self.one.run({r: t.cpu() for r, t in whole.items()})
        self._expected = self._run(parts.backward, [*saved, *(values[r] for r in parts.backward_inputs)], "backward")
        self.one = None

    def ran_backward(self, outputs: Sequence[tuple[Role, torch.Tensor | None]]) -> None:
        if self.step.plan.offload:
            return
        self._same([_said(r) for r, _ in outputs], [t for _, t in outputs], self._expected, "backward")
        self._expected = ()

    # ---- one value -------------------------------------------------------------------------------------------

    def _run(self, gm: fx.GraphModule, flat: list[Any], half: str) -> Any:
        with torch.no_grad():
            return CallByCall(gm, lambda n, v: self._look(n, v, half)).run(*flat)

    def _look(self, n: fx.Node, value: Any, half: str) -> None:
        for got, want in _pairs(value, n.meta["val"]):
            if got.shape != want.shape or got.dtype != want.dtype:
                raise CheckError(
                    f"{n.target} made {tuple(got.shape)} {got.dtype}, where {tuple(want.shape)} {want.dtype} was traced",
                    where=f"{n.name}, {half}, rank {self.rank}",
                    fix="report it with this message: the rewritten graph is wrong",
                )
            if not same_strides(got, want.stride()) and not self.told and n.op == "call_function":
                self.told = True
                warnings.warn(
                    f"AUTOPAR_CHECK: {n.target} ({n.name}, {half}) left strides {got.stride()}, where {want.stride()} were traced",
                    stacklevel=2,
                )
        if self.one is not None and isinstance(value, torch.Tensor):
            for name, placement in n.meta.get(HOLDS, ()):
                self._compare(n, name, placement, value)

    def _compare(self, n: fx.Node, name: str, placement: Placement, value: torch.Tensor) -> None:
        assert self.one is not None
        whole = self.one.values.get(name)
        if whole is None or placement.partial:
            return
        want = self.cut(whole, placement)
        got = value.cpu()
        if not got.is_floating_point():
            wrong = "" if torch.equal(got, want.to(got.dtype)) else f"{int((got != want).sum())} of {got.numel()} elements differ"
        else:
            limit = _TOLERANCE.get(got.dtype, 5e-2)
            error, size = _norm(got.double() - want.double()), _norm(want)
            around = max((_norm(v) for v in self._operands(name)), default=0.0)
            wrong = "" if error <= limit * (size + 1e-2 * around) else f"off by {error / (size or 1.0):.1e} of its norm"
            odd = ~want.isfinite()
            if not torch.equal(got[odd].nan_to_num(), want.to(got.dtype)[odd].nan_to_num()) or bool((~got.isfinite() & ~odd).any()):
                wrong = "infinities or nan elsewhere"
        if wrong:
            raise CheckError(
                f"{n.target} made another value than one device: {wrong}",
                where=f"{name} at {placement}; {_torch.line_of(self.one.made[name])}",
                fix="report it with this message; until then a hand layout, or a plan with more memory, may avoid it",
            )

    def _operands(self, name: str) -> Iterator[torch.Tensor]:
        assert self.one is not None
        made = self.one.made[name]
        made = made.args[0] if _torch.is_getitem(made) else made
        for a in made.all_input_nodes:
            v = self.one.values.get(tensor_name(a))
            if v is not None and v.is_floating_point():
                yield v

    def _same(self, names: Sequence[str], got: Sequence[Any], want: Sequence[Any], half: str) -> None:
        """Of the lowered half and of the graph that it was lowered from."""
        for name, a, b in zip(names, got, want, strict=True):
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                continue
            limit = _TOLERANCE.get(b.dtype, 0.0)
            equal = a.shape == b.shape and a.dtype == b.dtype
            if equal and b.is_floating_point():
                equal = not _norm(a.double() - b.double()) > limit * _norm(b) + 1e-6
            if not equal:
                raise CheckError(
                    f"lowered, the {half} half returns another {name} than its graph",
                    where=f"rank {self.rank}",
                    fix='use backend="aot_eager", and report it with this message',
                )


def _pairs(value: Any, recorded: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    many = isinstance(value, (list, tuple))
    for got, want in zip(value if many else [value], recorded if many else [recorded], strict=True):
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            yield got, want


def _norm(t: torch.Tensor) -> float:
    """Of what is finite."""
    t = t.double()
    return float(torch.where(t.isfinite(), t, 0).norm())


def _said(r: Role) -> str:
    return f"{r.kind} {r.name or r.index}"
