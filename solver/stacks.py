"""Finds the repeated layers of a graph: which operators of one layer correspond to which of the next.

1. Every operator is hashed by what it is: target, constants, shapes, dtypes, names of its parameters without their numbers. A stretch
   of the forward sequence that equals itself shifted by p is a tandem repeat, a run of copies of p operators. Of the places where a run
   may be cut into copies, the one is taken at which a copy mixes the fewest layer numbers, then the one that the fewest values cross.
2. Copies that look alike may read different shared values (masks of Gemma-3's sliding layers): they are equal when they read the same,
   and the period is then several copies of the run (m, the smallest that leaves the most saved).
3. The backward sequence is hashed with the class of the forward values that it reads (but for layers' results: the first layer
   reads the embedding in their place), and cut so that a copy reads one forward copy.
   Copy k of a stack is its forward and its backward; a layer with only one of the two folded is not folded.
4. Correspondence is checked, not assumed. Let in(k, i) be what input i of an operator in copy k reads, written as (slot, distance in
   copies) if it lies in the stack and as its name otherwise. It must be equal in all copies, except where copy k - distance does not
   exist: there the stack reads from its surroundings (the first copy in forward, the last in backward). Copies that differ are cut off.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.graph.graph import Graph, Op, Tensor

MIN_PERIOD = 2
TRIES = 20  # runs, or stretches of a run, looked at before operators are left unfolded
PLACES = {"device", "pin_memory", "layout"}  # keyword arguments that say where, not what
DIGITS: re.Pattern[str] = re.compile(r"\d+")

Copies = tuple[tuple[str, ...], ...]
Token = tuple[Any, ...]


@dataclass(frozen=True)
class Stack:
    """Corresponding operators (by name) and leaves of `copies` copies; copy k's backward is backward[k], () where there is none.

    leaves: tensors that only one copy reads: its parameters, buffers and constants.  layers: layers a copy.
    """

    forward: Copies
    backward: Copies
    leaves: Copies
    layers: int = 1
    name: str = ""

    @property
    def copies(self) -> int:
        return len(self.forward)

    def part(self, lo: int, hi: int) -> Stack:
        return replace(self, forward=self.forward[lo:hi], backward=self.backward[lo:hi], leaves=self.leaves[lo:hi])


@dataclass(frozen=True)
class Home:
    """Where a result of an operator or a leaf belongs: `slot` of `part` (f, b, or l for leaves) of copy `copy`."""

    stack: int
    part: str
    slot: int
    copy: int
    output: int = 0

    @property
    def anywhere(self) -> tuple[int, str, int, int]:
        """The same in any copy."""
        return self.stack, self.part, self.slot, self.output


class Program:
    """The graph's operators in order, what each reads and who makes what."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = {op.name: op for op in graph.ops}
        self.inputs = {op.name: tuple(t.name for t in op.inputs) for op in graph.ops}
        self.maker = {t.name: (op.name, i) for op in graph.ops for i, t in enumerate(op.outputs) if t is not None}
        self.leaf_names = {t.name: f"param {n}" for n, t in graph.params.items()}
        self.leaf_names |= {t.name: f"buffer {n}" for n, t in graph.buffers.items()}
        given = {t.name for t in (*graph.inputs, *graph.tangents)}
        self.leaf_names |= {n: "constant" for n in graph.tensors if n not in self.maker and n not in given and n not in self.leaf_names}
        self.directions = {d: [op for op in graph.ops if op.direction == d] for d in ("forward", "backward")}


def constant_text(x: Any, tensor: Any) -> str:
    """An argument as text, tensors written by `tensor`."""
    if isinstance(x, Tensor):
        return str(tensor(x))
    if isinstance(x, (list, tuple)):
        return "(" + ",".join(constant_text(y, tensor) for y in x) + ")"
    if isinstance(x, dict):
        return "{" + ",".join(f"{k}={constant_text(v, tensor)}" for k, v in x.items() if k not in PLACES) + "}"
    return repr(x)


def starred(name: str) -> str:
    return DIGITS.sub("*", name)


def shape_text(t: Tensor | None) -> str:
    return "-" if t is None else f"{t.dtype}{list(t.shape)}"


def tag_text(op: Op) -> str:
    """Operators are alike if their users want the same of them: a layer that is checkpointed is not one that is not."""
    return f" {'/'.join(op.binding)}" if op.binding else ""


def op_hash(program: Program, op: Op, homes: Mapping[str, Home]) -> str:
    def tensor(t: Tensor) -> str:
        home = homes.get(t.name)
        place = f"{home.stack}{home.part}{home.slot}.{home.output}" if home else starred(program.leaf_names.get(t.name, ""))
        return f"<{shape_text(t)}{place}>"

    results = "".join(map(shape_text, op.outputs))
    text = f"{op.target}{constant_text(op.args, tensor)}{constant_text(op.kwargs, tensor)}{results}{tag_text(op)}"
    return hashlib.sha256(text.encode()).hexdigest()


