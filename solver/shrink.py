"""A fold with as few copies in its graph as the program needs to be planned: the first, one that stands for all in the middle, the last.

A capture of the whole program has every copy, a tiled one (`autopar.tile`) a few; shrunk, both are the same graph but for names, and so
have the same plan. The copies between the first and the last but one are taken out; what the middle one read of the copy before it, it
reads of the first, and what the first read of the copy after it, it reads of the middle one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph import Graph, Op, Tensor
from autopar.solver import stacks as st
from autopar.solver.fold import Folded, folded
from autopar.solver.stacks import Copies, Home, Program, Stack


@dataclass(frozen=True)
class Shrunk:
    """fold: of the smaller graph. image: operator of the larger graph -> the operator of the smaller one that stands for it.

    times, tensor_times: how many operators (tensors) of the program each of the smaller graph stands for.
    """

    fold: Folded
    image: Mapping[str, str]
    times: Mapping[str, int]
    tensor_times: Mapping[str, int]

    @property
    def graph(self) -> Graph:
        return self.fold.graph


def shrink(f: Folded) -> Shrunk:
    program = Program(f.graph)
    homes = st.homes_of(program, f.stacks)
    outside = _read_outside(f.graph, homes)
    kept: list[list[int]] = []
    for s, stack in enumerate(f.stacks):
        n, reach = stack.copies, _reach(program, homes, s, stack)
        some = [*range(reach), n - 2, n - 1]
        dropped = set(range(n)) - set(some)
        kept.append(list(range(n)) if not dropped or reach >= n - 2 or dropped & outside.get(s, set()) else some)
    image: dict[str, str] = {op.name: op.name for op in f.graph.ops}
    gone: set[str] = set()
    for s, stack in enumerate(f.stacks):
        for part in (stack.forward, stack.backward, stack.leaves):
            for k in set(range(stack.copies)) - set(kept[s]):
                for name, middle in zip(part[k], part[-2], strict=True):
                    gone.add(name)
                    if part is not stack.leaves:
                        image[name] = middle
    graph = f.graph
    stacks = f.stacks
    if gone:
        graph = _without(program, f.stacks, homes, kept, gone)
        stacks = tuple(replace(s, forward=_some(s.forward, k), backward=_some(s.backward, k), leaves=_some(s.leaves, k))
                       for s, k in zip(f.stacks, kept, strict=True))  # fmt: skip
    small = folded(graph, stacks, f.copies, f.unfolded, f.note)
    times = dict.fromkeys((op.name for op in graph.ops), 1)
    tensor_times = dict.fromkeys(graph.tensors, 1)
    outputs = {op.name: [t.name for t in op.outputs if t is not None] for op in graph.ops}
    for stack, copies in zip(stacks, f.copies, strict=True):
        for name in (*stack.forward[-2], *stack.backward[-2]):
            times[name] = copies - stack.copies + 1
            tensor_times |= dict.fromkeys(outputs[name], times[name])
        tensor_times |= dict.fromkeys(stack.leaves[-2], copies - stack.copies + 1)
    return Shrunk(small, image, times, tensor_times)


def _some(copies: Copies, kept: list[int]) -> Copies:
    return tuple(copies[k] for k in kept)


def _reach(program: Program, homes: Mapping[str, Home], s: int, stack: Stack) -> int:
    """Over how many copies an operator reads."""
    far = 1
    for copies in (stack.forward, stack.backward):
        for k, names in enumerate(copies):
            for name in names:
                for t in program.inputs[name]:
                    home = homes.get(t)
                    if home is not None and home.stack == s:
                        far = max(far, abs(home.copy - k))
    return far


def _read_outside(graph: Graph, homes: Mapping[str, Home]) -> dict[int, set[int]]:
    """Stack -> copies of which something that is not in the stack reads."""
    found: dict[int, set[int]] = {}
    where = {name.split(".")[0]: home for name, home in homes.items()}
    for op in graph.ops:
        mine = where.get(op.name)
        for t in op.inputs:
            home = homes.get(t.name)
            if home is not None and (mine is None or mine.stack != home.stack):
                found.setdefault(home.stack, set()).add(home.copy)
    for name in graph.outputs:
        if name in homes:
            found.setdefault(homes[name].stack, set()).add(homes[name].copy)
    return found


def _without(program: Program, stacks: tuple[Stack, ...], homes: Mapping[str, Home], kept: list[list[int]], gone: set[str]) -> Graph:
    graph = program.graph
    copy_of = {name: (s, k) for s, stack in enumerate(stacks) for part in (stack.forward, stack.backward)
               for k, names in enumerate(part) for name in names}  # fmt: skip

    def tensor_at(s: int, home: Home, k: int) -> Tensor:
        part = {"f": stacks[s].forward, "b": stacks[s].backward, "l": stacks[s].leaves}[home.part]
        name = part[k][home.slot]
        if home.part == "l":
            return graph.tensors[name]
        t = program.ops[name].outputs[home.output]
        assert t is not None
        return t

    def rewired(x: Any, s: int, k: int) -> Any:
        if isinstance(x, Tensor):
            home = homes.get(x.name)
            if home is None or home.stack != s or home.copy == k:
                return x
            return tensor_at(s, home, kept[s][kept[s].index(k) + home.copy - k])
        if isinstance(x, (list, tuple)):
            return type(x)(rewired(y, s, k) for y in x)
        if isinstance(x, dict):
            return {key: rewired(y, s, k) for key, y in x.items()}
        return x

    ops: list[Op] = []
    lost: set[str] = set()
    for op in graph.ops:
        if op.name in gone:
            lost |= {t.name for t in op.outputs if t is not None}
            continue
        at = copy_of.get(op.name)
        ops.append(op if at is None else replace(op, args=rewired(op.args, *at), kwargs=rewired(op.kwargs, *at)))
    lost |= {n for n in gone if n in graph.tensors}
    return replace(
        graph,
        params={n: t for n, t in graph.params.items() if t.name not in lost},
        buffers={n: t for n, t in graph.buffers.items() if t.name not in lost},
        ops=tuple(ops),
        grads={n: g for n, g in graph.grads.items() if graph.params[n].name not in lost},
        buffer_updates={n: u for n, u in graph.buffer_updates.items() if graph.buffers[n].name not in lost},
        tensors={n: t for n, t in graph.tensors.items() if n not in lost},
    )
