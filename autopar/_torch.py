"""The only file that imports private torch APIs; it absorbs the differences between versions (torch >= 2.11)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import getattr_static
from types import CellType
from typing import Any
from unittest import mock

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx, nn

from autopar.memory_format import order_of, strides_of

pytree = torch.utils._pytree
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
collectives = torch.ops._c10d_functional  # issued and awaited by separate ops, which a graph can hold

# ---- fake tensors and capture ------------------------------------------------------------------------------------


def new_fake_mode() -> Any:
    """A FakeTensorMode with a shape environment (Inductor's cache needs one)."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def export_joint(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], judge: Callable[[Notes], None] = lambda notes: None
) -> tuple[fx.GraphModule, list[Any], list[Any], Any]:
    """Joint forward/backward graph of `module(*inputs)`: graph, input descriptors, output descriptors, output pytree spec.

    judge: hears what tracing noted besides the graph, before there is a backward; what it raises ends the capture."""
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.export._trace import _restore_state_dict

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(_no_idle_work())
        stack.enter_context(_whole_language())
        with _noting() as notes:
            gm = _dynamo_graph_capture_for_export(module)(*inputs)
        _refuse_unknown_sizes(gm)
        notes.foreign = _draws_of_numpy(gm)
        judge(notes)
        _restore_state_dict(module, gm)
        _separate_outputs(gm)
        _open_regions(gm, itertools.count(), None)
        joint = aot_export_joint_with_descriptors(stack, gm, inputs, decompositions=_early_decompositions())
    g = joint.graph_module
    in_descs = [n.meta["desc"] for n in g.graph.nodes if n.op == "placeholder"]
    out_descs = list(g.graph.output_node().meta["desc"])
    return g, in_descs, out_descs, joint.out_spec


class UnknownSize(Exception):
    """Something in the program has a size that depends on data. where: the user's line."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


def _refuse_unknown_sizes(gm: fx.GraphModule) -> None:
    """dynamo takes nonzero and its kind with a symbol for how many there are, and item() with one for what it is; a plan has no use for either."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for n in gm.graph.nodes:
        value = n.meta.get("example_value", n.meta.get("val"))
        if any(
            free_unbacked_symbols(v)
            for v in pytree.tree_leaves(value)
            if isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        ):
            raise UnknownSize(f"what {n.name} gives has a size or value that depends on data", line_of(n))


def _separate_outputs(gm: fx.GraphModule) -> None:
    """Of outputs that share memory with an input, a parameter or an earlier output, a copy is returned: AOTAutograd gives only the first of them a tangent (it
    would make the others anew, outside of the graph), so their gradients would be lost."""
    output = gm.graph.output_node()
    known = set()
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "get_attr") and isinstance(v := _value_of(n), torch.Tensor):
            known.add(v.untyped_storage()._cdata)

    def own(n: Any) -> Any:
        v = _value_of(n) if isinstance(n, fx.Node) else None
        if not isinstance(v, torch.Tensor) or not v.requires_grad:
            return n
        key = v.untyped_storage()._cdata
        if key not in known:
            known.add(key)
            return n
        with gm.graph.inserting_before(output):
            copied = gm.graph.call_function(torch.clone, (n,))
        copied.meta.update(n.meta)
        return copied

    output.args = pytree.tree_map(own, output.args)
    gm.recompile()


def _value_of(n: fx.Node) -> Any:
    return n.meta.get("val", n.meta.get("example_value"))


@contextlib.contextmanager
def _no_idle_work() -> Iterator[None]:
    """While open, dynamo leaves out what takes a fifth of a capture and nobody reads: guards, which say when a compiled function no longer holds (a captured
    graph is used for the shapes it was captured at, which are no symbols, so no constraint can be violated); names of functions for its log, for which it
    parses their files; Python code of graphs that are only passed on."""
    from torch._dynamo import functional_export, symbolic_convert
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    idle = ((functional_export, "_suggest_or_raise_constraint_violation"), (symbolic_convert, "get_funcname"))
    with _use_lazy_graph_module(True), _replaced(*((module, name, _nothing) for module, name in idle)):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _replaced(*items: tuple[Any, str, Any]) -> Iterator[None]:
    """While open, `name` of a module or class is something else; what this torch does not have is left out."""
    with ExitStack() as stack:
        for where, name, new in items:
            if hasattr(where, name):
                stack.enter_context(mock.patch.object(where, name, new))
        yield


