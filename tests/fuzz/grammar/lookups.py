"""Indexing: reads and writes where an index tensor says, by slices, by masks."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.grammar import bound, production
from tests.fuzz.program import Line


@production("index", 3.0)
def _read(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    shape = d.shape(a)
    dim = d.dim(a) % len(shape)
    n = shape[dim]
    i = d.indices(n, d.one_of((2, 3, 4)))
    lead = ", ".join([":"] * dim + [i])
    texts = [
        f"{a}.index_select({dim}, {i})",
        f"{a}[{lead}]",
        f"torch.take({a}, {i})",
        f"{a}[{lead}].sum({dim})",
        f"{a}[..., :1].expand({d.dims(shape)}).index_select({dim}, {i})",
    ]
    if len(shape) >= 2:
        j = d.indices(shape[0], 3)
        k = d.indices(shape[1], 3)
        texts += [f"{a}[{j}, {k}]", f"{a}[torch.arange(2), {d.indices(shape[1], 2)}]"] if shape[0] >= 2 else []
    if len(shape) >= 3:
        j = d.indices(shape[2], 3)
        texts += [
            f"{a}[:, {d.indices(shape[1], 3)}, {j}]",
            f"{a}[{d.indices(shape[0], 3)}, :, {j}]",
            f"{a}[{d.indices(shape[0], 2, 1)}, {d.indices(shape[1], 1, 3)}]",
        ]
    return [bound(d, d.one_of(texts))]


@production("index", 2.0)
def _gather(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    shape = list(d.shape(a))
    dim = d.dim(a) % len(shape)
    index = list(shape)
    index[dim] = d.one_of((1, 2, shape[dim]))
    i = d.indices(shape[dim], *index)
    texts = [f"{a}.gather({dim}, {i})", f"torch.take_along_dim({a}, {i}, {dim})"]
    if index[dim] == 1:
        texts.append(f"{a}.gather({dim}, {i}).squeeze({dim})")
    return [bound(d, d.one_of(texts))]


@production("index", 2.0)
def _scatter(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    shape = list(d.shape(a))
    dim = d.dim(a) % len(shape)
    i = d.input(f"ints({d.seed()}, {shape[dim]}, {d.dims(shape)})")
    n = d.one_of((1, 2, min(3, shape[dim])))
    unique = d.input(f"perm({d.seed()}, {shape[dim]})[:{n}]")
    piece = [*shape[:dim], n, *shape[dim + 1 :]]
    p = d.parameter(piece)
    s = d.alike(a)
    texts = (
        f"{a}.scatter_add({dim}, {i}, {s})", f"torch.zeros_like({a}).scatter_add({dim}, {i}, {a})", f"{a}.scatter({dim}, {unique}.view({d.dims([n if k == dim else 1 for k in range(len(shape))])}).expand({d.dims(piece)}), {p})",
        f"{a}.index_add({dim}, {unique}, {p})", f"{a}.index_copy({dim}, {unique}, {p})", f"{a}.index_fill({dim}, {unique}, 0.5)", f"{a}.scatter_reduce({dim}, {i}, {s}, 'sum')",
        f"{a}.scatter({dim}, {i}, 0.25)", f"torch.zeros_like({a}).index_add({dim}, {d.input(f'ints({d.seed()}, {shape[dim]}, {shape[dim]})')}, {a})",
        f"{a}.index_put(({unique},), {d.parameter([n, *shape[1:]])}, accumulate=True)" if dim == 0 else f"{a}.select_scatter({a}.select({dim}, 0) * 2, {dim}, -1)",
        f"{a}.slice_scatter({p}, {dim}, 0, {n})", f"{a}.scatter_reduce({dim}, {i}, {s}, 'mean')", f"{a}.scatter_reduce({dim}, {i}, {s}, 'amax')",
    )  # fmt: skip
    return [bound(d, d.one_of(texts))]


@production("index", 1.0)
def _masked(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    m = d.input(f"bools({d.seed()}, {d.dims(d.shape(a))})")
    texts = (
        f"torch.where({m}, {a}, {d.alike(a)})",
        f"{a}.masked_scatter({m}, {d.alike(a)})",
        f"({a} * {m}).sum(-1)",
        f"torch.masked_fill({a}, ~{m}, -2.0)",
    )
    return [bound(d, d.one_of(texts))]


@production("index", 0.6)
def _routing(d: Draw) -> list[Line]:
    """Each row by one of a few weights, chosen by a score."""
    a = d.float(lambda t: t.dim() == 2)
    k = d.shape(a)[1]
    w, g = d.parameter([3, k, 4]), d.parameter([k, 3])
    v, p, i = d.fresh(), d.fresh(), d.fresh()
    return [
        Line(f"{p}, {i} = ({a} @ {g}).softmax(-1).topk(1, -1)", (p, i)),
        Line(f"{v} = torch.einsum('nk,nko->no', {a}, {w}[{i}[:, 0]]) * {p}", (v,)),
    ]


@production("index", 2.5)
def _by_all_numbers(d: Draw) -> list[Line]:
    """Lookups, and writes, by all numbers of one dim or more, as of each sample's last token."""
    a = d.float(lambda t: t.dim() >= 2 and 0 not in t.shape)
    shape = d.shape(a)
    n, m = shape[0], shape[1]
    rows, columns = f"torch.arange({n})", f"torch.arange({m})"
    one, some = d.indices(m, n), d.indices(m, n, 2)
    texts = [
        f"{a}[{rows}, {one}]", f"{a}[{rows}[:, None], {some}]", f"{a}[{rows}.unsqueeze(1), {columns}]", f"{a}[:, {columns}]", f"{a}[{rows}]", f"{a}[{rows}.flip(0)]",
        f"{a}[{rows}[:, None], {columns}[None, :].expand({n}, {m})] * 2", f"{a}[{rows} % {max(1, n - 1)}, {one}]", f"{a}[{rows}, {one}].unsqueeze(0)",
        f"{a}.transpose(0, 1)[{one}, {rows}]", f"{a}[torch.arange({n}).view(-1, 1), :][:, 0]", f"{a}.index_select(1, {columns})", f"{a}[torch.arange({n} - 1) + 1]" if n > 1 else f"{a}[{rows}]",
    ]  # fmt: skip
    if len(shape) >= 3:
        k = shape[2]
        texts += [
            f"{a}[{rows}, :, {d.indices(k, n)}]",
            f"{a}[{rows}[:, None], :, torch.arange({k})]",
            f"{a}[:, {columns}[:, None], torch.arange({k})]",
            f"{a}[{rows}[:, None, None], {columns}[:, None], {d.indices(k, n, m, 1)}]",
            f"{a}[..., torch.arange({k})]",
        ]
    if d.rng.random() < 0.7:
        return [bound(d, d.one_of(texts))]
    v = d.fresh()
    writes = [
        f"{v}[{rows}, {one}] = 0.5",
        f"{v}[{rows}, {one}] = {v}[{rows}, 0] * 2",
        f"{v}[{rows}[:, None], {some}] = -0.25",
        f"{v}[:, {columns}] = {a} * 3",
        f"{v}[{d.input(f'bools({d.seed()}, {d.dims(shape)})')}] = 0.125",
    ]
    return [Line(f"{v} = {a}.clone()", (v,)), Line(d.one_of(writes), (), True)]
