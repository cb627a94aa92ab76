"""A deep program folded from captures of a shallow one: the time to capture does not grow with depth.

Two depths are captured, a period of layers apart. If their folds have the same canonical text but for the number of copies, and
that grew by as many layers as were added, then the deep program is the shallow one with more copies in the middle. If they are not
alike, the ends may be longer than the shallower one (T5's first and last layers are kinds of their own): one more period is tried, twice.
After that (a constant depends on the depth, layers do not repeat, parameters are not numbered) the program is captured in full, and
the `note` of the result says so.

What shallow captures cannot show is a layer that first differs below them: `period` must be a multiple of the true one (Gemma-3's
sliding windows: six layers), and all of the `head` of layers that differ from the others (dense layers before mixtures of experts) must be captured;
`layer_periods` reads both off the modules. Behind the head the number of layers captured equals the depth modulo the period, so that
what stands after the last whole period is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from autopar.errors import CaptureError
from autopar.graph.graph import Graph
from autopar.solver.fold import Folded, Numbered, fold, folded, numbered
from autopar.solver.stacks import DIGITS

CAPTURES = 4  # shallow ones, before the program is captured in full

# Layers; or the layers of each stack of several, by the path of its module list ("encoder.block").
Depth = int | Mapping[str, int]
Both = Callable[[Callable[[], Graph], Callable[[], Graph]], tuple[Graph, Graph]]


def tiled(capture_at: Callable[[Any], Graph], depth: Depth, period: Depth = 1, both: Both | None = None, head: Depth = 0) -> Folded:
    """The fold of `capture_at(depth)`, from shallower captures where they suffice.

    both: makes two captures at once (`autopar.capture.in_subprocess`); any program takes two.
    """
    depths = {"": depth} if isinstance(depth, int) else dict(depth)
    periods = dict.fromkeys(depths, period) if isinstance(period, int) else dict(period)
    heads = dict.fromkeys(depths, head) if isinstance(head, int) else dict(head)

    def graph(layers: Mapping[str, int]) -> Graph:
        return capture_at(layers[""] if isinstance(depth, int) else dict(layers))

    def captured(layers: Mapping[str, int]) -> Folded:
        return fold(graph(layers))

    def full(why: str) -> Folded:
        return replace(captured(depths), note=f"captured in full ({_plus(depths)} layers): {why}")

    tried = [{path: _first(d, periods[path], heads[path]) + k * periods[path] for path, d in depths.items()} for k in range(CAPTURES)]
    ahead: list[Graph] = []
    if both is not None and all(tried[1][path] < d for path, d in depths.items()):
        ahead = list(both(lambda: graph(tried[0]), lambda: graph(tried[1])))
    small: Folded | None = None
    for layers in tried:
        if any(layers[path] >= d for path, d in depths.items()):
            return full("it is not deeper than what would be captured of it")
        large = fold(ahead.pop(0)) if ahead else captured(layers)
        if small is not None and large.stacks and small.form() == large.form():
            return _deepened(small, large, layers, depths, periods) or full("its stacks do not grow with its depth")
        small = large
    return full("captures of two depths are not alike")


def _first(depth: int, period: int, head: int) -> int:
    """How many layers are captured first."""
    return head + 2 * period + (depth - head) % period


def least_depth(depth: int, period: int, head: int) -> int:
    """How many layers are captured at least: a stack of no more is not worth it."""
    return _first(depth, period, head) + period


def _plus(layers: Mapping[str, int]) -> str:
    return "+".join(map(str, layers.values()))


def _deepened(
    small: Folded, large: Folded, layers: Mapping[str, int], depths: Mapping[str, int], periods: Mapping[str, int]
) -> Folded | None:
    """`large`, a fold of `layers`, as the fold of `depths`; None where its growth from `small` does not say how."""
    copies = []
    grew = set()
    for stack, before, now in zip(large.stacks, small.copies, large.copies, strict=True):
        if now == before:  # it stands after the last whole period
            copies.append(now)
            continue
        leaves = numbered(large.graph, stack)
        path = next((path for path in depths if all(leaf.before.startswith(f"{path}.") for leaf in leaves.values())), "")
        if path not in depths or len(leaves) < len(stack.leaves[0]) or (now - before) * stack.layers != periods[path]:
            return None
        grew.add(path)
        copies.append(now + (depths[path] - layers[path]) // stack.layers)
    if len(grew) < len(depths):
        return None
    note = f"folded from captures of {_plus({p: n - periods[p] for p, n in layers.items()})} and {_plus(layers)} layers"
    return folded(large.graph, large.stacks, tuple(copies), large.unfolded, note)


# ---- parameters --------------------------------------------------------------------------------------------------


def expand_params(f: Folded, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameter of the whole program -> the parameter of `f.graph` that stands for it.

    shapes: of all parameters of the program, by name. Those that the program does not read are left out.
    """
    by_tensor = {t.name: n for n, t in f.graph.params.items()}
    moves = [(_Move(list(numbered(f.graph, s).values()), s.copies, n)) for s, n in zip(f.stacks, f.copies, strict=True)]
    found = {}
    for full_name, shape in shapes.items():
        name = full_name
        for move in moves:
            name = move(name)
        if name not in f.graph.params:
            continue
        t = f.graph.params[name]
        if t.shape != tuple(shape):
            raise CaptureError(
                f"parameter {full_name} has shape {tuple(shape)}, but {name}, which stands for it, has {t.shape}",
                fix="give `period` a multiple of the number of layers after which the model repeats",
            )
        found[full_name] = by_tensor[f.tensor_rep[t.name]]
    return found