@contextlib.contextmanager
def _whole_language() -> Iterator[None]:
    """While open, dynamo takes what it would leave to Python:

    recurrent layers         off because compiled alone they may be slow. They are unrolled, a step of time at a time
    autograd.grad inside     off, and refused where the loss follows from it, because of backwards that are run outside of the graph. Ours is in it
    transforms of modules    a real copy of each parameter, for what runs while it is traced, cannot be made inside of a transform; nothing runs here
    nn.Transformer's masks   looked at, for whether they are causal. That is for speed alone: a mask that is causal is added as any other
    """
    from torch._decomp import decompositions
    from torch._dynamo import config, output_graph
    from torch._dynamo.variables import builder
    from torch.nn.modules import transformer

    items = (
        (output_graph.OutputGraph, "_check_requires_grad_intermediate_outputs", _nothing),
        (output_graph.OutputGraph, "_validate_outputs_safe_for_autograd_nodes", _nothing),
        (builder, "_clone_input", lambda value, fake_mode: value),
        (decompositions, "_rnn_helper", _rnn),
        (decompositions, "select_one_layer_lstm_function", lambda input, hx, params: decompositions.one_layer_lstm),
        (transformer, "_detect_is_causal_mask", _said_to_be_causal),
    )
    wanted = {name: True for name in ("allow_rnn", "trace_autograd_ops") if hasattr(config, name)}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer, for inference: no rule could split it
    try:
        with config.patch(wanted), _replaced(*items):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


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


def import_compiler() -> None:
    """Imports what the first capture would import, so that a command can count it as what it is."""
    for part in ("_dynamo.backends.debugging", "_dynamo.functional_export", "_functorch.aot_autograd", "export._trace"):
        importlib.import_module(f"torch.{part}")


