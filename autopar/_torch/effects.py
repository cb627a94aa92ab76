"""What forward does besides computing, as dynamo notes it while it traces."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import getattr_static
from types import CellType
from typing import Any
from unittest import mock

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx

from autopar._torch.nodes import value_of


@dataclass(frozen=True)
class Effect:
    """Python state that forward changes: dynamo takes it for what comes later in the trace, and a graph never does it.

    kind: "attribute" of an object, "contents" of a container, "variable" of a closure, "hook" on a tensor that is not made in forward.
    source: how dynamo reaches the object; names: of attributes or keys; new: those of them that were not there; constants: what attributes are set to,
    where that is no tensor and no object; stack: where, outermost first."""

    kind: str
    source: str
    names: tuple[str, ...]
    new: tuple[str, ...]
    constants: dict[str, Any]
    stack: tuple[traceback.FrameSummary, ...]


@dataclass
class Notes:
    """What dynamo knows of a traced program besides its graph.

    reads: names of all attributes and keys that the trace looked at, None where that is not known; constants: (a Python module's names, a name, its value)
    of the global variables among them; foreign: draws of random numbers that are not torch's; sources: what it looked at, as dynamo has it; sets:
    flags that forward sets, by their path from the model; settled: once they are set, the program is the same."""

    effects: list[Effect] = field(default_factory=list)
    reads: frozenset[str] | None = None
    constants: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    sets: dict[tuple[str, ...], Any] = field(default_factory=dict)
    settled: bool = False
    lies: frozenset[int] = frozenset()  # inputs of which something is a view or a copy, by how they lie, and written to
    sizes: Any = None  # what was assumed of sizes (`autopar._torch.symbols.TracedSizes`)

    def source_of(self, placeholder: str) -> str:
        """How Python reaches the tensor that dynamo made an input of this name of, if that is known."""

        def plain(name: str) -> str:
            short = re.sub(r"\._modules\['([^']*)'\]", r".\1", name.replace("._modules['_export_root']", ""))
            return re.sub(r"[^a-zA-Z0-9]+", "_", short).strip("_")

        return next((n for n in map(_name_of, self.sources) if plain(n).endswith(plain(placeholder))), placeholder)


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """While open, what dynamo would write code for (mutations that it replays after the graph, guards) is noted: of an export nobody runs that code.
    What a logger is told, and dynamo would leave out of an export, it is told now, once."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    notes = Notes()
    update = SideEffects.codegen_update_mutated

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Once for each try at writing the code: the last one counts.
        notes.effects = _effects(self)
        output = self.output_graph_weakref()
        notes.reads, notes.constants, notes.sources = (None, [], []) if output is None else _reads(output)
        return update(self, *args, **kwargs)

    def logged(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if all(v.is_python_constant() for v in (*args, *kwargs.values())):
            method = getattr(self.value, name)
            method(*(v.as_python_constant() for v in args), **{k: v.as_python_constant() for k, v in kwargs.items()})
        return log(self, tx, name, args, kwargs)

    log = LoggingLoggerVariable.call_method
    with (
        mock.patch.object(SideEffects, "codegen_update_mutated", noting),
        mock.patch.object(LoggingLoggerVariable, "call_method", logged),
    ):
        yield notes


def _name_of(source: Any) -> str:
    """dynamo's name of where something comes from; "" of what it has none for."""
    try:
        name = getattr(source, "name", "")
        return str(name() if callable(name) else name)
    except NotImplementedError:
        return ""


def _effects(side: Any) -> list[Effect]:
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
    from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

    real = {id(o): o for o in side.keepalive}
    stacks = getattr(side, "mutation_user_stacks", {})
    out = []
    for key, var in list(side.id_to_variable.items()):
        if not isinstance(var.mutation_type, (AttributeMutationExisting, ValueMutationExisting)) or not side.is_modified(var):
            continue
        if isinstance(var, TorchFunctionModeStackVariable) and _is_as_before(var):
            continue
        owner, source = real.get(key), _name_of(var.source)
        stack = tuple(stacks[var][-1]) if stacks.get(var) else ()
        stores = side.store_attr_mutations.get(var)
        if stores:
            kind = "variable" if isinstance(owner, CellType) else "attribute"
            names = tuple(n for n, v in stores.items() if not _stays(owner, n, v, f"{source}.{n}"))
            new = tuple(n for n in names if getattr_static(owner, n, _stays) is _stays)
            constants = {n: stores[n].as_python_constant() for n in names if stores[n].is_python_constant()}
        else:
            kind, constants = "contents", {}
            changed, new = _changed_items(var, owner, source)
            if changed is None:
                continue
            names = changed
        if names or kind == "contents":
            out.append(Effect(kind, source, names, new, constants, stack))
    for tensor, hook, _, name in side.tensor_hooks.values():
        nested = getattr(hook, "fn_name", None)  # of a function that forward makes
        said = nested.as_python_constant() if nested is not None else getattr(getattr(hook, "fn", None), "__qualname__", "a hook")
        out.append(Effect("hook", _name_of(tensor.source), (name, said), (), {}, ()))
    return out


def _is_as_before(stack: Any) -> bool:
    """Whether modes that forward entered it has left, and no default device was set: those that are there came from outside, each from its own place."""
    found = [getattr(mode.source, "ind", None) for mode in stack.symbolic_stack]
    return found == list(range(len(found))) and type(stack).offset == 0


def _stays(owner: Any, name: str, value: Any, source: str) -> bool:
    """Whether an attribute is in the end what it was: set for the time of a call, and set back."""
    if value.source is not None and _name_of(value.source) == source:
        return True
    if not value.is_python_constant():
        return False
    now = getattr_static(owner, name, _stays)
    if isinstance(owner, CellType):
        now = owner.cell_contents
    new = value.as_python_constant()
    return now is new or (type(now) is type(new) and isinstance(new, (bool, int, float, str, tuple)) and bool(now == new))


def _changed_items(var: Any, owner: Any, source: str) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Keys of a dict that are set or gone, and those that are new (also a tensor of another kind than there was); no keys of another container that changed;
    None: nothing changed."""
    items: Any = getattr(var, "items", None)
    if isinstance(items, dict) and hasattr(var, "is_new_item") and isinstance(owner, dict):
        changed = [
            str(k.vt.as_python_constant())
            for k, v in items.items()
            if var.is_new_item(var.original_items.get(k), v) and not _is_item(v, source, k.vt.as_python_constant())
        ]
        left = {str(k.vt.as_python_constant()) for k in items}
        known = {str(k) for k, v in owner.items() if not isinstance(v, torch.Tensor) or str(k) not in changed or _like(v, items, k)}
        changed += [str(k) for k in owner if str(k) not in left]
        return (tuple(changed) or None), tuple(k for k in changed if k not in known)
    if isinstance(owner, set) and items is not None:  # `self.b = ...` of a buffer that is not persistent adds its name to the set of those
        keys = [getattr(k, "vt", k) for k in items]
        if all(k.is_python_constant() for k in keys) and {k.as_python_constant() for k in keys} == owner:
            return None, ()
    as_long = isinstance(items, list) and isinstance(owner, list) and len(items) == len(owner)
    if as_long and all(v.source is not None and _name_of(v.source) == f"{source}[{i}]" for i, v in enumerate(items)):
        return None, ()
    return (), ()


def _is_item(value: Any, source: str, key: Any) -> bool:
    """Whether a value is what the dict `source` had under `key` from the beginning, also as an attribute of the module whose dict it is (functional_call puts it
    back from there)."""
    owner = source.removesuffix("._parameters").removesuffix("._buffers")
    return value.source is not None and _name_of(value.source) in (f"{source}[{key!r}]", f"{owner}.{key}")


def _like(old: torch.Tensor, items: dict[Any, Any], key: Any) -> bool:
    """Whether what a key of a dict is set to is a tensor of the same shape and dtype."""
    new = next((v for k, v in items.items() if k.vt.is_python_constant() and k.vt.as_python_constant() == key), None)
    try:
        value = None if new is None else value_of(new.as_proxy().node)
    except (AttributeError, NotImplementedError):  # no tensor
        return False
    return isinstance(value, torch.Tensor) and value.shape == old.shape and value.dtype == old.dtype


def _reads(output: Any) -> tuple[frozenset[str] | None, list[tuple[dict[str, Any], str, Any]], list[Any]]:
    from torch._dynamo.source import AttrSource, GlobalSource

    names: set[str] = set()
    constants: dict[tuple[str, str], tuple[dict[str, Any], str, Any]] = {}
    seen: dict[int, Any] = {}
    try:
        for guard in output.guards:
            asked = getattr(guard.create_fn, "keywords", {}).get("attr")
            if asked is not None:
                names.add(str(asked))
            s = guard.originating_source
            while s is not None and id(s) not in seen:
                seen[id(s)] = s
                base = getattr(s, "base", None)
                if isinstance(s, AttrSource):
                    names.add(s.member)
                    if isinstance(base, GlobalSource) and base.global_name in output.import_sources:
                        module = sys.modules.get(output.import_sources[base.global_name])
                        value = getattr(module, s.member, None)
                        if module is not None and isinstance(value, (bool, int, float, str)):
                            constants[module.__name__, s.member] = (module.__dict__, s.member, value)
                elif isinstance(index := getattr(s, "index", None), str):
                    names.add(index)
                s = base
    except (AttributeError, TypeError):  # another version's guards
        return None, [], []
    return frozenset(names), list(constants.values()), list(seen.values())


def draws_of_numpy(gm: fx.GraphModule) -> list[str]:
    """Dynamo makes numpy's random functions torch's, with other numbers than numpy's generator has."""
    functions = (getattr(n.target, "f", None) for n in gm.graph.nodes if n.op == "call_function")
    return [f"numpy.random.{f.__name__}" for f in functions if f is not None and getattr(f, "__module__", "") == "torch._numpy.random"]


def global_module_hooks() -> list[tuple[str, Callable[..., Any]]]:
    """Hooks on all modules: (the function they are registered with, hook)."""
    from torch.nn.modules import module as m

    kinds = {
        "register_module_forward_pre_hook": m._global_forward_pre_hooks,
        "register_module_forward_hook": m._global_forward_hooks,
        "register_module_full_backward_pre_hook": m._global_backward_pre_hooks,
        "register_module_full_backward_hook": m._global_backward_hooks,
    }
    return [(kind, hook) for kind, hooks in kinds.items() for hook in hooks.values()]
