"""What experts do between their two products, as traced graphs under names: rows [S, G] -> rows [S, F], and the gradient.

Families of models differ here and nowhere else (SwiGLU, GeGLU, clamped and scaled forms, a plain activation), and say it as Python. A body of an operator
cannot differentiate Python, for autograd is above it: both directions are traced once, with rows and features as symbols. The name ends in a hash of what was
traced, so that it is the same in every process, in plans and in compiled code; it begins with the form's kind (`gate_forms.py`), or `NO_FORM`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.kernels.gate_forms import GateForm, form_of
from autopar.kernels.triton_takes import NO_FORM

# Sizes that no constant of a model has: a trace that works with them depends on none.
ROWS, FEATURES = 7, 46


@dataclass(frozen=True)
class Gate:
    """forward: h [S, G] -> a [S, F]. backward: (h, gradient of a) -> gradient of h. form: what it is, where a kernel may do both (`triton/gate.py`)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    form: GateForm | None = None


_GATES: dict[str, Gate] = {}


def gate(name: str) -> Gate:
    """Raises KeyError for a name that no capture of this process has made."""
    return _GATES[name]


def named(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> str | None:
    """The name of `fn`, traced for rows of `dtype`; None where it is not a function of each row alone: it has tensors of its own, draws random numbers, knows
    how many features there are, or cannot be traced."""
    found = _traced(fn, dtype)
    if found is None:
        return None
    text = "\n".join([str(dtype), found.forward.code, found.backward.code])
    kind = NO_FORM if found.form is None else found.form.kind
    name = f"{kind}_gate_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _GATES.setdefault(name, found)
    return name


def _traced(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Gate | None:
    def vjp(h: Tensor, da: Tensor) -> Tensor:
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            return torch.autograd.grad(fn(h), h, da)[0]

    h = torch.linspace(-2, 2, ROWS * FEATURES).reshape(ROWS, FEATURES).to(dtype)
    try:
        with torch.no_grad():
            a = fn(h)
            forward = make_fx(lambda h: fn(h), tracing_mode="symbolic")(h)
            backward = make_fx(vjp, tracing_mode="symbolic")(h, torch.ones_like(a))
    except Exception:  # anything that a user's function may raise on rows that it was not made for
        return None
    nodes = [n for g in (forward, backward) for n in g.graph.nodes]
    if any(n.op == "get_attr" or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in nodes):
        return None
    each_row = a.dim() == 2 and a.shape[0] == ROWS and a.dtype == dtype and torch.allclose(forward(h[:3]), a[:3])
    return Gate(forward, backward, form_of(forward, ROWS, FEATURES)) if each_row else None