def _early_decompositions() -> dict[Any, Callable[..., Any]]:
    """Bias additions become ops of their own: a split contraction is reduced before the bias is added once.

    Inductor fuses them again.
    """
    aten = torch.ops.aten

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        out = aten.mm(a, b)
        out = out if alpha == 1 else out * alpha
        return out + (bias if beta == 1 else bias * beta)

    def new_full(
        x: torch.Tensor, size: Any, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        """A constant does not depend on where the tensor lies that it takes its dtype from."""
        return aten.full(size, value, dtype=dtype or x.dtype, device=device or x.device)

    def new_constant(value: int) -> Callable[..., torch.Tensor]:
        return lambda x, size, **kw: new_full(x, size, value, **kw)

    from torch._decomp import get_decompositions

    # Rare operators that are others in disguise, which have rules. (A zero that jvp made has no memory to be read from.)
    rare = [
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dim,
        aten.unsafe_split.Tensor,
        aten.diag_embed.default,
        aten.block_diag.default,
        aten.rot90.default,
    ]
    return {
        **get_decompositions(rare),
        aten._efficientzerotensor.default: lambda size, **kw: aten.full(size, 0, **kw),
        aten.addmm.default: addmm,
        aten.new_full.default: new_full,
        aten.new_zeros.default: new_constant(0),
        aten.new_empty.default: new_constant(0),
        aten.new_ones.default: new_constant(1),
    }


def describe_io(desc: Any) -> tuple[str, Any]:
    """(kind, name or position) of an input or output descriptor of AOTAutograd."""
    from torch._functorch._aot_autograd import descriptors as d

    if desc is None:
        return "none", None
    if isinstance(desc, d.ParamAOTInput):
        return "param", desc.target
    if isinstance(desc, d.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, d.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, d.TangentAOTInput):
        kind, value = describe_io(desc.output)
        return "tangent", value if kind == "output" else -1
    if isinstance(desc, d.PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, d.GradAOTOutput):
        kind, value = describe_io(desc.grad_of)
        return ("grad", value) if kind == "param" else ("input_grad", value)
    if isinstance(desc, d.InputMutationAOTOutput):
        kind, value = describe_io(desc.mutated_input)
        return (f"{kind}_update", value) if kind in ("buffer", "param", "input") else ("input_update", -1)
    return "other", None


def drop_dead_code(gm: fx.GraphModule) -> None:
    """Dead code elimination that knows functional collectives to be pure (torch's counts wait_tensor as a side effect). Checks of values (one_hot's, of its
    classes) go too: they give nothing, and would have every rank wait for the whole of what is checked."""

    def impure(n: fx.Node) -> bool:
        return n.op in ("placeholder", "output") or "copy_" in str(n.target)

    for n in reversed(list(gm.graph.nodes)):
        if not n.users and not impure(n):
            gm.graph.erase_node(n)
    gm.recompile()


def explain_capture_failure(e: BaseException) -> tuple[str, str] | None:
    """(what, "file:line in function: source") of an error raised while capturing; None if it is not about capture."""
    from torch._dynamo import exc

    if isinstance(e, UnknownSize):
        return str(e), e.where
    if isinstance(e, AssertionError) and "RandomValueSource" in str(e):
        return "random numbers of Python's `random` would be drawn once, while capturing", ""
    if isinstance(e, AssertionError) and str(e).startswith("fake mode"):
        return "forward reads a numpy array, or a tensor from outside of the model; register it as a buffer", ""

    if isinstance(e, NotImplementedError) and str(e).startswith("checkpoint not implemented for"):
        return "the context_fn of a checkpoint must be a function of a module or a functools.partial of one, not made in forward", ""
    kinds: tuple[type[BaseException], ...] = (exc.TorchDynamoException,)
    import torch.fx.experimental.symbolic_shapes as ss

    kinds += (ss.GuardOnDataDependentSymNode, ss.PendingUnbackedSymbolNotFound)
    seen: BaseException | None = e
    while seen is not None and not isinstance(seen, kinds):
        seen = seen.__cause__
    if seen is None:
        last = traceback.extract_tb(e.__traceback__)[-1:]
        if any("/torch/_dynamo/" in f.filename for f in last):
            return f"torch's tracer failed: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}", ""
        return None
    text = str(getattr(seen, "msg", None) or seen).strip().splitlines()
    what = next((t for t in text if t.strip()), type(seen).__name__)
    explanation = next((t.strip() for t in text if t.strip().startswith("Explanation:")), "")
    stack = getattr(seen, "real_stack", None)
    where = ""
    if stack:
        f = stack[-1]
        where = f"{f.filename}:{f.lineno} in {f.name}: {f.line}"
    return " ".join([what, explanation]).strip(), where


# ---- what a traced program does besides computing ------------------------------------------------------------------


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

    def source_of(self, placeholder: str) -> str:
        """How Python reaches the tensor that dynamo made an input of this name of, if that is known."""

        def plain(name: str) -> str:
            short = re.sub(r"\._modules\['([^']*)'\]", r".\1", name.replace("._modules['_export_root']", ""))
            return re.sub(r"[^a-zA-Z0-9]+", "_", short).strip("_")

        return next((n for n in map(_name_of, self.sources) if plain(n).endswith(plain(placeholder))), placeholder)


@contextlib.contextmanager
def _noting() -> Iterator[Notes]:
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
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _effects(side: Any) -> list[Effect]:
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    real = {id(o): o for o in side.keepalive}
    stacks = getattr(side, "mutation_user_stacks", {})
    out = []
    for key, var in list(side.id_to_variable.items()):
        if not isinstance(var.mutation_type, (AttributeMutationExisting, ValueMutationExisting)) or not side.is_modified(var):
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
            names, new = _changed_items(var, owner, source)
            if names is None:
                continue
        if names or kind == "contents":
            out.append(Effect(kind, source, names or (), new, constants, stack))
    for tensor, hook, _, name in side.tensor_hooks.values():
        nested = getattr(hook, "fn_name", None)  # of a function that forward makes
        said = nested.as_python_constant() if nested is not None else getattr(getattr(hook, "fn", None), "__qualname__", "a hook")
        out.append(Effect("hook", _name_of(tensor.source), (name, said), (), {}, ()))
    return out


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
    items = getattr(var, "items", None)
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
        value = None if new is None else _value_of(new.as_proxy().node)
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


def _draws_of_numpy(gm: fx.GraphModule) -> list[str]:
    """Dynamo makes numpy's random functions torch's, with other numbers than numpy's generator has."""
    functions = (getattr(n.target, "f", None) for n in gm.graph.nodes if n.op == "call_function")
    return [f"numpy.random.{f.__name__}" for f in functions if getattr(f, "__module__", "") == "torch._numpy.random"]


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


# ---- checkpointed regions ------------------------------------------------------------------------------------------

# What a policy that saves attention calls it, by device and kernel; captured is one op of ours.
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}" for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)


