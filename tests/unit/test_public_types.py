"""The public API says its types: whoever calls it sees in an editor, and a type checker knows, what goes in and what comes out."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest

import autopar


def public() -> Iterator[tuple[str, Any]]:
    """(path, object) of what `autopar` exports; of the modules among it, what they export."""
    for name in autopar.__all__:
        x = getattr(autopar, name)
        if isinstance(x, types.ModuleType):
            yield from ((f"{name}.{n}", getattr(x, n)) for n in x.__all__)
        else:
            yield name, x


def ours(cls: type) -> list[type]:
    """`cls` and the classes of autopar that it derives from."""
    return [c for c in cls.__mro__ if c.__module__.startswith("autopar")]


def functions(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods and properties, and the constructor where the class writes one."""
    for c in ours(cls):
        for name, member in vars(c).items():
            f = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            f = inspect.unwrap(f) if callable(f) else f
            written = inspect.isfunction(f) and f.__code__.co_filename == inspect.getsourcefile(c)
            if written and (not name.startswith("_") or name == "__init__"):
                yield name, f


def for_types_only(module: str) -> dict[str, Any]:
    """What `module` imports under `if TYPE_CHECKING:` alone, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"]
    found = [i for block in blocks for i in block.body if isinstance(i, ast.ImportFrom) and i.module and i.module != "autopar"]
    return {a.asname or a.name: getattr(importlib.import_module(i.module or ""), a.name) for i in found for a in i.names}


def untyped(f: Callable[..., Any]) -> list[str]:
    """Parameters of `f` (and "return") that say no type, or one with Any in it."""
    hints = typing.get_type_hints(f, localns=for_types_only(f.__module__))
    names = [n for n in inspect.signature(f).parameters if n not in ("self", "cls")]
    return [n for n in [*names, "return"] if n not in hints or has_any(hints[n])]


def untyped_fields(cls: type) -> list[str]:
    named = {n: t for c in ours(cls) for n, t in for_types_only(c.__module__).items()}
    hints = typing.get_type_hints(cls, localns=named)
    return [n for c in ours(cls) for n in inspect.get_annotations(c) if not n.startswith("_") and has_any(hints[n])]


def has_any(t: object) -> bool:
    """Also inside: of a list's elements, of a function's arguments."""
    return t is Any or any(map(has_any, t if isinstance(t, list) else typing.get_args(t)))


PUBLIC = dict(public())


@pytest.mark.parametrize("name", [n for n, x in PUBLIC.items() if inspect.isclass(x)])
def test_every_public_method_and_field_of_a_class_says_a_type_without_any(name: str) -> None:
    cls = PUBLIC[name]
    assert untyped_fields(cls) == []
    assert {n: bad for n, f in functions(cls) if (bad := untyped(f))} == {}


@pytest.mark.parametrize("name", [n for n, x in PUBLIC.items() if not inspect.isclass(x)])
def test_every_public_function_says_types_without_any(name: str) -> None:
    assert inspect.isfunction(PUBLIC[name])
    assert untyped(PUBLIC[name]) == []


def test_any_is_found_wherever_it_hides() -> None:
    def f(a: int, b: dict[str, Any], c: Callable[[list[Any]], int] | None, d, *e: Any, g: object = None) -> tuple[Any, ...]: ...  # type: ignore[no-untyped-def, empty-body]

    class C:
        x: int
        y: list[Any]
        _z: Any

    C.__module__ = "autopar"  # one of ours
    assert untyped(f) == ["b", "c", "d", "e", "return"]
    assert untyped_fields(C) == ["y"]


def test_the_package_says_that_it_has_types() -> None:
    assert resources.files("autopar").joinpath("py.typed").is_file()
