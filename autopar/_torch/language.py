"""What of Python and of modules dynamo is let capture."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree

from autopar._torch.patched import nothing, replaced


@contextlib.contextmanager
def no_idle_work() -> Iterator[None]:
    """While open, dynamo leaves out what takes a fifth of a capture and nobody reads: guards, which say when a compiled function no longer holds (a captured
    graph is used for the shapes it was captured at, which are no symbols, so no constraint can be violated); names of functions for its log, for which it
    parses their files; Python code of graphs that are only passed on."""
    from torch._dynamo import functional_export, symbolic_convert
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    idle = ((functional_export, "_suggest_or_raise_constraint_violation"), (symbolic_convert, "get_funcname"))
    with _use_lazy_graph_module(True), replaced(*((module, name, nothing) for module, name in idle)):
        yield


@contextlib.contextmanager
def whole_language() -> Iterator[None]:
    """While open, dynamo takes what it would leave to Python:

    recurrent layers         off because compiled alone they may be slow. They are unrolled, a step of time at a time
    autograd.grad inside     off, and refused where the loss follows from it, because of backwards that are run outside of the graph. Ours is in it
    transforms of modules    a real copy of each parameter, for what runs while it is traced, cannot be made inside of a transform; nothing runs here
    sizes after transpose_   those before it: dynamo reads a tensor's sizes once, and not again after an in-place view (torch 2.13)
    nn.Transformer's masks   looked at, for whether they are causal. That is for speed alone: a mask that is causal is added as any other
    warnings.warn            no more than a logger's lines, which it leaves out
    """
    from torch._decomp import decompositions
    from torch._dynamo import config, output_graph
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.tensor import TensorVariable
    from torch.nn.modules import transformer

    items = (
        (output_graph.OutputGraph, "_check_requires_grad_intermediate_outputs", nothing),
        (output_graph.OutputGraph, "_validate_outputs_safe_for_autograd_nodes", nothing),
        (builder, "_clone_input", lambda value, fake_mode: value),
        (TensorVariable, "call_method", _sizes_read_anew(TensorVariable.call_method)),
        (decompositions, "_rnn_helper", _rnn),
        (decompositions, "select_one_layer_lstm_function", lambda input, hx, params: decompositions.one_layer_lstm),
        (transformer, "_detect_is_causal_mask", _said_to_be_causal),
    )
    wanted: dict[str, Any] = {name: True for name in ("allow_rnn", "trace_autograd_ops") if hasattr(config, name)}
    wanted |= {name: {warnings.warn} for name in ("ignore_logging_functions",) if hasattr(config, name)}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer, for inference: no rule could split it
    try:
        with config.patch(wanted), replaced(*items):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _sizes_read_anew(call_method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        result = call_method(self, tx, name, args, kwargs)
        if name.endswith("_") and not name.endswith("__"):
            self.synchronize_attributes(tx)
        return result

    return call


def _said_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return bool(is_causal)


def _rnn(
    input: Any, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool, layer_fn: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """A stack of recurrent layers. torch's own (2.13: `dropout if (train and num_layers < i - 1) else 0.0`) never drops anything between them, and takes an
    operator of CPUs alone for float32 (`select_one_layer_lstm_function`)."""
    from torch._decomp.decompositions import params_hiddens

    input = input.transpose(0, 1) if batch_first else input
    finals = []
    for i in range(num_layers):
        mine, start, back, back_start = params_hiddens(params, hidden, i, bidirectional)
        out, final = layer_fn(input, start, mine, has_biases)
        finals.append(final)
        if bidirectional:
            other, final = layer_fn(input, back_start, back, has_biases, reverse=True)
            finals.append(final)
            out = torch.cat([out, other], -1)
        input = torch.dropout(out, dropout, True) if dropout and train and i < num_layers - 1 else out
    return input.transpose(0, 1) if batch_first else input, finals