def _open_regions(gm: fx.GraphModule, numbers: Iterator[int], region: int | None) -> None:
    """In dynamo's graph, calls of `tag_activation_checkpoint` become calls that trace the region as part of the program, each node with its
    region's number and what the region's policy says of it. A region within a region is a part of it.

    (torch's own way there goes through saved-tensor hooks, and what it says of a node does not tell a region from a policy's hint.)"""
    for node in list(gm.graph.nodes):
        body = get_attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(body, fx.GraphModule):
            continue
        inner = region
        for user in list(node.users):
            if user.target is torch.ops.higher_order.tag_activation_checkpoint:
                inner = next(numbers) if region is None else region
                user.target, user.args, user.kwargs = _run_region, (node, inner, *user.args[1:]), {}
        _open_regions(body, numbers, inner)
    gm.recompile()


def _run_region(body: fx.GraphModule, region: int, *args: Any) -> Any:
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    context_fn = body.meta.get("_checkpoint_context_fn")
    around: Any = contextlib.nullcontext() if context_fn is None else context_fn()[0]
    tag = CheckpointPolicy.MUST_RECOMPUTE
    if hasattr(around, "policy_fn"):
        around, tag = _Asking(around.policy_fn), CheckpointPolicy.PREFER_RECOMPUTE
    for n in body.graph.nodes:  # what these nodes are traced into inherits the two
        n.meta |= {"ac_graph_id": region, "recompute": tag}
    with traceback.preserve_node_meta(), around:
        return fx.Interpreter(body).run(*args)


