"""Makes a failing program small while it fails in the same way: fewer results, settings, statements, inputs.

A statement may go for good where nobody reads what it makes, may be a fresh input of the same shape instead, or stand for one of the values that it reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.fuzz.check import check
from tests.fuzz.generate import without_dead
from tests.fuzz.judge import Reference, Unfit
from tests.fuzz.program import Line, Program, load, names_in
from tests.fuzz.settings import Setting


def shrink(p: Program, setting: Setting, kind: str, seconds: float = 60.0) -> tuple[Program, Setting]:
    end = time.monotonic() + seconds

    def fails(q: Program, s: Setting) -> bool:
        if time.monotonic() > end:
            return False
        try:
            reference = Reference.of(q.source)
        except (Unfit, SyntaxError):  # of an argument that stands twice, say
            return False
        found = check(q.source, [s], reference).failure
        return found is not None and found.kind == kind

    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for s in _simpler(setting):
            if fails(p, s):
                setting, changed = s, True
                break
        for q in _smaller(p):
            if time.monotonic() > end:
                break
            if len(q.source) < len(p.source) and fails(q, setting):
                p, changed = q, True
                break
    return p, setting


def _simpler(s: Setting) -> Iterator[Setting]:
    if s.recompute >= 0:
        yield replace(s, recompute=-1)
    if s.offloaded >= 0:
        yield replace(s, offloaded=-1)
    if s.mesh and s != Setting(backend=s.backend):
        yield Setting(backend="aot_eager")
    if len(s.mesh) > 1:
        yield replace(s, mesh={"a": 2}, layout="fsdp" if s.layout == "fsdp+tp" else s.layout)
    if s.mesh in ({"a": 4}, {"a": 3}):
        yield replace(s, mesh={"a": 2})
    if s.layout in ("random", "plan", "fsdp", "tp") and s.mesh:
        yield replace(s, layout="ddp")
    if s.backend == "inductor":
        yield replace(s, backend="aot_eager")


def _smaller(p: Program) -> Iterator[Program]:
    """Large steps first."""
    dead = without_dead(p)
    if dead != p:
        yield dead
    made = _values(p)
    for n in range(len(p.leaves)):
        if len(p.leaves) > 1:
            yield without_dead(replace(p, leaves=p.leaves[:n] + p.leaves[n + 1 :]))
    if len(p.leaves) == 1 and p.container != "one":
        yield replace(p, container="one")
    if p.container not in ("one", "tuple"):
        yield replace(p, container="tuple")
    if p.form != "args":
        yield replace(p, form="args")
    # The program's end, or its beginning, alone.
    for i in range(len(p.body) - 1):
        for v in p.body[i].makes:
            if v in made and made[v].is_floating_point():
                yield without_dead(replace(p, body=p.body[: i + 1], leaves=(v,), container="one"))
    for i in range(len(p.body) - 1, -1, -1):
        yield from _without_line(p, i, made)
    for i, m in enumerate(p.members):
        yield without_dead(replace(p, members=p.members[:i] + p.members[i + 1 :]))
        value = made.get(m.makes[0]) if m.makes else None
        if value is not None:
            yield from _as_input(replace(p, members=p.members[:i] + p.members[i + 1 :]), f"self.{m.makes[0]}", value, False)
    for name, _ in p.inputs:
        if name in p.grads:
            yield replace(p, grads=p.grads - {name})
    for i, (name, text) in enumerate(p.inputs):
        if name in made and not re.fullmatch(r"(randn|ints|bools)\([^()]*\)", text):
            simple = _expression(made[name])
            yield replace(p, inputs=(*p.inputs[:i], (name, simple), *p.inputs[i + 1 :]))
    if not p.train:
        yield replace(p, train=True)
    if p.dtype == "float32" and not p.rough:
        yield replace(p, dtype="float64")


def _without_line(p: Program, i: int, made: dict[str, torch.Tensor]) -> Iterator[Program]:
    line, rest = p.body[i], p.body[:i] + p.body[i + 1 :]
    after = set().union(*(other.uses for other in p.body[i + 1 :]), *(names_in(leaf) for leaf in p.leaves))
    if line.effect or not after & set(line.makes):
        yield without_dead(replace(p, body=rest))
    if line.effect or len(line.makes) != 1:
        return
    v = line.makes[0]
    if v not in made:
        return
    for u in sorted(line.uses):
        if u in made and made[u].shape == made[v].shape and made[u].dtype == made[v].dtype and not u.startswith(("w", "b", "m")):
            yield without_dead(_renamed(replace(p, body=rest), v, u))
    yield from _as_input(replace(p, body=rest), v, made[v], made[v].requires_grad)


def _as_input(p: Program, name: str, value: torch.Tensor, grad: bool) -> Iterator[Program]:
    x = f"x{9000 + len(p.inputs)}"
    q = _renamed(replace(p, inputs=(*p.inputs, (x, _expression(value)))), name, x)
    if grad and value.is_floating_point():
        yield without_dead(replace(q, grads=q.grads | {x}))
    yield without_dead(q)


def _expression(value: torch.Tensor) -> str:
    dims = "".join(f", {n}" for n in value.shape)
    if value.dtype == torch.bool:
        return f"bools(1{dims})"
    if not value.is_floating_point():
        return f"ints(1, {int(value.max()) + 1 if value.numel() else 1}{dims})"
    dtype = "torch.bfloat16" if value.dtype == torch.bfloat16 else "D"
    return f"randn(1{dims}, dtype={dtype})"


def _renamed(p: Program, old: str, new: str) -> Program:
    pattern = re.compile(rf"(?<![\w.]){re.escape(old)}\b")

    def other(text: str) -> str:
        return pattern.sub(new, text)

    body = tuple(Line(other(line.text), tuple(new if m == old else m for m in line.makes), line.effect) for line in p.body)
    return replace(p, body=body, leaves=tuple(other(leaf) for leaf in p.leaves))


def _values(p: Program) -> dict[str, torch.Tensor]:
    """What every name is when eager runs the program."""
    names = [n for line in p.body for n in line.makes if n.startswith("v")]
    # All locals, as they are where forward returns.
    text = p.source.replace(f"        return {p.result}\n", "        return dict(locals())\n", 1)
    found: dict[str, torch.Tensor] = {}
    try:
        loaded = load(text)
        model = loaded.make().train(loaded.train)
        args, kwargs = loaded.make_inputs()
        space = model(*args, **kwargs)
        for n in [*names, *(n for n, _ in p.inputs)]:
            if isinstance(space.get(n), torch.Tensor):
                found[n] = space[n]
        for n, t in [*model._parameters.items(), *model._buffers.items()]:
            if t is not None:
                found[n] = t
    except Exception:
        return found
    return found
