"""For the API page: a docstring's "name: what it is" of parameters, one after the other, as a list.

Our docstrings say parameters in running text, as they are read in the code: "inputs: tensors or shapes. mesh: axis sizes." A page is easier to read with a line for each.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Docstring, Extension, Function, Object


class Parameters(Extension):
    """Rewrites docstrings of functions and classes whose parameters or fields they name."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        listed(func, {p.name for p in func.parameters})

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        listed(cls, {name for name, m in cls.members.items() if m.is_attribute})


def listed(thing: Object, names: set[str]) -> None:
    """The docstring of `thing` with an item for each of `names` that begins a sentence with a colon behind it."""
    if thing.docstring is None:
        return
    text = "\n\n".join(map(lambda p: itemised(p, names), thing.docstring.value.split("\n\n")))
    thing.docstring = Docstring(text, parent=thing)


def itemised(paragraph: str, names: set[str]) -> str:
    """One paragraph; as it was, where it names none of `names`."""
    found = [m for m in re.finditer(r"(?:^|(?<=[.;)]\s)|(?<=\n)) *(\w+(?:, \w+)*): ", paragraph) if set(m[1].split(", ")) <= names]
    if not found:
        return paragraph
    ends = [*(m.start() for m in found[1:]), len(paragraph)]
    items = []
    for m, end in zip(found, ends, strict=True):
        told = " ".join(paragraph[m.end() : end].split())
        items.append(f"- {', '.join(f'`{n}`' for n in m[1].split(', '))}: {told}")
    before = paragraph[: found[0].start()].strip()
    return "\n".join([*([before, ""] if before else []), *items])