# ---- runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Operators [start, end) of a sequence equal themselves shifted by `period`, as far as their hashes say."""

    start: int
    end: int
    period: int


def longest_run(ids: Any, lo: int, hi: int, refused: set[tuple[int, int]]) -> Run | None:
    """The run in [lo, hi) whose folding saves the most operators."""
    best, best_saved = None, 0
    a = ids[lo:hi]
    for period in range(MIN_PERIOD, (hi - lo) // 2 + 1):
        equal = np.concatenate(([False], a[:-period] == a[period:], [False]))
        if np.count_nonzero(equal) <= best_saved:
            continue
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            saved = int(end - start) // period * period
            if saved > best_saved and (lo + int(start), period) not in refused:
                best, best_saved = Run(lo + int(start), lo + int(end) + period, period), saved
    return best


def cut(run: Run, numbers: Sequence[frozenset[int]], last: Sequence[int]) -> Run:
    """`run` from the place on where copies begin.

    numbers: per operator the layer numbers it shows; last: per operator the position of its last reader.
    """

    def cost(start: int) -> tuple[int, int, int, int]:
        shown = {n for ns in numbers[start : start + run.period] for n in ns}
        crossing = sum(start + run.period <= last[i] < start + 2 * run.period for i in range(start, start + run.period))
        return len(shown), -((run.end - start) // run.period), crossing, start

    starts = range(run.start, min(run.start + run.period, run.end - 2 * run.period + 1))
    return replace(run, start=min(starts, key=cost))


def copies_of(run: Run, names: Sequence[str]) -> Copies:
    count = (run.end - run.start) // run.period
    return tuple(tuple(names[run.start + k * run.period : run.start + (k + 1) * run.period]) for k in range(count))


def last_readers(program: Program, ops: Sequence[Op]) -> list[int]:
    position = {op.name: i for i, op in enumerate(ops)}
    last = list(range(len(ops)))
    for i, op in enumerate(ops):
        for t in program.inputs[op.name]:
            maker = program.maker.get(t)
            if maker and maker[0] in position:
                last[position[maker[0]]] = i
    return last


# ---- correspondence ----------------------------------------------------------------------------------------------


def homes_of(program: Program, stacks: Sequence[Stack]) -> dict[str, Home]:
    """Tensor name -> home, for all that lies in a stack."""
    homes: dict[str, Home] = {}
    for s, stack in enumerate(stacks):
        for part, copies in (("f", stack.forward), ("b", stack.backward)):
            for k, copy in enumerate(copies):
                for slot, name in enumerate(copy):
                    for i, t in enumerate(program.ops[name].outputs):
                        if t is not None:
                            homes[t.name] = Home(s, part, slot, k, i)
        for k, copy in enumerate(stack.leaves):
            for slot, name in enumerate(copy):
                homes[name] = Home(s, "l", slot, k)
    return homes


def token(homes: Mapping[str, Home], stack: int, copy: int, name: str) -> Token:
    """What a reader in copy `copy` of `stack` reads: ("in", part, slot, output, distance) or ("at", name)."""
    home = homes.get(name)
    if home is None or home.stack != stack:
        return ("at", name)
    return ("in", home.part, home.slot, home.output, copy - home.copy)


def wiring(program: Program, stack: Stack) -> Iterator[list[str]]:
    """Corresponding reads, one list of tensor names (by copy) a read; the gradients of parameters count as read."""
    for copies in (stack.forward, stack.backward):
        for ops in zip(*copies, strict=True):
            yield from map(list, zip(*(program.inputs[n] for n in ops), strict=True))
    results = {program.graph.buffers[n].name: t for n, t in program.graph.buffer_updates.items() if n in program.graph.buffers}
    if stack.backward[0]:
        results |= {program.graph.params[n].name: t for n, t in program.graph.grads.items() if n in program.graph.params}
    for leaves in zip(*stack.leaves, strict=True):
        yield [results.get(n, "") for n in leaves]


def generic(tokens: Sequence[Token]) -> Token:
    """What copies read, as most of them say; by preference something in the stack."""
    seen = Counter(tokens)
    return min(seen, key=lambda t: (len(_unlike(tokens, t)), t[0] == "at", -seen[t], t))


def _unlike(tokens: Sequence[Token], rule: Token) -> set[int]:
    """Copies that do not read what `rule` says, but for those for which that does not exist."""
    reach = rule[-1] if rule[0] == "in" else 0
    return {k for k, t in enumerate(tokens) if t != rule and 0 <= k - reach < len(tokens)}


def differing(tokens: Sequence[Token]) -> set[int]:
    return set() if len(set(tokens)) == 1 else _unlike(tokens, generic(tokens))


def settled(program: Program, stack: Stack) -> Stack | None:
    """The longest stretch of `stack` whose copies are wired alike; None where no two are (or none was found in TRIES)."""
    windows = [(0, stack.copies)]
    tried: set[tuple[int, int]] = set()
    while windows and len(tried) < TRIES:
        lo, hi = max(windows, key=lambda s: (s[1] - s[0], -s[0]))
        windows.remove((lo, hi))
        if (lo, hi) in tried or hi - lo < 2:
            continue
        tried.add((lo, hi))
        part = stack.part(lo, hi)
        homes = homes_of(program, [part])
        bad: set[int] = set()
        for names in wiring(program, part):
            bad |= differing([token(homes, 0, k, n) for k, n in enumerate(names)])
        if not bad:
            return part
        # A copy that reads otherwise may still be the first or the last of its stretch.
        walls = [lo - 1, *(lo + k for k in sorted(bad)), hi]
        for a, b in itertools.pairwise(walls):
            windows += [(max(lo, a + 1 - i), min(hi, b + j)) for i in (0, 1) for j in (0, 1)]
    return None


# ---- forward -----------------------------------------------------------------------------------------------------


def leaf_copies(program: Program, copies: Copies) -> Copies:
    """Per copy the leaves that it alone reads, by first use."""
    readers: dict[str, set[int]] = defaultdict(set)
    where = {n: k for k, copy in enumerate(copies) for n in copy}
    for op in program.directions["forward"]:
        for t in program.inputs[op.name]:
            readers[t].add(where.get(op.name, -1))
    own = [
        tuple(dict.fromkeys(t for n in copy for t in program.inputs[n] if t in program.leaf_names and readers[t] == {k}))
        for k, copy in enumerate(copies)
    ]
    return tuple(own)


def layer_signatures(program: Program, copies: Copies) -> list[int]:
    """One number a copy; equal when copies read the same shared values and the same of each other."""
    position = {n: i for i, n in enumerate(n for copy in copies for n in copy)}
    leaves = leaf_copies(program, copies)
    ids: dict[tuple[Token, ...], int] = {}
    found = []
    for k, copy in enumerate(copies):
        own = {t: i for i, t in enumerate(leaves[k])}
        tokens: list[Token] = []
        for n in copy:
            for t in program.inputs[n]:
                maker = program.maker.get(t)
                if t in own:
                    tokens.append(("own", own[t]))
                elif maker and maker[0] in position:
                    tokens.append(("rel", position[n] - position[maker[0]], maker[1]))
                else:
                    tokens.append(("at", t))
        found.append(ids.setdefault(tuple(tokens), len(ids)))
    return found


def grouped(program: Program, copies: Copies) -> Stack | None:
    """Copies of a run as a stack: m of them a copy where every m-th reads the same."""
    signatures = np.array(layer_signatures(program, copies))
    n = len(copies)
    best: Stack | None = None
    candidates = []
    for m in range(1, n // 2 + 1):
        equal = np.concatenate(([False], signatures[:-m] == signatures[m:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        runs = [(int(s), int(e) + m) for s, e in zip(edges[::2], edges[1::2], strict=True)] or [(1, 1 + m)]
        lo, hi = max(runs, key=lambda r: (r[1] - r[0], -r[0]))
        for start in range(max(0, lo - m), lo + 1):
            count = (min(hi, n) - start) // m
            if count >= 2:
                candidates.append(((count - 1) * m, m, start, count))
    for bound, m, start, count in sorted(candidates, key=lambda c: (-c[0], c[1], c[2])):
        if best is not None and bound <= (best.copies - 1) * best.layers:
            break
        joined = tuple(tuple(x for c in copies[start + k * m : start + (k + 1) * m] for x in c) for k in range(count))
        leaves = leaf_copies(program, joined)
        if len({len(own) for own in leaves}) > 1 or not leaves[0]:
            continue
        found = settled(program, Stack(joined, ((),) * count, leaves, m))
        if found is not None and (best is None or (found.copies - 1) * m > (best.copies - 1) * best.layers):
            best = found
    return best


def layer_number(a: str, b: str) -> int | None:
    """The number in name `a` that is another one in name `b`."""
    return next((int(x) for x, y in zip(DIGITS.findall(a), DIGITS.findall(b), strict=False) if x != y), None)


def forward_stacks(program: Program) -> list[Stack]:
    ops = program.directions["forward"]
    names = [op.name for op in ops]
    hashes = [op_hash(program, op, {}) for op in ops]
    ids = np.unique(np.array(hashes), return_inverse=True)[1] if hashes else np.array([])
    last = last_readers(program, ops)
    own = [next((program.leaf_names[t] for t in program.inputs[n] if t in program.leaf_names), "") for n in names]
    stacks: list[tuple[int, Stack]] = []

    def search(lo: int, hi: int) -> None:
        refused: set[tuple[int, int]] = set()
        while len(refused) < TRIES and (run := longest_run(ids, lo, hi, refused)) is not None:
            numbers = [frozenset[int]()] * len(ops)
            for i in range(run.start, run.end - run.period):
                number = layer_number(own[i], own[i + run.period])
                numbers[i] = frozenset() if number is None else frozenset({number})
            stack = grouped(program, copies_of(cut(run, numbers, last), names)) if any(numbers) else None
            if stack is None:
                refused.add((run.start, run.period))
                continue
            start, end = names.index(stack.forward[0][0]), names.index(stack.forward[-1][-1]) + 1
            stacks.append((start, stack))
            search(lo, start)
            search(end, hi)
            return

    search(0, len(ops))
    return [s for _, s in sorted(stacks, key=lambda x: x[0])]


# ---- backward ----------------------------------------------------------------------------------------------------


def with_backward(program: Program, stacks: list[Stack]) -> tuple[list[Stack], dict[int, str]]:
    """The stacks with their backward copies; and, by stack, why one was given up."""
    ops = program.directions["backward"]
    names = [op.name for op in ops]
    position = {n: i for i, n in enumerate(names)}
    homes = homes_of(program, stacks)
    # Only what its own copy alone reads tells whose backward an operator is: a layer's result is read by the next layer's backward.
    reader_copy = {n: (s, k) for s, stack in enumerate(stacks) for k, copy in enumerate(stack.forward) for n in copy}
    public = set()
    for op in program.directions["forward"]:
        for t in program.inputs[op.name]:
            if t in homes and reader_copy.get(op.name) != (homes[t].stack, homes[t].copy):
                public.add(homes[t].anywhere)
    private = {t for t, h in homes.items() if h.anywhere not in public}
    votes: list[set[tuple[int, int]]] = [{(homes[t].stack, homes[t].copy) for t in program.inputs[n] if t in private} for n in names]
    for parameter, t in program.graph.grads.items():
        leaf = program.graph.params[parameter].name
        maker = program.maker.get(t)
        if leaf in homes and maker and maker[0] in position:
            votes[position[maker[0]]].add((homes[leaf].stack, homes[leaf].copy))
    own = {t: homes[t] for t in private}
    hashes = [op_hash(program, op, own) for op in ops]
    ids = np.unique(np.array(hashes), return_inverse=True)[1] if hashes else np.array([])
    last = last_readers(program, ops)
    done: list[Stack] = []
    given_up: dict[int, str] = {}
    for s, stack in enumerate(stacks):
        touched = [i for i, v in enumerate(votes) if any(x == s for x, _ in v)]
        if not touched:
            done.append(stack)  # frozen, or no backward at all
            continue
        numbers = [frozenset(k for x, k in v if x == s) for v in votes]
        others = [i for i, v in enumerate(votes) if any(x != s for x, _ in v)]
        lo = max((i + 1 for i in others if i < touched[0]), default=0)
        hi = min((i for i in others if i > touched[-1]), default=len(ops))
        found = _backward_of(program, stack, names, ids, numbers, last, (lo, hi))
        if found is None:
            given_up[s] = "its backward does not repeat"
        else:
            done.append(found)
    return done, given_up


def _backward_of(
    program: Program,
    stack: Stack,
    names: Sequence[str],
    ids: Any,
    numbers: Sequence[frozenset[int]],
    last: Sequence[int],
    within: tuple[int, int],
) -> Stack | None:
    """`stack`, as far as its backward repeats in the stretch `within` of the backward sequence."""
    position = {n: i for i, n in enumerate(names)}
    refused: set[tuple[int, int]] = set()
    while len(refused) < TRIES and (run := longest_run(ids, *within, refused)) is not None:
        refused.add((run.start, run.period))
        layer: dict[int, tuple[str, ...]] = {}
        for copy in copies_of(cut(run, numbers, last), names):
            shown = {k for n in copy for k in numbers[position[n]]}
            if len(shown) == 1:
                layer[shown.pop()] = copy
        lo, hi = _longest_span(sorted(layer))
        if hi - lo >= 2:
            found = settled(program, replace(stack.part(lo, hi), backward=tuple(layer[k] for k in range(lo, hi))))
            if found is not None:
                return found
    return None


def _longest_span(numbers: Sequence[int]) -> tuple[int, int]:
    """Of sorted numbers, the longest [lo, hi) without a gap."""
    best = (0, 0)
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            if i - start > best[1] - best[0]:
                best = (numbers[start], numbers[i - 1] + 1)
            start = i
    return best
