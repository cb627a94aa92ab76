"""Sizes that vary: symbols in a shape environment, what a captured graph is at given sizes, and graphs whose sizes are computed from given ones.

A symbol counts units: a dim of `2*s` elements has s units of two. Values below are of symbols, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree
from torch import fx

from autopar._torch.fakes import new_fake_mode

Number = int | float | bool
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbols:
    """Symbols in `mode`'s shape environment, one for every size that varies. hints: their values while a program is traced."""

    def __init__(self, mode: Any, hints: Sequence[int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        self.env = mode.shape_env
        self.sizes: list[torch.SymInt] = []
        self.names: list[sympy.Symbol] = []
        for i, hint in enumerate(hints):
            source = ConstantSource(f"size_{i}")
            name = self.env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self.names.append(name)
            self.sizes.append(self.env.create_symintnode(name, hint=hint, source=source))

    @property
    def are_free(self) -> bool:
        """Whether no symbol had to become a constant, or another one."""
        return not any(n in self.env.replacements for n in self.names)

    def at(self, values: Sequence[int]) -> dict[Any, Any]:
        return {n: sympy.Integer(v) for n, v in zip(self.names, values, strict=True)}

    def hold(self, values: Sequence[int]) -> bool:
        """Whether all that was assumed of the symbols is true of these values."""
        return _is_assumed(self.env, self.at(values))

    @property
    def assumed(self) -> int:
        """How much is assumed of them so far."""
        return len(self.env.guards)


class TracedSizes:
    """What dynamo assumed of sizes while it traced `gm`, whose inputs are those of a function of `flat_args`: in a shape environment of its own."""

    def __init__(self, gm: fx.GraphModule) -> None:
        mode = gm.meta.get("fake_mode")
        self.env = mode.shape_env if mode is not None else None
        self.dims: dict[Any, tuple[int, int]] = {}
        for name, sources in self.env.var_to_sources.items() if self.env is not None else ():
            for s in sources:
                base = getattr(s, "base", None)
                at, dim = getattr(base, "index", None), getattr(s, "idx", None)
                if isinstance(at, int) and isinstance(dim, int):
                    self.dims[name] = at, dim

    def hold(self, size_of: Callable[[int, int], int]) -> bool:
        """Whether all of it is true of these sizes. size_of: (input, dim)."""
        if self.env is None:
            return True
        there = {name: sympy.Integer(size_of(*dim)) for name, dim in self.dims.items()}
        return _is_assumed(self.env, there)


def _is_assumed(env: Any, there: Mapping[Any, Any]) -> bool:
    for n, v in there.items():
        known = env.var_to_range[n]
        if v < 2 or not bool(known.lower <= v) or not bool(v <= known.upper):
            return False
    return all(g.expr.xreplace(there) == sympy.true for g in env.guards)


def expression(x: Any) -> Any:
    """What a size is, as a sympy expression."""
    return x.node.expr if isinstance(x, NUMBERS) else sympy.sympify(x)


def number(x: Any, there: Mapping[Any, Any]) -> Any:
    """A size at the given values of the symbols; anything else as it is."""
    if not isinstance(x, NUMBERS):
        return x
    found = x.node.expr.xreplace(there)
    if isinstance(x, torch.SymBool):
        return bool(found)
    return float(found) if isinstance(x, torch.SymFloat) else int(found)


def expressions(gm: fx.GraphModule) -> list[Any]:
    """All sizes, strides and numbers of a symbolic graph that are no constants, each once."""
    found: dict[Any, None] = {}
    for n in gm.graph.nodes:
        for v in torch.utils._pytree.tree_leaves(n.meta.get("val")):
            sizes = [*v.shape, *v.stride()] if isinstance(v, torch.Tensor) else [v]
            found |= {e: None for s in sizes if isinstance(s, NUMBERS) and (e := s.node.expr).free_symbols}
    return list(found)


def concrete(gm: fx.GraphModule, there: Mapping[Any, Any], mode: Any) -> fx.GraphModule:
    """A symbolic graph at given sizes: numbers in place of symbols, values on fake tensors of `mode`."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    fakes: dict[int, tuple[Any, Any]] = {}

    def fake(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return number(v, there)
        if id(v) not in fakes:
            shape, strides = [number(s, there) for s in v.shape], [number(s, there) for s in v.stride()]
            offset = number(v.storage_offset(), there)
            with mode:
                if offset:
                    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
                    made = torch.empty(offset + reach, dtype=v.dtype, device=v.device).as_strided(shape, strides, offset)
                else:
                    made = torch.empty_strided(shape, strides, dtype=v.dtype, device=v.device)
            fakes[id(v)] = v, made.requires_grad_(v.requires_grad)
        return fakes[id(v)][1]

    for n in gm.graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, NUMBERS):
            env[n] = number(val, there)
            continue
        if n.op == "output":
            graph.output(fx.map_arg(n.args[0], env.__getitem__)).meta = dict(n.meta)
            continue
        new = env[n] = graph.node_copy(n, env.__getitem__)
        new.meta = dict(n.meta)
        if "val" in n.meta:
            new.meta["val"] = torch.utils._pytree.tree_map(fake, val)
    return fx.GraphModule(gm, graph)


def symbolic(
    gm: fx.GraphModule, names: Sequence[Any], size_of: Callable[[fx.Node, Any], Any]
) -> tuple[fx.GraphModule, list[tuple[list[Any], list[Any]]]]:
    """A copy of `gm` whose first inputs are the symbols' values, and whose sizes are computed from them; shape and strides of the tensors that it takes besides.

    size_of(node, path): the sympy expression of the number at `path` of a node's arguments, ("shape", i) or ("stride", i) of an input's; None where it is a constant.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    graph = fx.Graph()
    given = {name: fx.Proxy(graph.placeholder(f"size_{i}")) for i, name in enumerate(names)}
    computed: dict[Any, Any] = {}
    inputs: list[tuple[list[Any], list[Any]]] = []
    env: dict[fx.Node, fx.Node] = {}

    def of(n: fx.Node, x: Any, path: tuple[Any, ...]) -> Any:
        """The expressions in a call's arguments, in the form of those; None for constants."""
        if isinstance(x, (list, tuple)):
            return [of(n, y, (*path, i)) for i, y in enumerate(x)]
        if isinstance(x, dict):
            return {k: of(n, y, (*path, k)) for k, y in x.items()}
        return size_of(n, path) if type(x) in (int, float) else None

    def argument(x: Any, expr: Any) -> Any:
        if isinstance(x, fx.Node):
            return env[x]
        if isinstance(x, (list, tuple)):
            return [argument(y, e) for y, e in zip(x, expr, strict=True)]
        if isinstance(x, dict):
            return {k: argument(y, expr[k]) for k, y in x.items()}
        return x if expr is None else computed[expr]

    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    found = {n: (of(n, n.args, ("args",)), of(n, n.kwargs, ("kwargs",))) for n in calls}
    for n in gm.graph.find_nodes(op="placeholder"):
        env[n] = graph.placeholder(n.name)
        env[n].meta = dict(n.meta)
        sides = ("shape", n.meta["val"].shape), ("stride", n.meta["val"].stride())
        shape, stride = ([v if (e := size_of(n, (side, i))) is None else e for i, v in enumerate(values)] for side, values in sides)
        inputs.append((shape, stride))
    # All of them before the first layer, so that layers stay alike.
    for expr in torch.utils._pytree.tree_leaves(list(found.values())):
        if expr is not None and expr not in computed:
            made = sympy_interp(PythonReferenceAnalysis, given, expr)
            computed[expr] = made.node if isinstance(made, fx.Proxy) else made
    for n in gm.graph.nodes:
        if n.op == "output":
            graph.output(fx.map_arg(n.args[0], env.__getitem__))
        elif n.op == "get_attr":
            env[n] = graph.get_attr(str(n.target))
            env[n].meta = dict(n.meta)
        elif n.op == "call_function":
            args, kwargs = argument(n.args, found[n][0]), argument(n.kwargs, found[n][1])
            assert callable(n.target)
            env[n] = graph.call_function(n.target, tuple(args), kwargs)
            env[n].meta = dict(n.meta)
    graph.lint()
    return fx.GraphModule(gm, graph), inputs


def fill_sizes(gm: fx.GraphModule, values: SymbolicValues, inputs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> None:
    """Records, in a graph of `symbolic`, symbolic values of its inputs and of the sizes computed from them."""
    places = gm.graph.find_nodes(op="placeholder")
    sizes = values.symbols.sizes
    for n, size in zip(places, sizes, strict=False):
        n.meta["val"] = size
    for n, (shape, strides) in zip(places[len(sizes) :], inputs, strict=True):
        n.meta["val"] = values.tensor(n.meta["val"], shape, strides)
    for n in gm.graph.nodes:
        if n.op == "call_function" and "val" not in n.meta:
            args = fx.map_arg(n.args, lambda a: a.meta["val"])
            n.meta |= {"val": n.target(*args), "direction": "forward"}


class SymbolicValues:
    """A fake mode of its own, with symbols; fake tensors of sizes that are expressions of `names`."""

    def __init__(self, names: Sequence[Any], hints: Sequence[int]) -> None:
        self.mode = new_fake_mode()
        self.symbols = Symbols(self.mode, hints)
        self.of = dict(zip(names, self.symbols.names, strict=True))
        self.hints = self.symbols.at(hints)

    def size(self, expr: Any) -> Any:
        if isinstance(expr, int):
            return expr
        mine = expr.xreplace(self.of)
        if not mine.free_symbols:
            return int(mine)
        return self.symbols.env.create_symintnode(mine, hint=int(mine.xreplace(self.hints)))

    def tensor(self, like: torch.Tensor, shape: Sequence[Any], strides: Sequence[Any]) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided([self.size(s) for s in shape], [self.size(s) for s in strides], dtype=like.dtype, device=like.device)
