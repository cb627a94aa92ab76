"""Where in the step a position of the planned graph lies, so that what happens there can be told once for equal layers: regions and spots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.graph.graph import Graph
from autopar.solver.stacks import Stack
from autopar.timeline.profile import Region, Spot


@dataclass(frozen=True)
class Home:
    """What a call or a tensor belongs to: a stack (-1: none), its place there, and the copies of the program that the place stands for."""

    stack: int = -1
    place: int = 0
    first: int = 0
    times: int = 1


OUTSIDE = Home()


class Places:
    """times: of every operator and leaf in a stack, how many of the program it stands for."""

    def __init__(self, graph: Graph, stacks: tuple[Stack, ...], times: Mapping[str, int]) -> None:
        ops = graph.ops
        self.turn = next((i for i, op in enumerate(ops) if op.direction == "backward"), len(ops))
        self.position = {op.name: i for i, op in enumerate(ops)}
        self.names = [op.name for op in ops]
        self.homes: dict[str, Home] = {}
        self.rank: dict[str, int] = {}  # operator of a stack -> its place among those of its copy, the same in all copies
        self.copies: dict[str, int] = {}
        spans: list[tuple[int, int, int, str]] = []
        for s, stack in enumerate(stacks):
            first = 0
            for place, names in enumerate(zip(stack.forward, stack.backward, stack.leaves, strict=True)):
                every = [n for part in names for n in part]
                n = max((times.get(x, 1) for x in every), default=1)
                self.homes |= dict.fromkeys(every, Home(s, place, first, n))
                first += n
            self.copies[stack.name] = first
            for stage, copies in (("forward", stack.forward), ("backward", stack.backward)):
                at_slot = [self.position[name] for name in copies[-2]]
                order = sorted(range(len(at_slot)), key=at_slot.__getitem__)
                for row in copies:
                    self.rank |= {row[slot]: i for i, slot in enumerate(order)}
                if at := [self.position[x] for row in copies for x in row]:
                    spans.append((min(at), max(at), s, stage))
        self._cut(sorted(spans), stacks)

    def _cut(self, spans: list[tuple[int, int, int, str]], stacks: tuple[Stack, ...]) -> None:
        self.regions: list[Region] = []
        self.region_of: list[int] = []
        of_stack: dict[tuple[int, str], int] = {}
        open_at = ("", -2)
        for i, name in enumerate(self.names):
            stage = "forward" if i < self.turn else "backward"
            home = self.homes.get(name, OUTSIDE).stack
            if home < 0:  # between operators of a stack, it counts to the stack
                home = next((s for low, high, s, of in spans if low < i < high and of == stage), -1)
            if home >= 0 and (home, stage) in of_stack:
                self.region_of.append(of_stack[home, stage])
                open_at = (stage, home)
                continue
            if (stage, home) != open_at:
                stack = stacks[home] if home >= 0 else None
                self.regions.append(Region(stage, stack.name, stack.layers) if stack else Region(stage))
                open_at = (stage, home)
            if home >= 0:
                of_stack[home, stage] = len(self.regions) - 1
            self.region_of.append(len(self.regions) - 1)
        self.regions.append(Region("optimizer"))

    def home(self, tensor: str) -> Home:
        """Of an operator, a result of one, or a leaf."""
        return self.homes.get(tensor) or self.homes.get(tensor.split(".")[0], OUTSIDE)

    def spot(self, home: Home, position: int, phase: int, sub: int = 0) -> Spot:
        """Where what belongs to `home` happens, if it happens at a position of the planned graph."""
        position = min(max(position, 0), len(self.names) - 1)
        region = self.region_of[position]
        if not self.regions[region].stack:
            return Spot(region, 0, position, phase, sub)
        # An operator that is of no stack, but within one: in front of the next that is.
        wide, at = len(self.names), position
        while self.names[at] not in self.homes:
            at += 1
        there, rank = self.homes[self.names[at]], self.rank[self.names[at]]
        offset = rank * wide - (at - position)
        if there.stack == home.stack:
            return Spot(region, there.place - home.place, offset, phase, sub)
        runs_last = there.first + there.times - 1 if self.regions[region].stage == "forward" else there.first
        return Spot(region, runs_last - home.first, offset, phase, sub)
