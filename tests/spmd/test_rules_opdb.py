"""Rules and local lowerings on torch's own operator samples: inputs we did not choose.

A sample is run in float64, forward and backward, and every functional aten call it makes that has a rule here is checked
like our own samples. Calls alike in operator, shapes and other arguments are checked once.
"""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map_only

from autopar import rules
from autopar.graph.mesh import Mesh
from tests.spmd.ops import aten_calls, call, check_call
from tests.wide import cases

OURS = frozenset(
    t for t, fn in ((t, rules._RULES[t]) for t in rules.targets())
    if fn.__module__.rsplit(".", 1)[1] in ("pointwise", "view", "factory", "reduction", "matmul", "index")
    or t.startswith(("aten.mm.", "aten.bmm.", "aten.mv."))
)  # fmt: skip
# Not asked: strides of a storage that a sample's copy no longer has, a minute of sampling grids, other backends.
SKIPPED = ("as_strided", "grid_sampler", "jiterator", "to_sparse")
NAMES = sorted({o.name for o in op_db if not o.name.startswith(SKIPPED)})
SAMPLES_PER_OP, CALLS_PER_OP = 8, 16
# torch's samples are 2, 3, 5, 10 and 20 wide.
MESHES = (Mesh.of({"a": 2}), Mesh.of({"a": 3}), Mesh.of({"a": 5}), Mesh.of({"a": 5, "b": 2}))
# Which of our ops fall back on some sample, and why.
KNOWN_FALLBACKS = {
    "aten.index.Tensor": "a mask selects a number of elements that depends on the data",
    "aten.index_put.default": "likewise with many values",
    "aten.searchsorted.Tensor": "with a sorter, the boundaries are read through a permutation",
}


def _key(fn: Any, args: Any, kwargs: Any) -> str:
    described = tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs))
    return f"{fn} {described}"


def _calls(name: str) -> list[Any]:
    found: dict[str, Any] = {}
    for info in (o for o in op_db if o.name == name and torch.float64 in o.supported_dtypes("cpu")):
        torch.manual_seed(0)
        random.seed(0)
        samples = list(itertools.islice(info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd), 40))
        # Spread over the list: its neighbours are alike.
        for s in samples[:: max(1, len(samples) // SAMPLES_PER_OP)][:SAMPLES_PER_OP]:
            for c in aten_calls(info.op, (s.input, *s.args), s.kwargs, backward=info.supports_autograd):
                if str(c[0]) in OURS:
                    found.setdefault(_key(*c), c)
    chosen = list(found.values())
    random.Random(0).shuffle(chosen)
    return chosen[:CALLS_PER_OP]


def _is_checkable(c: Any) -> bool:
    """Dense tensors, and none that carries a lazy conjugate or an undefined value."""
    tensors = [t for t in tree_flatten(c[1:])[0] if isinstance(t, torch.Tensor)]
    return all(t.layout == torch.strided and not t.is_conj() and not t.is_neg() for t in tensors)


@pytest.mark.parametrize("name", cases(NAMES, NAMES[::3]))
def test_samples(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [c for c in _calls(name) if _is_checkable(c)]
    for fn, args, kwargs in calls:
        values = "empty" not in str(fn)
        c = call(fn, args, kwargs)
        report = check_call(c, MESHES, cap=8, values=values)
        if report.rule.is_fallback:
            assert c.op.target in KNOWN_FALLBACKS, f"{c.op.target} falls back on {[t.shape for t in c.op.inputs]}"
