"""Blocks: no_grad, checkpointed regions, autocast, control by Python values, functions and containers inside of forward."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import CLASSES, bound, production, templates
from tests.fuzz.program import Line

_INSIDE = ("pointwise", "reduce", "matmul", "norm", "view", "softmax", "index")


def _few(d: Draw, n: int) -> list[Line]:
    """A few statements, run as they are drawn."""
    lines: list[Line] = []
    for _ in range(3 * n):
        kind = d.one_of(_INSIDE)
        choices = CLASSES[kind]
        _, fn = d.rng.choices(choices, [w for w, _ in choices])[0]
        before = len(d.body)
        if d.attempt(fn, kind):
            lines += d.body[before:]
            del d.body[before:]
        if len(lines) >= n:
            break
    if not lines or any(line.effect for line in lines):
        raise Unable
    return lines


def _indent(lines: Sequence[Line]) -> str:
    return "\n".join("    " + t for line in lines for t in line.text.split("\n"))


@production("blocks", 1.0)
def _no_grad(d: Draw) -> list[Line]:
    lines = _few(d, d.one_of((1, 2)))
    made = tuple(n for line in lines for n in line.makes)
    return [Line(f"with torch.no_grad():\n{_indent(lines)}", made)]


@production("blocks", 1.5)
def _checkpointed(d: Draw) -> list[Line]:
    known = set(d.values)
    lines = _few(d, d.one_of((1, 2, 3)))
    result = next(n for n in reversed(lines[-1].makes))
    reads = {u for line in lines for u in line.uses}
    # What a region does to buffers eager does twice, with the rerun, and a compiled step once.
    inner = d.module._modules
    changes = [u for u in reads if u in d.module._buffers or ((m := inner.get(u)) is not None and any(True for _ in m.buffers()))]
    if not d.values[result].requires_grad or changes:
        raise Unable
    inside = {n for line in lines for n in line.makes}
    given = sorted(reads & known)
    region, v = d.fresh("r"), d.fresh()
    d.hidden |= inside
    for n in inside:
        d.values.pop(n, None)
    text = f"def {region}({', '.join(given)}):\n{_indent(lines)}\n    return {result}\n{v} = checkpoint({region}, {', '.join([*given, 'use_reentrant=False'])})"
    return [Line(text, (v,))]


@production("blocks", 0.6)
def _autocast(d: Draw) -> list[Line]:
    if "autocast" not in d.features:
        raise Unable
    d.rough = True
    lines = _few(d, 2)
    made = tuple(n for line in lines for n in line.makes)
    return [Line(f'with torch.autocast("cpu", dtype=torch.bfloat16):\n{_indent(lines)}', made)]


templates(
    "blocks",
    """
    {a} * 2 if {a}.shape[0] > 3 else {a} + 1
    sum({a}[i] * (i + 1) for i in range(2))
    {a} * math.sqrt({a}.shape[-1]) * 0.3
    (lambda t: t.tanh() + t)({a})
    dict(p={a}, q={b})["p"] + dict(p={a}, q={b})["q"]
    torch.stack([t for t in ({a}, {s})]).mean(0)
    {a} + len([{a}, {b}])
    {a} if isinstance({a}, torch.Tensor) else None
    """,
    1.0,
    least=1,
)


@production("blocks", 0.5)
def _repeated(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    n = d.shape(a)[-1]
    w, v = d.parameter([n, n]), d.fresh()
    return [Line(f"{v} = {a}\nfor i in range({d.one_of((2, 3, 4))}):\n    {v} = torch.tanh({v} @ {w}) + 0.5 * {a}", (v,))]


@production("blocks", 0.5)
def _by_mode(d: Draw) -> list[Line]:
    a, v = d.float(), d.fresh()
    return [Line(f"if self.training:\n    {v} = {a} * 2\nelse:\n    {v} = {a}.detach()", (v,))]


@production("blocks", 0.4)
def _stop(d: Draw) -> list[Line]:
    """A straight-through estimate."""
    a = d.float()
    return [bound(d, f"{a} + ({a}.sign() - {a}).detach()")]
