"""The structure of the package, read off its syntax trees: which rooms there are, who imports whom.

    python -m tests.structure [folder of a checkout]

prints how many files lie loose in `autopar/`, imports against the order of the rooms, and circles of files. A room imports itself and what stands before it in `ROOMS`.
Imports inside of functions count as well: a late import hides a circle, it does not break it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"autopar": "autopar", "autopar.solver": "solver", "autopar.passes": "passes", "autopar.kernels": "kernels"}
# From what everything stands on to what stands on everything. `hardware.calibrate` runs steps, so it comes late.
ROOMS = (
    "errors", "text", "graph", "tensors", "_torch", "kernels", "rules", "hardware", "cost", "timeline", "pipeline", "plan", "solver", "capture", "models", "planner", "offload", "passes", "simulate",
    "distributed", "checkpoint", "runtime", "elastic", "watch", "predict", "search", "elastic.plans", "api", "integrations", "hardware.calibrate", "report", "cli", "run", "__main__",
)  # fmt: skip


def within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def sources(root: Path = ROOT) -> dict[str, Path]:
    """module name -> file, of everything that is shipped."""
    out: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for f in sorted((root / folder).rglob("*.py")):
            parts = f.relative_to(root / folder).with_suffix("").parts
            out[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = f
    return out


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every dotted path that `tree` imports, with its line: import statements anywhere, and import_module("literal")."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                yield a.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for a in node.names:
                yield (base if a.name == "*" else f"{base}.{a.name}"), node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if called in ("import_module", "__import__"):
                yield node.args[0].value, node.lineno


class Structure:
    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.sources = root, sources(root)
        self.trees = {m: ast.parse(f.read_text(), str(f)) for m, f in self.sources.items()}
        self.imports = {m: list(imports(self.trees[m], m, f.name == "__init__.py")) for m, f in self.sources.items()}

    def module_of(self, path: str) -> str | None:
        """The module of ours that importing `path` runs; the package's own `__init__` is no dependency of its parts."""
        while path and path not in self.sources:
            path = path.rpartition(".")[0]
        return path if path not in ("", "autopar") else None

    def edges(self, module: str) -> dict[str, int]:
        """Modules of ours that `module` imports, each with a line. A package that a module lies in is no dependency of it."""
        out: dict[str, int] = {}
        for path, line in self.imports[module]:
            ours = self.module_of(path)
            if ours is not None and ours != module and not within(module, ours):
                out.setdefault(ours, line)
        return out

    def loose(self) -> list[str]:
        return sorted(f.name for f in (self.root / "autopar").glob("*.py"))

    def against_the_order(self) -> list[str]:
        found = []
        for m in self.sources:
            if m == "autopar":
                continue  # it names what is public, and imports none of it until it is asked for
            mine = room(m)
            if mine is None:
                found.append(f"{m} lies in no room")
            for other, line in self.edges(m).items():
                theirs = room(other)
                if mine is not None and theirs is not None and ROOMS.index(theirs) > ROOMS.index(mine):
                    found.append(f"{m}:{line} imports {other}")
        return found

    def circles(self) -> list[list[str]]:
        """Sets of modules each of which imports all others, by way of others (Tarjan)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(m: str) -> None:
            index[m] = low[m] = len(index)
            stack.append(m)
            for other in self.edges(m):
                if other not in index:
                    visit(other)
                    low[m] = min(low[m], low[other])
                elif other in stack:
                    low[m] = min(low[m], index[other])
            if low[m] == index[m]:
                at = stack.index(m)
                if len(stack) - at > 1:
                    found.append(sorted(stack[at:]))
                del stack[at:]

        for m in self.sources:
            if m != "autopar" and m not in index:
                visit(m)
        return found


def room(module: str) -> str | None:
    """The longest of `ROOMS` that `module` lies in."""
    return max((r for r in ROOMS if within(module, f"autopar.{r}")), key=len, default=None)


def main() -> None:
    s = Structure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    against, circles = s.against_the_order(), s.circles()
    print(
        f"files that lie loose in autopar/: {len(s.loose())}\nimports against the order of the rooms: {len(against)}\ncircles: {len(circles)}"
    )
    for line in [*against, *(" <-> ".join(c) for c in circles)]:
        print(f"    {line}")


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