class _Asking(TorchDispatchMode):
    """Asks a selective checkpoint's policy about every op, and notes its answers on the nodes that the op is traced into."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils.checkpoint import SAC_IGNORED_OPS

        kwargs = kwargs or {}
        mode = get_proxy_mode()
        if mode is None or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        out = func(*args, **kwargs)
        answer = self.answer(out, func, args, kwargs)
        for n in itertools.islice(reversed(nodes), len(nodes) - before):
            n.meta["recompute"] = answer
        return out

    def answer(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

        context: Any = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = out
        answer = self.policy(context, func, *args, **kwargs)
        if str(func).startswith("autopar.attention"):
            also = (self.policy(context, getattr(torch.ops.aten, name).default, *args, **kwargs) for name in _ATTENTION)
            answer = next((a for a in also if a != answer), answer)
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.MUST_RECOMPUTE
        # A list of ops is turned by torch into a policy of its own: of what is not on it, it cannot say "must".
        if getattr(self.policy, "__module__", "") == "torch.utils.checkpoint" and answer is CheckpointPolicy.PREFER_RECOMPUTE:
            return CheckpointPolicy.MUST_RECOMPUTE
        return answer


def region_of(n: fx.Node) -> tuple[int | None, str]:
    """The checkpointed region of a node of the joint graph, and what the region says of it: "must_recompute", ... What it would have offloaded
    it would not have made again."""
    region, answer = n.meta.get("ac_graph_id"), n.meta.get("recompute")
    return region, "" if region is None else answer.name.lower().replace("cpu_offload", "save")


def leave_region(n: fx.Node) -> None:
    n.meta.pop("ac_graph_id", None)
    n.meta.pop("recompute", None)


# ---- fx ------------------------------------------------------------------------------------------------------------


def line_of(n: fx.Node) -> str:
    """The user's line that a node was traced from, "file:line in function: source"; the node's name where it is not known."""
    lines = [line.strip() for line in str(n.meta.get("stack_trace") or n.stack_trace or "").splitlines() if line.strip(" ^~")]
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith("File ")), None)
    if at is None:
        return n.name
    return ": ".join([re.sub(r'^File "(.*)", line (\d+), in (.*)$', r"\1:\2 in \3", lines[at]), *lines[at + 1 : at + 2]])


def is_getitem(n: fx.Node) -> bool:
    return n.target is operator.getitem


def fresh_fake(v: torch.Tensor, mode: Any) -> torch.Tensor:
    """A new fake tensor like `v`."""
    with mode:
        return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)


def fake_mode_of(gm: fx.GraphModule) -> Any:
    """The mode of the values recorded in a graph that has inputs."""
    return next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"].fake_mode


def is_fake(t: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(t, FakeTensor)


getitem = operator.getitem


# ---- distributed ---------------------------------------------------------------------------------------------------


def alias_process_group(name: str, group: Any) -> None:
    """Makes `group` known to functional collectives under `name` too, so that graphs have the same text on every rank; a group that had the name loses it."""
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group

    with contextlib.suppress(RuntimeError):  # nobody has the name, or one that is gone
        if _resolve_process_group(name) is group:
            return
    _unregister_process_group(name)
    _register_process_group(name, group)


def is_open(group: Any) -> bool:
    """Whether `group` of torch's was not destroyed yet."""
    from torch.distributed.distributed_c10d import _world

    return group in _world.pg_map


def new_group(ranks: list[int], name: str, timeout: Any) -> Any:
    """A group of `ranks`, this process among them, under a name that no other group of the job has; collective over `ranks` alone.

    torch.distributed.new_group wants all processes of the job, and takes names from counters of each process: those of two halves of a job
    that make groups by themselves would be the same names in one store.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_timeout, _new_process_group_helper, _world

    backend, store = _world.pg_map[dist.group.WORLD]
    backend = dist.Backend(backend)
    timeout = _get_default_timeout(backend) if timeout is None else timeout
    device = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    made, _ = _new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, backend, store, name, timeout=timeout, device_id=device
    )
    _world.pg_group_ranks[made] = {r: i for i, r in enumerate(ranks)}
    return made


def process_group(name: str) -> Any:
    """The group that functional collectives know under `name`."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


_orderly: dict[str, tuple[Any, Any]] = {}  # by name: the default group it was made under, and the group


