"""The direction of flow, enforced on the syntax tree of every source file.

- rooms import themselves and what stands before them, files never each other (`tests/structure.py`);
- the planner's half of the package (`solver/`, `autopar/rules/`, the graph, mesh, placement, layout and plan types) never reaches torch,
  neither itself nor through a module of ours that it imports;
- `autopar.passes` does not import `autopar.solver`: a pass never re-decides what the plan decided;
- only `autopar/_torch/` touches private torch APIs: any dotted path below `torch` with a component that begins with an underscore, imported or
  reached as an attribute. Operators (`torch.ops.aten._to_copy`, `torch.ops._c10d_functional.all_reduce`) are exempt, and so are names like `torch.__version__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import ROOT, Structure, imports, within

PRIVATE_APIS = "autopar._torch"
TORCH_FREE = (
    "autopar.text", "autopar.graph", "autopar.rules", "autopar.hardware.cluster", "autopar.hardware.parts", "autopar.cost", "autopar.timeline", "autopar.plan", "autopar.solver",
    "autopar.planner.formulation", "autopar.planner.planning", "autopar.planner.layout", "autopar.simulate.simulator", "autopar.pipeline",
)  # fmt: skip
ALLOWED_PRIVATE = ("torch.ops",)


def is_private(path: str) -> bool:
    """Whether a dotted path is a private torch API."""
    parts = path.split(".")
    if parts[0] != "torch" or any(within(path, a) for a in ALLOWED_PRIVATE):
        return False
    return any(p.startswith("_") and not p.endswith("__") for p in parts)


def torch_paths(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every path below torch that is imported or reached by attributes, also through aliases and literal getattr."""
    bound: dict[str, str] = {}
    for path, line in imports(tree, "", False):
        if within(path, "torch"):
            yield path, line
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if within(a.name, "torch"):
                    bound[a.asname or "torch"] = a.name if a.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and within(node.module or "", "torch") and not node.level:
            for a in node.names:
                bound[a.asname or a.name] = f"{node.module}.{a.name}"

    def resolve(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = resolve(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
            base, name = resolve(node.args[0]), node.args[1]
            return f"{base}.{name.value}" if base and isinstance(name, ast.Constant) else None
        return None

    assigns = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    for node in sorted(assigns, key=lambda n: n.lineno):
        path = resolve(node.value)
        if path is not None and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Call)):
            path = resolve(node)
            if path is not None:
                yield path, node.lineno


STRUCTURE = Structure()
SOURCES, TREES, IMPORTS, module_of = STRUCTURE.sources, STRUCTURE.trees, STRUCTURE.imports, STRUCTURE.module_of


def chain_to(start: str, is_target: str) -> list[str] | None:
    """The shortest chain of imports from module `start` to a path within `is_target`, if there is one."""
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        for path, line in IMPORTS[chain[-1]]:
            if within(path, is_target):
                return [*chain, f"{path} (line {line})"]
            ours = module_of(path)
            if ours is not None and ours not in seen:
                seen.add(ours)
                queue.append([*chain, ours])
    return None


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free(name: str) -> None:
    modules = [m for m in SOURCES if within(m, name)]
    assert modules, f"{name} does not exist"
    for m in modules:
        chain = chain_to(m, "torch")
        assert chain is None, " imports ".join(chain or [])


def test_rooms_stand_on_each_other_in_order() -> None:
    assert not STRUCTURE.against_the_order(), "\n".join(STRUCTURE.against_the_order())


def test_no_circles() -> None:
    assert not STRUCTURE.circles(), "\n".join(" <-> ".join(c) for c in STRUCTURE.circles())


def test_little_lies_loose() -> None:
    assert len(STRUCTURE.loose()) <= 6, STRUCTURE.loose()


def test_rooms_say_what_they_are_for() -> None:
    packages = [m for m, f in SOURCES.items() if f.name == "__init__.py"]
    assert len(packages) > 20
    silent = [m for m in packages if len(ast.get_docstring(TREES[m]) or "") < 100]
    assert not silent, silent


@pytest.mark.parametrize(
    ("source", "circles", "against"), [("", 0, 0), ("from autopar.cost import model", 0, 1), ("def f():\n    import autopar.graph.b", 1, 0)]
)
def test_the_checker_sees(tmp_path: Path, source: str, circles: int, against: int) -> None:
    for name, text in {"graph/a.py": source, "graph/b.py": "from autopar.graph.a import x", "cost/model.py": ""}.items():
        (tmp_path / "autopar" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "autopar" / name).write_text(text)
    s = Structure(tmp_path)
    assert (len(s.circles()), len(s.against_the_order())) == (circles, against)


def test_passes_do_not_import_the_solver() -> None:
    modules = [m for m in SOURCES if within(m, "autopar.passes")]
    assert modules
    bad = [f"{m}:{line} imports {p}" for m in modules for p, line in IMPORTS[m] if within(p, "autopar.solver")]
    assert not bad, "\n".join(bad)


def test_one_room_has_the_private_torch_apis() -> None:
    mine = [m for m in SOURCES if within(m, PRIVATE_APIS)]
    assert any(is_private(p) for m in mine for p, _ in torch_paths(TREES[m])), "the checker sees nothing, or the exemption is idle"
    bad = {
        f"{SOURCES[m].relative_to(ROOT)}:{line}: {p}"
        for m in SOURCES
        if m not in mine
        for p, line in torch_paths(TREES[m])
        if is_private(p)
    }
    assert not bad, "\n".join(sorted(bad))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch._dynamo",
        "import torch._inductor.config as c",
        "from torch import _dynamo",
        "from torch._functorch import aot_autograd",
        "from torch.distributed.tensor._ops import utils",
        "def f():\n    from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch\ntorch._dynamo.reset()",
        "import torch as t\nt.distributed._functional_collectives.all_reduce(1)",
        "import torch.distributed\ntorch.distributed._symmetric_memory",
        "from torch import distributed as dist\ndist._get_default_group()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "import torch\nd = torch.distributed\nd._private",
        "import torch\ngetattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "import torch\nx = [torch._foreach_add(a, b) for a in c]",
    ],
)
def test_checker_catches(snippet: str) -> None:
    assert any(is_private(p) for p, _ in torch_paths(ast.parse(snippet)))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch\ntorch.ops._c10d_functional.wait_tensor(x)",
        "import torch\nc10d = torch.ops._c10d_functional\nc10d.all_reduce(x)",
        "import torch\nprint(torch.__version__)",
        "from autopar import _torch\n_torch.export_joint()",
        "from autopar._torch import new_fake_mode",
        "self._dynamo = torchvision._x",
    ],
)
def test_checker_lets_pass(snippet: str) -> None:
    assert not any(is_private(p) for p, _ in torch_paths(ast.parse(snippet)))


@pytest.mark.parametrize(
    ("snippet", "module", "is_package", "expected"),
    [
        ("from . import solve", "autopar.solver.model", False, "autopar.solver.solve"),
        ("from .solver import solve", "autopar", True, "autopar.solver.solve"),
        ("from ..solver.model import build", "autopar.passes.shard", False, "autopar.solver.model.build"),
        ("if TYPE_CHECKING:\n    import torch.nn as nn", "autopar.plan", False, "torch.nn"),
        ("def f():\n    import torch", "autopar.solver", True, "torch"),
    ],
)
def test_checker_resolves(snippet: str, module: str, is_package: bool, expected: str) -> None:
    assert [p for p, _ in imports(ast.parse(snippet), module, is_package)] == [expected]
