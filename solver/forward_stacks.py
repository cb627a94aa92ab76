"""The repeated layers of forward: periods of several copies where they read different shared values (`solver.stacks`, 2)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from autopar.solver.correspondence import settled
from autopar.solver.stacks import DIGITS, TRIES, Copies, Program, Stack, Token, op_hash
from autopar.solver.tandem_repeats import copies_of, cut, last_readers, longest_run


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