def orderly(name: str, group: Any, fresh: str) -> Any:
    """`group`, or, where gloo carries it, a group of the same ranks whose collectives run one after another; collective over the ranks on first use of `name`.

    fresh: a text that the ranks agreed on and that was in no key of the store before.

    gloo runs two collectives of a group at a time, and both of its threads note what they ended in one string, without a lock
    (ProcessGroupGloo::runLoop; torch 2.13): after long enough with several all-gathers on their way the heap is damaged ("malloc(): unaligned tcache chunk
    detected"; address sanitizer: double free of that string). torch.distributed.new_group has no argument for the number of threads.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup

    gloo = getattr(dist, "ProcessGroupGloo", None)
    cpu = torch.device("cpu")
    if gloo is None or cpu not in group._device_types or not isinstance(theirs := group._get_backend(cpu), gloo):
        return group
    under, made = _orderly.get(name, (None, None))
    if under is dist.group.WORLD:
        return made
    for old in [n for n, (world, _) in _orderly.items() if world is not dist.group.WORLD]:
        del _orderly[old]
    if not _orderly:
        atexit.register(_orderly.clear)  # its threads end while Python still runs
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [gloo.create_default_device()], 1, theirs.options._timeout
    ranks = dist.get_process_group_ranks(group)
    # A name may come again after the default group was destroyed and made anew, perhaps in the same store.
    store = PrefixStore(f"{name}/{'.'.join(map(str, ranks))}/{fresh}", default_store())
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    mine = ProcessGroup(store, rank, size)
    backend = gloo(store, rank, size, options)
    backend.options.global_ranks_in_group, backend.options.group_name = ranks, name
    backend._set_sequence_number_for_group()
    mine._set_default_backend(ProcessGroup.BackendType.GLOO)
    mine._register_backend(cpu, ProcessGroup.BackendType.GLOO, backend)
    mine._set_group_name(name)
    _orderly[name] = (dist.group.WORLD, mine)
    return mine


def unalias_process_groups() -> None:
    """Forgets all aliases (before destroy_process_group, which the registry's references would outlive)."""
    from torch._C._distributed_c10d import _unregister_all_process_groups

    _unregister_all_process_groups()


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor itself (not a view that autograd tracks)."""
    return t._local_tensor  # type: ignore[attr-defined]


def dtensor(local: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Any:
    """A DTensor of global `shape` from a local shard, without communication. order: its format, by default the shard's."""
    from torch.distributed.tensor import DTensor

    stride = strides_of(shape, order or order_of(local))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# ---- graph checks --------------------------------------------------------------------------------------------------


def is_operator(target: Any) -> bool:
    """Whether it is an operator of torch or registered with torch, and no Python function."""
    return isinstance(target, torch._ops.OpOverload)


def is_pure(n: fx.Node) -> bool:
    """Our graphs are functional and draw random numbers from counters only; what writes or asserts must stay."""
    if isinstance(n.target, torch._ops.OpOverload):
        return not n.target._schema.is_mutable and "assert" not in str(n.target)
    return True


def without_dead_code(gm: fx.GraphModule) -> fx.GraphModule:
    drop_dead_code(gm)
    return gm


def check_recorded_values(gm: fx.GraphModule, fake_mode: Any) -> None:
    """Every node, run again on its operands' recorded fake values, gives the recorded shapes and dtypes."""
    for n in gm.graph.nodes:
        if n.op != "call_function":
            continue
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: m.meta["val"])
        with fake_mode:
            got = n.target(*args, **kwargs)
        same = [
            (g.shape, g.dtype) == (w.shape, w.dtype)
            for g, w in zip(*(v if isinstance(v, (list, tuple)) else [v] for v in (got, n.meta["val"])), strict=True)
            if isinstance(g, torch.Tensor)
        ]
        assert all(same), f"recorded value of {n.format_node()} is not what it computes"


# ---- lowering ------------------------------------------------------------------------------------------------------


def get_attribute(gm: fx.GraphModule, path: str) -> Any:
    out: Any = gm
    for part in path.split("."):
        out = getattr(out, part)
    return out


def with_strides(v: torch.Tensor, strides: tuple[int, ...], mode: Any) -> torch.Tensor:
    """A fake tensor like `v` with other strides."""
    with mode:
        return torch.empty_strided(v.shape, strides, dtype=v.dtype, device=v.device)


def storage_of(v: torch.Tensor) -> int:
    """What two tensors that share memory share, fake ones too."""
    return v.untyped_storage()._cdata


def invoke_subgraph() -> Any:
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as op

    return op


@functools.cache
def keep_strides(names: tuple[str, ...]) -> None:
    """Inductor gives the operators of these names their operands as the graph has them, where it calls torch's kernel."""
    from torch._inductor import lowering

    for name in names:
        packet = functools.reduce(getattr, name.split("."), torch.ops)
        for overload in packet.overloads():
            lowering._maybe_layout_constraints.setdefault(getattr(packet, overload), lowering.constrain_to_fx_strides)


