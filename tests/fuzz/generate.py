"""A seed -> a program. Each program likes some classes of the grammar more than others, so that together they try more than the mean one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.grammar import WEIGHTS, draw_statement, load
from tests.fuzz.program import Line, Program, names_in

# What may be left out, by `--without`.
FEATURES = ("formats", "dropout", "mutated_inputs", "rough", "autocast", "containers", "aliases", "strided", "float32")
_USUAL = frozenset(FEATURES) - {"strided"}


def generate(seed: int, without: frozenset[str] = frozenset(), longest: int = 14) -> tuple[Program, Counter[str]]:
    """The program, and what eager refused on the way. longest: how many statements it may have, about."""
    load()
    rng = random.Random(seed)
    features = _USUAL - without
    # A few programs round to bfloat16; they cannot be compared closely, so no others do.
    rough = rng.random() < 0.06 and "rough" in features
    features = frozenset(f for f in features if rough or f not in ("rough", "autocast"))
    features = frozenset(f for f in features if f not in ("dropout", "mutated_inputs") or rng.random() < 0.12)
    dtype = "float32" if rough or (rng.random() < 0.2 and "float32" in features) else "float64"
    torch.manual_seed(0)
    d = Draw(rng, features, getattr(torch, dtype))
    _inputs(d)
    weights = {k: w * rng.choice((0.0, 0.3, 1.0, 1.0, 3.0)) for k, w in WEIGHTS.items()}
    weights["pointwise"] += 1.0
    length = min(longest, rng.choice((2, 3, 4, 5, 6, 8, 10, 14)))
    for _ in range(6 * length):
        draw_statement(d, weights)
        if len(d.body) >= length:
            break
    leaves = _leaves(d)
    if len(leaves) == 1 or (rng.random() < 0.3 or "containers" not in features):
        container = "one" if len(leaves) == 1 and rng.random() < 0.7 else "tuple"
    else:
        container = rng.choice(("tuple", "dict", "nested", "dataclass", "list"))
    form = rng.choice(("args", "args", "kwargs", "dict")) if "containers" in features else "args"
    p = Program(
        tuple(d.members), tuple(d.inputs), frozenset(d.grads), tuple(d.body), tuple(leaves), container, form, dtype, rng.random() < 0.85, d.rough,
    )  # fmt: skip
    if "dropout" in features:
        p = without_dead(p)  # eager would draw for what nobody reads
    return p, d.refused


def _inputs(d: Draw) -> None:
    rng = d.rng
    for i in range(rng.choice((1, 1, 2, 2, 3))):
        kind = rng.random()
        rank = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5)) if i == 0 else rng.choice((0, 1, 2, 3, 4))
        shape = [d.batch, *(rng.choice((1, 2, 3, 4, 4, 6, 8)) for _ in range(rank - 1))] if rank else []
        if kind < 0.12 and i:
            d.indices(8, d.batch, rng.choice((4, 8)))
            continue
        text = f"randn({d.seed()}, {d.dims(shape)}{', ' if shape else ''}dtype=D)"
        how = rng.random() if "aliases" in d.features else 1.0
        if how < 0.08 and rank >= 2:
            text = f"randn({d.seed()}, {d.dims([shape[1], shape[0], *shape[2:]])}, dtype=D).transpose(0, 1)"
        elif how < 0.13 and rank >= 2:
            text = f"randn({d.seed()}, {d.dims([1, *shape[1:]])}, dtype=D).expand({d.dims(shape)})"
        elif how < 0.16 and rank >= 2:
            text = f"randn({d.seed()}, {d.dims([2 * shape[0], *shape[1:]])}, dtype=D)[::2]"
        elif how < 0.2 and i:
            text = rng.choice(d.inputs)[0]
        elif how < 0.23 and i:
            text = f"{rng.choice(d.inputs)[0]}[:1]"
        d.input(text, rng.random() < 0.4 and "expand" not in text and not names_in(text))


def _leaves(d: Draw) -> list[str]:
    """What the program returns; mostly a loss, or what a loss is made of outside."""
    rng = d.rng
    made = [n for line in d.body for n in line.makes if n in d.values]
    grads = [n for n in made if d.values[n].requires_grad and d.values[n].is_floating_point()]
    pool = grads or made or [n for n, _ in d.inputs]
    picked = [pool[-1], *rng.sample(pool, min(len(pool), rng.choice((0, 1, 1, 2))))]
    picked = list(dict.fromkeys(picked))
    if rng.random() < 0.4:
        v = d.fresh()
        terms = " + ".join(f"{n}.square().mean()" if d.values[n].is_floating_point() else f"{n}.sum()" for n in picked)
        d.body.append(Line(f"{v} = {terms}", (v,)))
        picked = [v]
        if rng.random() < 0.6:
            return picked
    extra = [*made, *(n for n, _ in d.inputs)] if "aliases" in d.features else made
    if extra and rng.random() < 0.3:
        picked.append(rng.choice(extra))
    if rng.random() < 0.08:
        picked.append(rng.choice(picked))
    if rng.random() < 0.1 and d.values.get(picked[0]) is not None and d.values[picked[0]].dim() >= 1:
        picked.append(
            rng.choice(
                (
                    f"{picked[0]}[0]",
                    f"{picked[0]}.view_as({picked[0]})",
                    "None",
                    "self.training",
                    f"{picked[0]}.shape[0]",
                    f"{picked[0]}.detach()",
                )
            )
        )
    return picked


def without_dead(p: Program) -> Program:
    """Without statements that nothing that is returned reads, members and inputs that nothing reads."""
    wanted = set().union(*(names_in(leaf) for leaf in p.leaves))
    kept: list[Line] = []
    for line in reversed(p.body):
        if line.effect or wanted & set(line.makes):
            kept.append(line)
            wanted |= line.uses
    inputs = []
    for n, text in reversed(p.inputs):
        if n in wanted:
            inputs.append((n, text))
            wanted |= names_in(text)
    members = []
    for m in reversed(p.members):
        if wanted & set(m.makes):
            members.append(m)
            wanted |= m.uses
    return replace(p, body=tuple(reversed(kept)), inputs=tuple(reversed(inputs)), members=tuple(reversed(members)))