@dataclass(frozen=True)
class _Move:
    """Names in a program with `copies` of a stack -> names in the graph, which has `captured` of it."""

    leaves: list[Numbered]
    captured: int
    copies: int

    def __call__(self, name: str) -> str:
        for leaf in self.leaves:
            k = leaf.index(name)
            if k is not None and 0 <= k < self.copies:
                return leaf.name(min(k, self.captured - 1))
        for before in dict.fromkeys(leaf.before for leaf in self.leaves):
            # A layer after the stack: as many layers fewer stand before it.
            first, step = min((leaf.first, leaf.step) for leaf in self.leaves if leaf.before == before)
            digits = DIGITS.match(name, len(before)) if name.startswith(before) else None
            if digits and int(digits[0]) >= first + self.copies * step:
                return f"{before}{int(digits[0]) - (self.copies - self.captured) * step}{name[digits.end() :]}"
        return name


# ---- periods -----------------------------------------------------------------------------------------------------

HEAD = 4  # layers at the beginning that may differ from all others (dense layers before mixtures of experts)


class Repeats(NamedTuple):
    """Of a module list. layers: how many; period: after how many it repeats (all of them if it does not); head: how many at its beginning do not."""

    layers: int
    period: int
    head: int


def layer_periods(model: nn.Module) -> dict[str, Repeats]:
    """Outermost module list -> how it repeats.

    Layers are compared by their modules' classes, parameters and plain attributes, but for those that count the layers.
    """
    found: dict[str, Repeats] = {}
    for path, m in model.named_modules():
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1 and not any(path.startswith(f"{p}.") for p in found):
            found[path] = Repeats(len(m), *_period([_traits(layer) for layer in m]))
    return found


def _traits(layer: nn.Module) -> dict[str, Any]:
    traits: dict[str, Any] = {}
    for path, m in layer.named_modules():
        traits[path] = type(m).__qualname__
        traits |= {f"{path}|{n}": v for n, v in vars(m).items() if isinstance(v, (bool, int, float, str))}
        traits |= {f"{path}|{n}": (tuple(p.shape), p.requires_grad) for n, p in m.named_parameters(recurse=False)}
    return traits


def _period(layers: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """And the head before it."""

    def counts(key: str) -> bool:
        values = [layer.get(key) for layer in layers]
        return all(type(v) is int and type(values[0]) is int and v == values[0] + i for i, v in enumerate(values))

    counting = {key for key in layers[0] if counts(key)}
    texts = [{k: v for k, v in layer.items() if k not in counting} for layer in layers]
    n = len(texts)
    for p in range(1, n):
        for head in range(HEAD + 1):
            if head + 2 * p <= n and all(texts[i] == texts[i + p] for i in range(head, n - p)):
                return p, head
    return n, 0