def decompose_late(gm: fx.GraphModule, values: list[Any], mode: Any) -> fx.GraphModule:
    """Retraces `gm` through Inductor's decompositions on the fake tensors `values`."""
    importlib.import_module("torch._inductor.lowering")  # decompositions look for it without importing it
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        n.target = torch.ops.aten.reshape.default  # decomposed, values may lie otherwise than recorded
    gm.recompile()
    with mode, torch.no_grad():
        return make_fx(gm, decomposition_table=select_decomp_table(), tracing_mode="real", _allow_non_fake_inputs=True)(*values)


@contextlib.contextmanager
def scatters_before_readers() -> Iterator[None]:
    """While open, Inductor's scheduler keeps the order of reads and writes in place when it computes a node's loops again.

    It does so on CPU, where it fuses loops of different shapes. torch 2.13 then forgets that a node reads what a scatter added to (the
    gradient of an upsampling or a max pooling, index_add), not the zeros before it; such a node may come to stand before the scatter, and
    silently reads zeros. Torch before 2.13 also forgets what must run before a write. pytorch/pytorch#185509, mended by #185873; where it
    is, nothing changes.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    theirs = SchedulerNode.recompute_size_and_body

    def ours(node: Any, *args: Any, **kwargs: Any) -> None:
        order: Any = OrderedSet(d for d in node.read_writes.reads if isinstance(d, (WeakDep, StarDep)))
        theirs(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    config: Any = torch.compiler.config
    SchedulerNode.recompute_size_and_body = ours  # type: ignore[method-assign]
    try:
        # Another key of the cache on disk, where what was compiled without this may lie, wrong.
        with config.patch(cache_key_tag=f"{config.cache_key_tag}scatters before readers"):
            yield
    finally:
        SchedulerNode.recompute_size_and_body = theirs  # type: ignore[method-assign]


def compile_inner(gm: fx.GraphModule, mode: Any, is_backward: bool) -> tuple[Any, tuple[tuple[int, ...] | None, ...] | None]:
    """Inductor on a decomposed graph: the callable (a list of tensors in, boxed) and the strides of its outputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    context = TracingContext(mode)
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    # Reordering for peak memory would undo the order in which collectives are issued and waited for.
    with (
        tracing(context),
        V.set_fake_mode(mode),
        config.patch({"reorder_for_peak_memory": False}),
        scatters_before_readers(),
        context.report_output_strides() as found,
    ):
        fn = compile_fx_inner(gm, values, is_backward=is_backward)
    strides = None if found is None else tuple(None if s is None else tuple(int(x) for x in s) for s in found)
    return fn, strides


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm`'s generated code as a function of a list that it empties: called with plain arguments, the caller would keep all of them alive."""

    class Boxed(fx.graph.CodeGen):
        def gen_fn_def(self, free_vars: list[str], *_: Any, **__: Any) -> str:
            names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
            return f"def forward(self, flat):\n    [{', '.join(names)}] = flat\n    flat.clear()"

    gm.graph.set_codegen(Boxed())
    gm.recompile()
    return gm.forward


def inductor_cache_counts() -> dict[str, int]:
    """Hits, misses and bypasses of Inductor's graph cache so far in this process."""
    from torch._dynamo.utils import counters

    c = counters["inductor"]
    return {k: int(c[f"fxgraph_cache_{k}"]) for k in ("hit", "miss", "bypass")}


def default_timeout(device_type: str) -> Any:
    """How long collectives of the default process group wait; None where its backend does not say."""
    import torch.distributed as dist

    try:
        return dist.group.WORLD._get_backend(torch.device(device_type)).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The key-value store that the process group was initialised with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextlib.contextmanager
def replaced_composites(new: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While open, what these operators are composed of is what their functions say."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = {op: op.py_kernels.get(key) for op in new}
    for op, fn in new.items():
        op.py_kernels[key] = fn
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, fn in before.items():
            if fn is None:
                del op.py_kernels[key]
            else:
                op.py_kernels[key] = fn
            op._dispatch_cache.clear()


# ---- checkpoints ---------------------------------------------------------------------------------------------------


# Exact names: `torch.distributed.checkpoint.metadata` as a whole would let an index say `metadata.os.system`. BytesStorageMetadata is left out:
# DCP reads tensors with `weights_only`, but entries of that kind by unpickling.
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
}  # fmt: skip


def restricted_reader(place: Any) -> Any:
    """A DCP reader of a folder (a Path) or URL whose index may hold only tensors' records in DCP's plain types: opening it, and reading what it lists, runs nothing
    that the files say."""
    import io
    import pickle

    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if name in _INDEX_NAMES.get(module, ()) or dtype:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which is no record of a checkpoint")

    kind: Any = FileSystemReader
    if isinstance(place, str):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as kind

    class Reader(kind):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as f:
                metadata = Unpickler(io.BytesIO(f.read())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("the checkpoint's index is none")
            if any("/" in info.relative_path or "\\" in info.relative_path for info in metadata.storage_data.values()):
                raise pickle.UnpicklingError("the checkpoint's index names a file outside its folder")
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(place)


def draws_random(n: fx.Node) -> bool:
    """Whether a node draws from torch's random generator."""
    return isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags


def hooks_of(t: torch.Tensor) -> tuple[Any, Any]:
    """The dicts of its hooks, as `set_hooks` takes them; None where it has none."""
    return t._post_accumulate_grad_hooks, t._backward_hooks  # type: ignore[attr-defined]


def set_hooks(t: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """`t` has these hooks. They stay the same dicts, so that the handle of a hook still removes it."""
    after, before = hooks
    if after:
        t._post_accumulate_grad_hooks = after  # type: ignore[attr-defined]
    if before:
        t._backward_hooks = before


def swap_parameter(p: torch.Tensor, new: torch.Tensor) -> None:
    """`p` becomes `new` in place, and keeps its own hooks (a swap moves them away with the autograd state)."""
    hooks = hooks_of(p)
    torch.utils.swap_tensors(p, new)
    set_hooks(p, hooks)


# ---- torch's own partitioner, to compare with ------------------------------------------------------------------------


class _Settled(Exception):
    """Stops the partitioner once it has chosen."""


def saved_by_min_cut(
    gm: fx.GraphModule, forward_outputs: int, budget: float, solver: str, heavy: set[Any], cheap: set[Any], views: set[Any]
) -> list[str]:
    """Names of the nodes of a joint graph (which is changed) that torch's min-cut partitioner keeps for backward.

    budget, solver: `activation_memory_budget` and its knapsack's. heavy, cheap, views: operators (packets) it shall take for expensive, for recomputable
    and fusible, for views, besides those it knows.
    """
    from torch._functorch import config, partitioners

    known = partitioners.get_default_op_list()
    chosen: list[str] = []
    choose = partitioners.choose_saved_values_set

    def choosing(*args: Any, **kwargs: Any) -> Any:
        chosen.extend(n.name for n in choose(*args, **kwargs))
        raise _Settled

    for op in (*cheap, *views):
        known.recomputable_ops.add(op)
        known.fusible_ops.add(op)
    for op in views:
        known.view_ops.add(op)
    for op in heavy:
        known.compute_intensive_ops.add(op)
    with (
        mock.patch.object(partitioners, "choose_saved_values_set", choosing),
        mock.patch.object(partitioners, "get_default_op_list", lambda: known),
        config.patch({"activation_memory_budget": budget, "activation_memory_budget_solver": solver}),
        contextlib.suppress(_Settled),
    ):
        partitioners.min_cut_rematerialization_partition(gm, None, num_fwd_outputs=forward_outputs)
    return chosen


def decomposed_late() -> set[Any]:
    """The operators that Inductor decomposes before its partitioner sees a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return set(select_decomp_table())
