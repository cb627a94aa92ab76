"""Python state that a captured step holds for: attributes of modules, which hooks they have, what trains.

A program is captured with the values that Python had then, so a step is used only while they are the same. Looking at all of them at every call must
cost next to nothing: shallow copies of the modules' dicts (and of the lists, dicts and objects in them) are compared with the dicts themselves, in one
comparison of two lists, where what did not change is the same object. Only when that says "different" is it worked out what changed, and whether the
captured program ever looked at something of that name (dynamo knows): counters that a training loop leaves on a model capture nothing anew.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar._torch import Notes

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, Enum)
CALLABLES = (FunctionType, MethodType, BuiltinFunctionType, partial)
CONTAINERS = (dict, list, set, deque)
# Of the dicts that nn.Module has for itself, those whose contents change what a call computes, and those that change nothing of it.
ALWAYS = frozenset(
    {"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
)
NEVER = frozenset(vars(nn.Module())) - ALWAYS - {"training"}
DEPTH = 4  # of containers and objects in a module's attribute
LONGEST = 1000  # items of a container that are looked into

Path = tuple[str, ...]  # owner, attribute, then keys, or "." and a name for an object's attribute
Content = dict[Path, Any]


class PythonState:
    """Of one model, and of its loss function if it has one. version: counts states; content: of the state that was seen last."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self.model, self.loss_fn = model, {"loss_fn": loss_fn}
        self.version = 0
        self.looks = 0  # how often something was found changed, whether it matters or not
        self.content: Content = {}
        self._changed: dict[Path, int] = {}  # in which version last
        self._take()

    def now(self) -> int:
        """The number of the state that the model is in."""
        try:
            same = not any(self._empty) and self._live == self._saved and self._flags() == self._trained
        except (RuntimeError, ValueError, TypeError):  # tensors or arrays that are not the same objects
            same = False
        if not same:
            self.looks += 1
            changed, complete = self._patch()
            if not complete:
                before = self.content
                self._take()
                changed += [p for p in {**before, **self.content} if not _same(before.get(p, _same), self.content.get(p, _same))]
            if changed:
                self.version += 1
                self._changed.update(dict.fromkeys(changed, self.version))
        return self.version

    def matter(self, version: int, before: Content, notes: Notes) -> list[Path]:
        """What changed since `version`, whose content was `before`, of what a program captured then may depend on."""
        changed = [p for p, n in self._changed.items() if n > version and not _same(before.get(p, _same), self.content.get(p, _same))]
        if notes.settled:
            # By name and value: objects that parts of a model share have several paths.
            done = {(path[-1], id(value)) for path, value in notes.sets.items()}
            changed = [p for p in changed if (p[-1].removeprefix("."), id(self.content.get(p, _same))) not in done]
        return [p for p in changed if _is_read(p, notes.reads) or isinstance(before.get(p, self.content.get(p)), CALLABLES)]

    def _flags(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]

    def _patch(self) -> tuple[list[Path], bool]:
        """What changed, as far as it is values of attributes, such as the counters of a training loop: that is quickly noted. And whether that is all."""
        changed: list[Path] = []
        if any(self._empty) or self._flags() != self._trained:
            return changed, False
        for i, (live, saved) in enumerate(zip(self._live, self._saved, strict=True)):
            if _same_items(live, saved):
                continue
            if len(self._paths[i]) != 1 or not isinstance(live, dict):
                return changed, False
            for key in {**live, **saved}:
                old, new = saved.get(key, _same), live.get(key, _same)
                if old is new:
                    continue
                if key in ALWAYS or not all(v is _same or isinstance(v, (*ATOMS, torch.Tensor)) for v in (old, new)):
                    return changed, False
                path = (*self._paths[i], key)
                before = self.content.pop(path, _same)
                if new is not _same:
                    self.content[path] = _token(new)
                if not _same(before, self.content.get(path, _same)):
                    changed.append(path)
            self._saved[i] = live.copy()
        return changed, True

    def _take(self) -> None:
        self._live: list[Any] = []
        self._empty: list[Any] = []  # what is empty is not compared, only asked
        self._paths: list[Path] = []
        self.content = {}
        seen: set[int] = set()
        kinds: dict[type, None] = {}
        for name, m in self.model.named_modules():
            self._look(vars(m), (name,), seen, DEPTH)
            kinds.update(dict.fromkeys(k for k in type(m).__mro__ if not k.__module__.startswith(("torch.", "builtins"))))
        self._look(
            vars(self.loss_fn["loss_fn"]) if isinstance(self.loss_fn["loss_fn"], nn.Module) else self.loss_fn, ("loss",), seen, DEPTH
        )
        for kind in kinds:
            self._look(vars(kind), (f"class {kind.__qualname__}",), seen, 0)
        self._saved = [_copy(x) for x in self._live]
        self._parameters = list(self.model.parameters())
        self._trained = self._flags()
        names = (n for n, _ in self.model.named_parameters())
        self.content.update({("", "requires_grad", n): t for n, t in zip(names, self._trained, strict=True)})

    def _look(self, x: Any, path: Path, seen: set[int], depth: int, dot: str = "") -> None:
        """Notes what container `x` holds, and goes into what that holds."""
        if id(x) in seen:
            return
        seen.add(id(x))
        if not x:
            self._empty.append(x)
            return
        self._live.append(x)
        self._paths.append(path)
        items = x.items() if isinstance(x, (dict, MappingProxyType)) else enumerate(x)
        for key, value in list(items):
            here = (*path, f"{dot}{key}" if isinstance(key, (str, int)) else repr(key))
            self.content[here] = _token(value)
            if isinstance(value, FunctionType) and value.__closure__ and not value.__module__.startswith("torch."):
                self._look_in_cells(value, here, seen)
            deeper = depth > 0 and not (len(here) == 2 and key in NEVER)
            if deeper and (inner := _inside(value)) is not None and len(inner) <= LONGEST:
                self._look(inner, here, seen, depth - 1, "" if inner is value else ".")

    def _look_in_cells(self, f: FunctionType, path: Path, seen: set[int]) -> None:
        """The plain values, lists and dicts among the variables of enclosing functions."""
        cells = {n: c for n, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True) if _is_filled(c)}
        plain = tuple(c for c in cells.values() if isinstance(c.cell_contents, ATOMS))
        if plain and id(f) not in seen:
            seen.add(id(f))
            self._live.append(plain)
            self._paths.append((*path, "()"))
        for n, c in cells.items():
            here = (*path, f"({n})")
            if isinstance(c.cell_contents, (*ATOMS, *CONTAINERS)):
                self.content[here] = _token(c.cell_contents)
            if isinstance(c.cell_contents, CONTAINERS) and len(c.cell_contents) <= LONGEST:
                self._look(c.cell_contents, here, seen, 0)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not _is_filled
    except ValueError:
        return False


