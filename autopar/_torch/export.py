"""One joint graph of forward and backward, by dynamo and AOTAutograd."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import fx, nn

from autopar._torch.effects import Notes, draws_of_numpy, noting
from autopar._torch.fakes import storage_of
from autopar._torch.in_place import views_out_of_place, writes_out_of_place, written_by_layout
from autopar._torch.language import no_idle_work, whole_language
from autopar._torch.nodes import line_of, value_of
from autopar._torch.regions import open_regions
from autopar._torch.symbols import TracedSizes
from autopar._torch.tokens import EffectError, without_tokens

pytree = torch.utils._pytree


Joint = tuple[fx.GraphModule, list[Any], list[Any], Any]


def export_joint(module: nn.Module, inputs: tuple[torch.Tensor, ...], judge: Callable[[Notes], None] = lambda notes: None) -> Joint:
    """Joint forward/backward graph of `module(*inputs)`: graph, input descriptors, output descriptors, output pytree spec.

    judge: hears what tracing noted besides the graph, before there is a backward; what it raises ends the capture."""
    try:
        return _export_joint(module, inputs, judge, lambda gm: None)
    except (RuntimeError, ValueError) as e:
        if type(e) not in (RuntimeError, ValueError) or not _traces(e):
            raise
        with contextlib.suppress(RuntimeError, ValueError):
            return _export_joint(module, inputs, judge, writes_out_of_place)
        raise


def _traces(e: BaseException) -> bool:
    """Whether it was raised while AOTAutograd traced what dynamo had captured."""
    return any("/torch/_functorch/" in f.filename for f in traceback.extract_tb(e.__traceback__))


def _export_joint(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], judge: Callable[[Notes], None], rewrite: Callable[[fx.GraphModule], None]
) -> Joint:
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.export._trace import _restore_state_dict

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(no_idle_work())
        stack.enter_context(whole_language())
        with noting() as notes:
            gm = _dynamo_graph_capture_for_export(module)(*inputs)
        _refuse_unknown_sizes(gm)
        notes.foreign = draws_of_numpy(gm)
        notes.sizes = TracedSizes(gm)
        notes.lies = written_by_layout(gm)
        judge(notes)
        _restore_state_dict(module, gm)
        _separate_outputs(gm)
        open_regions(gm, itertools.count(), None)
        views_out_of_place(gm)
        rewrite(gm)
        joint = aot_export_joint_with_descriptors(stack, gm, inputs, decompositions=_early_decompositions())
    g = joint.graph_module
    _refuse_unknown_sizes(g)  # of backward's: the gradient of x[mask] = y
    in_descs = [n.meta["desc"] for n in g.graph.nodes if n.op == "placeholder"]
    out_descs = list(g.graph.output_node().meta["desc"])
    return g, *without_tokens(g, in_descs, out_descs), joint.out_spec


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
        # A later line may settle the symbol (expand, a broadcast): of other data that need not be true.
        if n.meta.get("unbacked_bindings") or any(
            free_unbacked_symbols(v)
            for v in pytree.tree_leaves(value)
            if isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        ):
            raise UnknownSize(f"what {n.name} gives has a size or value that depends on data", line_of(n))


def _claims_grad(v: Any) -> bool:
    """A view made under no_grad, of what requires a gradient, says that it requires one too, and has no way back."""
    return (
        isinstance(v, torch.Tensor)
        and v._is_view()
        and v.requires_grad
        and v.grad_fn is None
        and v._base is not None
        and v._base.requires_grad
    )


def _separate_outputs(gm: fx.GraphModule) -> None:
    """Of outputs that share memory with an input, a parameter or another output, a copy is returned: AOTAutograd gives at most the first of them a tangent (it
    would make the others anew, outside of the graph), so their gradients would be lost; those without a gradient count too (a result and its detach)."""
    output = gm.graph.output_node()
    known = set()
    for n in {n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)}:
        if _claims_grad(value_of(n)):
            with gm.graph.inserting_before(output):
                detached = gm.graph.call_function(torch.detach, (n,))
            detached.meta["example_value"] = value_of(n).detach()
            output.replace_input_with(n, detached)
    results = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
    wanting = {storage_of(v) for n in results if isinstance(v := value_of(n), torch.Tensor) and v.requires_grad}
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "get_attr") and isinstance(v := value_of(n), torch.Tensor):
            known.add(storage_of(v))

    def own(n: Any) -> Any:
        v = value_of(n) if isinstance(n, fx.Node) else None
        if not isinstance(v, torch.Tensor) or (key := storage_of(v)) not in wanting:
            return n
        if key not in known and v.requires_grad:
            known.add(key)
            return n
        with gm.graph.inserting_before(output):
            copied = gm.graph.call_function(torch.clone, (n,))
        copied.meta.update(n.meta)
        return copied

    output.args = pytree.tree_map(own, output.args)
    gm.recompile()


def _early_decompositions() -> dict[Any, Callable[..., Any]]:
    """Bias additions become ops of their own: a split contraction is reduced before the bias is added once.

    Inductor fuses them again.
    """
    aten = torch.ops.aten

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        out: torch.Tensor = aten.mm(a, b)
        out = out if alpha == 1 else out * alpha
        return out + (bias if beta == 1 else bias * beta)

    def new_full(
        x: torch.Tensor, size: Any, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        """A constant does not depend on where the tensor lies that it takes its dtype from."""
        full: torch.Tensor = aten.full(size, value, dtype=dtype or x.dtype, device=device or x.device)
        return full

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


def explain_capture_failure(e: BaseException) -> tuple[str, str] | None:
    """(what, "file:line in function: source") of an error raised while capturing; None if it is not about capture."""
    from torch._dynamo import exc

    if isinstance(e, (UnknownSize, EffectError)):
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
        if any("/torch/_dynamo/" in f.filename for f in last) or (type(e) in (RuntimeError, ValueError) and _traces(e)):
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
