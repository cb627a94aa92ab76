"""Which operator of one copy is which of the next, checked through what each reads (`solver.stacks`, 4)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopar.solver.stacks import TRIES, Home, Program, Stack, Token


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
