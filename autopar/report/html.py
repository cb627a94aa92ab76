"""Elements of a document as text: what a plan says is escaped here, and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(x: object) -> Markup:
    """`x` as it is to be read."""
    return x if isinstance(x, Markup) else Markup(html.escape(str(x), quote=True))


def join(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(text(p) for p in parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. An attribute's underscore stands for a dash, one at its end for nothing (class_)."""
    said = "".join(f' {k.rstrip("_").replace("_", "-")}="{text(v)}"' for k, v in attributes.items() if v is not None)
    return Markup(f"<{name}{said}>{join(children)}</{name}>")


def path(name: object) -> Markup:
    """A module's or a parameter's name, which may be broken behind its dots."""
    return tag("code", Markup(text(name).replace(".", ".<wbr>")))


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], numbers: Iterable[int] = (), caption: str = "", class_: str = ""
) -> Markup:
    """numbers: columns that are set to the right."""
    right = set(numbers)

    def cells(of: str, row: Sequence[object]) -> Markup:
        return tag("tr", *(tag(of, x, class_="n" if i in right else None) for i, x in enumerate(row)))

    body = [cells("td", row) for row in rows]
    said = [tag("caption", caption)] if caption else []
    whole = tag("table", *said, tag("thead", cells("th", head)), tag("tbody", *body), class_=class_ or None)
    return tag("div", whole, class_="scroll")


def section(title: str, lead: object, *children: object, id_: str) -> Markup:
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else "", *children, id_=id_)


def side_by_side(names: Sequence[str], parts: Sequence[object]) -> Markup:
    """One part as it is; of two, each under its plan's name."""
    if len(parts) == 1:
        return text(parts[0])
    return tag(
        "div",
        *(tag("div", tag("h3", name, class_="whose"), part, class_="side") for name, part in zip(names, parts, strict=True)),
        class_="sides",
    )