def _token(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)  # its values are read at every call
    return type(value) if isinstance(value, CONTAINERS) else value


def _copy(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(CellType(v.cell_contents) if isinstance(v, CellType) else v for v in x)
    return x.copy()


def _same_items(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False


def _inside(value: Any) -> Any:
    """What a value consists of that may change while it stays the same object."""
    if isinstance(value, (*ATOMS, *CALLABLES, ModuleType, nn.Module)):
        return None
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, tuple):
        return value if any(_inside(v) is not None for v in value) else None
    inner = getattr(value, "__dict__", None)
    return inner if isinstance(inner, dict) else None


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or (type(a) is type(b) and isinstance(a, (*ATOMS, tuple, MethodType)) and bool(a == b))
    except (RuntimeError, ValueError, TypeError):
        return False


def _is_read(path: Path, reads: frozenset[str] | None) -> bool:
    _, *names = path
    if reads is None or names[0] in ALWAYS or names[0] == "requires_grad":
        return True
    if names[0] in NEVER or (names[0] not in reads and not any(n.startswith("(") for n in names)):
        return False
    # Of a list or a dict only the attribute that it is in has a name that the trace must have seen.
    return all(n[1:] in reads for n in names[1:] if n.startswith("."))


def constants_hold(notes: Notes) -> bool:
    """Whether the global variables that a program read are what they were."""
    return all(type(now := scope.get(name)) is type(value) and now == value for scope, name, value in notes.constants)


def said(path: Path) -> str:
    owner, *names = path
    return ".".join(n.strip(".") for n in (owner, *names) if n)
