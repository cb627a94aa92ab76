"""The program of a micro-batch: one whose losses, and gradients, add up to the whole batch's (`autopar.capture.samples` says how it differs from the model's own).

Requires: the same call captured at the size of a micro-batch and at that of the batch. Provides: inputs of the role "whole", values that are computed from the batch's data
before the first micro-batch runs (`WholeValues`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.batch_sizes import at_batch, other_size
from autopar.capture.capture import Captured, Role, Shapes
from autopar.capture.describe import describe, getattr_value, tensor_name
from autopar.capture.samples import NLL, Edits, MicroBatchError, separated

WHOLE = "whole"  # the kind of role of such a value


@dataclass(frozen=True)
class Samples:
    """Which part of a batch a program is for. samples: of the batch's `of`, each of `parts` ranks' parts giving as many in order. random: where they are in what a random
    operator draws, as (dim, elements to the right of their digit). values: of the whole batch."""

    samples: int
    of: int
    parts: int
    random: Mapping[str, tuple[int, int]]
    values: WholeValues


def micro_batched(part: Captured, whole: Captured, samples: int, of: int, parts: int = 1) -> Captured:
    """`part`, captured of `samples` of the `of` samples that `whole` was captured of, such that the losses of micro-batches add up to the batch's. Its graph is changed in
    place. parts: into how many the batch comes split (local inputs).

    Raises MicroBatchError where no such program is known."""
    if not part.loss_only and [r.kind for r in part.outputs].count("output") != 1:
        raise MicroBatchError(
            "a batch is run in parts for its loss, and this model returns no loss alone",
            fix="let forward return an output with a field `loss` of no dims, or pass loss_fn= to autopar.compile; or leave micro_batches= out",
        )
    edits = separated(describe(whole), describe(part), samples, of)
    inputs = _Rewriter(part, edits, samples / of).run(whole)
    return replace(part, inputs=inputs, samples=Samples(samples, of, parts, edits.random, WholeValues(whole, edits)))


class _Rewriter:
    def __init__(self, part: Captured, edits: Edits, share: float) -> None:
        self.captured, self.edits, self.share = part, edits, share
        self.graph = part.gm.graph
        self.node = {tensor_name(n): n for n in self.graph.nodes if n.op != "output"}
        self.op = {n.name: n for n in self.graph.nodes if n.op == "call_function"}

    def run(self, whole: Captured) -> tuple[Role, ...]:
        edits = self.edits
        there = {tensor_name(n): n for n in whole.gm.graph.nodes if n.op != "output"}
        values = [self.op_value(whole, w.op) if w.op else there[w.tensor].meta["val"] for w in edits.wholes]
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        given = []
        for k, val in enumerate(values):
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"whole_{k}")
            with self.captured.fake_mode:
                last.meta["val"] = torch.empty(tuple(val.shape), dtype=val.dtype)
            given.append(last)
        for name, op in edits.numbers.items():
            n = self.op[name]
            n.args = tuple(_with_numbers(a, b) for a, b in zip(n.args, op.args, strict=True))
            n.kwargs = {k: _with_numbers(v, op.kwargs[k]) for k, v in n.kwargs.items()}
        for tensor, reader in edits.shares:
            self.scaled(self.node[tensor], self.share, None if reader is None else {self.op[reader]})
        for name, k in edits.labels.items():
            n = self.op[name]
            forward = str(n.target) in NLL
            at = 3 if forward else 4
            n.args = (*n.args[:at], 2, *n.args[at + 1 :])
            if forward:
                self.scaled(self.node[f"{name}.0"], given[k])
            else:
                grad = n.args[0]
                assert isinstance(grad, fx.Node)
                self.scaled(grad, given[k], {n}, like=n)
        for tensor, reader_of in edits.readers:
            self.op[reader_of].replace_input_with(self.node[tensor], given[edits.given[tensor]])
        results = dict(zip(self.captured.outputs, _torch.results_of(self.graph), strict=True))
        for param in edits.grads:
            n = results[Role("grad", param)]
            if isinstance(n, fx.Node):
                self.scaled(n, self.share, {self.graph.output_node()}, like=n)
        _torch.drop_dead_code(self.captured.gm)
        self.graph.lint()
        self.captured.gm.recompile()
        return (*self.captured.inputs, *(Role(WHOLE, "", k) for k in range(len(given))))

    def op_value(self, whole: Captured, op: str) -> Any:
        """What 1 / its weights is like."""
        return next(n for n in whole.gm.graph.nodes if n.name == op).meta["val"][0]

    def scaled(self, n: fx.Node, by: float | fx.Node, readers: set[fx.Node] | None = None, like: fx.Node | None = None) -> None:
        """`by` times `n`, for those that read it."""
        if by == 1.0:
            return
        readers = set(n.users) if readers is None else readers
        before = min(readers, key=list(self.graph.nodes).index)
        with self.graph.inserting_before(before):
            new = self.graph.call_function(torch.ops.aten.mul.Tensor, (n, by))
        new.meta = {k: v for k, v in (like or n).meta.items() if k not in ("val", "tag")}
        val = n.meta["val"]
        with self.captured.fake_mode:
            new.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        for r in readers:
            r.replace_input_with(n, new)


def _with_numbers(mine: Any, of: Any) -> Any:
    """`mine`, an argument in the graph, with the numbers of `of`, the same one in the whole batch's program."""
    if isinstance(mine, (int, float)) and not isinstance(mine, bool) and isinstance(of, (int, float)):
        return of
    return mine


