"""The backward copies of forward's layers (`solver.stacks`, 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.solver.correspondence import homes_of, settled
from autopar.solver.stacks import TRIES, Program, Stack, op_hash
from autopar.solver.tandem_repeats import copies_of, cut, last_readers, longest_run


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
