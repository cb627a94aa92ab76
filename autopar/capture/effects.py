"""What forward does besides computing: a captured program would do it once, while it is traced, or never. So it is refused by name.

What is let through:

    state that is in the end what it was    set for the time of the call, set back
    a registered buffer that is set anew    `self.ema = 0.9 * self.ema + ...` becomes a write into the buffer, as `self.ema.copy_(...)` is
    flags                                   True, False, None, text: set on the model itself after the call, as eager would have; counters are not
    weights that torch.nn.utils makes       hooks that set `module.weight` before every forward and nobody reads otherwise (weight_norm, prune)
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence

from torch import nn

from autopar import _torch
from autopar.errors import CaptureError

WrittenBuffers = frozenset[tuple[str, str]]  # buffers that forward sets anew: (module's name, buffer's)

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class SetAnewError(Exception):
    """Forward sets buffers anew: it has to be traced again, with writes into them at its end."""

    def __init__(self, buffers: WrittenBuffers) -> None:
        super().__init__(buffers)
        self.buffers = buffers


def judge(notes: _torch.Notes, model: nn.Module, written: WrittenBuffers) -> None:
    """Raises CaptureError for what cannot be kept, and SetAnewError for buffers that are not in `written` yet."""
    if notes.foreign:
        raise CaptureError(
            f"{notes.foreign[0]} in forward would be drawn from torch's generator, not from numpy's",
            fix="draw the numbers outside the model and pass them in, or use torch's functions",
        )
    again: set[tuple[str, str]] = set()
    for effect in notes.effects:
        where, kind = _place(effect.source)
        if kind == "_buffers" and effect.names and not effect.new:
            again.update((where, n) for n in effect.names)
        elif _sets_flags(effect):
            notes.sets.update({(*(_steps_to(effect.source) or ()), n): v for n, v in effect.constants.items()})
        elif not (kind == "" and effect.kind == "attribute" and set(effect.names) <= made_by_torch(model.get_submodule(where))):
            raise _refused(effect, model)
    if not again <= written:
        raise SetAnewError(written | again)


def _sets_flags(effect: _torch.Effect) -> bool:
    flags = all(n in effect.constants and isinstance(effect.constants[n], (bool, str, type(None))) for n in effect.names)
    return effect.kind == "attribute" and effect.source.startswith("L['self']") and _steps_to(effect.source) is not None and flags


def _steps_to(source: str) -> tuple[str, ...] | None:
    """From the model to an object: submodules and attributes; None where there is something else on the way."""
    inside = re.sub(r"\._modules\['([^']*)'\]", r".\1", source)
    found = re.fullmatch(r"L\['self'\]\._export_root\.m((?:\.\w+)*)", inside)
    return tuple(found[1].split(".")[1:]) if found else None


def set_flags(model: object, notes: _torch.Notes) -> None:
    """Does to `model` what forward would have done."""
    for (*way, name), value in notes.sets.items():
        owner = model
        for step in way:
            owner = getattr(owner, step)
        if getattr(owner, name, set_flags) is not value:
            setattr(owner, name, value)


def refuse_global_hooks() -> None:
    """Hooks on all modules would run around a step that has no modules."""
    for kind, hook in _torch.global_module_hooks():
        raise CaptureError(
            f"{_qualname(hook)} is a hook on all modules, and a compiled step calls no modules",
            where=f"torch.nn.modules.module.{kind}",
            fix="register it on the modules that need it, before autopar.compile, or remove it",
        )


def hooks(model: nn.Module) -> Iterator[tuple[str, str, object]]:
    """(module's name, kind, hook) of the forward hooks of `model`'s modules."""
    for name, m in model.named_modules():
        for kind in HOOKS:
            for hook in getattr(m, kind).values():
                yield name, kind, hook


def hook_of(stack: Sequence[traceback.FrameSummary], model: nn.Module) -> str:
    """Whose hook the code at `stack` is of: 'the forward hook `f` of module "a.b"', or nothing."""
    for name, kind, hook in hooks(model):
        code = getattr(getattr(hook, "__func__", hook), "__code__", None) or getattr(type(hook).__call__, "__code__", None)
        if code is None:
            continue
        lines = [line for *_, line in code.co_lines() if line]
        if any(f.name == code.co_name and f.filename == code.co_filename and f.lineno in lines for f in stack):
            said = "forward hook" if kind == "_forward_hooks" else "forward pre-hook"
            return f"the {said} {_qualname(hook)} of module {name or type(model).__name__!r}"
    return ""


def _qualname(hook: object) -> str:
    return str(getattr(hook, "__qualname__", "") or type(hook).__qualname__)


def _place(source: str) -> tuple[str, str]:
    """The module that dynamo's name of an object is about, and what of the module: `_buffers`, `log`, or nothing; ("", name) where it is of no module."""
    lead = re.match(
        r"L\['self'\](?:\._modules\['_export_root'\]|\._export_root)(?:\._modules\['m'\]|\.m(?=[.\[]|$))((?:\._modules\['[^']*'\])*)",
        source,
    )
    if lead is None:
        return "", source
    return ".".join(re.findall(r"'([^']*)'", lead[1])), source[lead.end() :].lstrip(".")


def made_by_torch(module: nn.Module) -> set[str]:
    """Names of the weights that hooks of torch.nn.utils set before every forward (weight_norm, prune)."""
    hooks = [h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils.")]
    return {str(getattr(h, "name", None) or getattr(h, "_tensor_name", "")) for h in hooks}


def _refused(effect: _torch.Effect, model: nn.Module) -> CaptureError:
    name, rest = _place(effect.source)
    inside = effect.source.startswith("L['self']")
    module = f"module {name or type(model).__name__!r}"
    fix = "change it outside of the model, between steps"
    if effect.kind == "hook":
        what = f"forward calls {effect.names[0]}({effect.names[1]}) on a tensor that it did not make"
        fix = "register it on the parameter after autopar.compile, or on a tensor that forward makes"
    elif effect.kind == "variable":
        what = "forward changes a variable of an enclosing function"
    elif not inside:
        what = f"forward changes {_global(effect)}"
    elif rest == "_buffers":
        what = f"forward makes, removes or reshapes buffer {', '.join(map(repr, effect.new or effect.names))} of {module}"
        fix = "register it in __init__, with its final shape and dtype"
    elif effect.kind == "attribute" and not rest:
        what = f"forward sets attribute {', '.join(map(repr, effect.names))} of {module}"
        fix = "make it a registered buffer (a tensor), return it from forward, or change it outside of the model, between steps"
    elif effect.kind == "attribute":
        what = f"forward sets {', '.join(f'{rest}.{n}' for n in effect.names)} of {module}"
    else:
        what = f"forward changes {rest or 'the contents'} of {module}"
        fix = 'return the values from forward (with outputs="all"), or change it outside of the model, between steps'
    hook = hook_of(effect.stack, model)
    if hook:
        what = what.replace("forward", hook, 1)
        fix = "let the hook return a value and change nothing, or remove it before the step"
    where = ""
    if effect.stack:
        own = [f for f in effect.stack if "/torch/" not in f.filename] or list(effect.stack)
        where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}"
    return CaptureError(f"{what}, which a compiled step would never do", where=where, fix=fix)


def said(source: str) -> str:
    """dynamo's name of something, for people."""
    if source.startswith("L['self']"):
        name, rest = _place(source)
        if rest.startswith(HOOKS):
            return f"what a hook of module {name!r} has from an enclosing function"
        return f"{rest!r} of module {name!r}" if name else repr(rest)
    found = re.match(r"G\['(?:__import_)?([^']*)'\]\.?(.*)", source)
    return f"the global variable {found[2]!r} of {found[1].replace('_dot_', '.')}" if found else repr(source)


def _global(effect: _torch.Effect) -> str:
    if effect.source.startswith("G["):
        single = effect.kind == "attribute" and len(effect.names) == 1
        return said(f"{effect.source}.{effect.names[0]}" if single else effect.source)
    return "the contents of a container" if effect.kind == "contents" else f"attribute {', '.join(map(repr, effect.names))} of an object"