class WholeValues:
    """Values of a batch's data: sums over it that micro-batches are given. inputs: what they are computed from."""

    def __init__(self, whole: Captured, edits: Edits) -> None:
        self.edits, self.whole = edits, whole
        nodes = {tensor_name(n): n for n in whole.gm.graph.nodes if n.op != "output"}
        self.losses = {w.op: next(n for n in whole.gm.graph.nodes if n.name == w.op) for w in edits.wholes if w.op}
        wanted = [nodes[w.tensor] for w in edits.wholes]
        wanted += [n.args[2] for n in self.losses.values() if isinstance(n.args[2], fx.Node)]
        needed: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack += n.all_input_nodes
        self.order = [n for n in whole.gm.graph.nodes if n in needed]
        self.wanted = [nodes[w.tensor] for w in edits.wholes]
        places = [n for n in whole.gm.graph.nodes if n.op == "placeholder"]
        self.roles = {n: r for n, r in zip(places, whole.inputs, strict=True) if n in needed}

    @property
    def inputs(self) -> frozenset[Role]:
        return frozenset(self.roles.values())

    def __call__(self, values: Mapping[Role, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """One tensor for each role `WHOLE`. values: whole, on `device`."""
        env: dict[fx.Node, Any] = {}

        def here(x: Any) -> Any:
            if isinstance(x, fx.Node):
                return env[x]
            if isinstance(x, (list, tuple)):
                return [here(y) for y in x]
            return device if isinstance(x, torch.device) else x

        with torch.no_grad():
            for n in self.order:
                if n.op == "placeholder":
                    env[n] = values[self.roles[n]]
                elif n.op == "get_attr":
                    env[n] = getattr_value(self.whole.gm, n).to(device)
                else:
                    assert callable(n.target)
                    env[n] = n.target(*map(here, n.args), **{k: here(v) for k, v in n.kwargs.items()})
            return [self.weights(self.losses[w.op], env) if w.op else env[n] for w, n in zip(self.edits.wholes, self.wanted, strict=True)]

    def weights(self, loss: fx.Node, env: Mapping[fx.Node, Any]) -> torch.Tensor:
        """1 / sum of the weights of labels: 1 each, or that of its class; ignored ones count nothing."""
        labels, weight, ignored = env[_node(loss.args[1])], loss.args[2], loss.args[4]
        counts = labels != ignored
        if isinstance(weight, fx.Node):
            total = (env[weight].double()[torch.where(counts, labels, 0)] * counts).sum()
        else:
            total = counts.sum().double()
        dtype: torch.dtype = loss.meta["val"][0].dtype
        weight_of_all: torch.Tensor = total.reciprocal().to(dtype)
        return weight_of_all


def _node(x: Any) -> fx.Node:
    assert isinstance(x, fx.Node)
    return x


@dataclass(frozen=True)
class WholeBatch:
    """A call that is run in parts. shapes: of its tensors; of: its samples; parts: into how many they came split."""

    shapes: Shapes
    of: int
    parts: int
    _captured: list[Captured] = field(default_factory=list, compare=False, repr=False)

    def samples(self, shapes: Shapes) -> int:
        """How many samples a call of `shapes` has of it."""
        return next(s[0] for (s, _), (w, _) in zip(shapes, self.shapes, strict=True) if w and w[0] == self.of)

    def cut(self, samples: int) -> Shapes:
        """Shapes of a call of so many samples."""
        return tuple(((samples, *s[1:]) if s and s[0] == self.of else s, d) for s, d in self.shapes)

    def alone(self, captured: Callable[[Shapes], Captured]) -> Captured:
        """The program of the whole batch."""
        if not self._captured:
            self._captured.append(captured(self.shapes))
        return self._captured[0]

    def part(self, samples: int, captured: Callable[[Shapes], Captured]) -> Captured:
        """The program of a micro-batch of so many samples. captured: the call at the given shapes; it is captured at two sizes, whatever the micro-batches."""
        self.alone(captured)
        if len(self._captured) < 2:
            self._captured.append(captured(self.cut(other_size(self.of))))
        whole, few = self._captured
        gm = at_batch(few.gm, whole.gm, other_size(self.of), self.of, samples, mode := _torch.new_fake_mode())
        if gm is None:
            part = captured(self.cut(samples))
        else:
            part = replace(few, gm=gm, fake_mode=mode, input_shapes=self.cut(samples))
        return micro_batched(part, whole, samples, self.of, self.parts)


def samples_of(batch: int, micro_batches: int, ranks: int) -> list[int]:
    """Samples of each micro-batch: the same of all where that can be, else of sizes that differ by as few as `ranks` allow to share them evenly.

    Raises MicroBatchError where there are fewer samples than micro-batches."""
    if micro_batches > batch:
        raise MicroBatchError(
            f"{batch} samples do not make {micro_batches} micro-batches", fix=f"pass micro_batches={batch} at most, or larger batches"
        )
    if batch % micro_batches == 0:
        return [batch // micro_batches] * micro_batches
    common = math.gcd(batch, ranks)
    unit = max(u for u in range(1, common + 1) if common % u == 0 and batch // u >= micro_batches)
    each, more = divmod(batch // unit, micro_batches)
    return [(each + 1) * unit] * more + [each * unit] * (micro_batches - more)
