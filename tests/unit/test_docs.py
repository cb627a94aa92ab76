"""What README and docs/ say can be followed: links lead somewhere, code compiles and names what exists, commands parse, files are there, errors are those of the code."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from autopar.cli.main import app
from benchmarks import page as benchmarks_page
from tests.documents import ROOT, Page, page, pages

FOLDERS = ("autopar", "solver", "passes", "kernels", "tests", "benchmarks", "examples", "docs")
EACH_PAGE = pytest.mark.parametrize("page_", pages(), ids=lambda p: p.name)


# ---- links -------------------------------------------------------------------------------------------------------


@EACH_PAGE
def test_links_lead_to_pages_and_headings(page_: Page) -> None:
    for target in page_.links():
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page_.path.parent / path).resolve() if path else page_.path
        assert file.exists(), f"{page_.name}: {target} leads nowhere"
        if anchor:
            assert anchor in Page.of(file).anchors(), f"{page_.name}: {target}: there is no such heading"


def test_every_page_is_in_the_site_and_found_from_the_readme() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for p in pages():
        if p.name != "README.md":
            assert re.search(rf": {re.escape(p.path.name)}$", site, re.M), f"{p.name} is not in mkdocs.yml"
    linked = {t.partition("#")[0] for t in page("README.md").links()}
    assert {p.name for p in pages()} - linked == {"README.md", "docs/index.md"}


@EACH_PAGE
def test_named_files_exist(page_: Page) -> None:
    for span in page_.spans():
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page_.name} names {span}"


# ---- code --------------------------------------------------------------------------------------------------------


def reached(path: str) -> Any:
    """What a dotted path names. Raises AttributeError or ImportError."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for i, name in enumerate(rest, 1):
        try:
            found = getattr(found, name)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise
            found = importlib.import_module(".".join([first, *rest[:i]]))
    return found


def dotted(node: ast.AST) -> str:
    """ "a.b.c" of names and attributes; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def uses(tree: ast.AST) -> Iterator[tuple[str, ast.Call | None]]:
    """Every path below autopar that code names, with the call of it, if it is called."""
    ours: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "autopar":
                    ours[a.asname or "autopar"] = a.name if a.asname else "autopar"
                    yield a.name, None
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autopar":
            for a in node.names:
                ours[a.asname or a.name] = f"{node.module}.{a.name}"
                yield f"{node.module}.{a.name}", None
    ours.setdefault("autopar", "autopar")
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, _, rest = dotted(node).partition(".")
            if first in ours:
                yield ".".join(x for x in (ours[first], rest) if x), calls.get(id(node))


def wrong_keywords(path: str, call: ast.Call) -> set[str]:
    """Keywords of a call that what is called does not take."""
    parameters = inspect.signature(reached(path)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return set()
    return {k.arg for k in call.keywords if k.arg} - set(parameters)


@EACH_PAGE
def test_python_blocks_compile_and_name_what_exists(page_: Page) -> None:
    for block in page_.python():
        where = f"{page_.name}:{block.line}"
        tree = ast.parse(block.text, where)
        compile(tree, where, "exec")
        for path, call in uses(tree):
            try:
                reached(path)
            except (AttributeError, ImportError) as e:
                raise AssertionError(f"{where} names {path}: {e}") from None
            if call is not None:
                assert not (odd := wrong_keywords(path, call)), f"{where}: {path} takes no {', '.join(sorted(odd))}"


@EACH_PAGE
def test_named_parts_of_autopar_exist(page_: Page) -> None:
    for span in page_.spans():
        if (found := re.match(r"autopar(\.[A-Za-z_]\w*)+", span)) and not span.endswith(".json"):
            reached(found[0])


def test_a_wrong_name_and_a_wrong_keyword_are_seen() -> None:
    tree = ast.parse("import autopar\nautopar.compile(model, mesh, layuot='fsdp')")
    path, call = next((p, c) for p, c in uses(tree) if c is not None)
    assert path == "autopar.compile" and call is not None and wrong_keywords(path, call) == {"layuot"}
    with pytest.raises((AttributeError, ImportError)):
        reached("autopar.compil")


# ---- commands ----------------------------------------------------------------------------------------------------


WRONG = (SystemExit, typer.BadParameter.__base__)  # argparse's, and any wrong use of a typer command


class Parsed(BaseException):
    """A command's arguments are read: it need not run. No Exception, so that no command catches it."""


def parse_autopar(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    context = group.make_context("autopar", list(words), resilient_parsing=True)
    name, command, rest = group.resolve_command(context, list(words))
    if hasattr(command, "resolve_command"):  # a group of its own
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
        name, command, rest = command.resolve_command(context, list(rest))
    command.make_context(name, rest, parent=context)


def parse_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python runs, `-m` a module or a script, by its own parser."""
    module = words[0] == "-m"
    name, *arguments = words[module:]
    if module and name == "autopar":
        return parse_autopar(arguments)
    assert importlib.util.find_spec(name) if module else (ROOT / name).exists(), f"there is no {name}"
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        real(self, arguments if args is None else args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        if module:
            runpy.run_module(name, run_name="__main__")
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")


def parse_torchrun(words: list[str]) -> None:
    script = get_args_parser().parse_args(words).training_script
    assert script == "train.py" or (ROOT / script).exists(), (
        f"there is no {script}"
    )  # train.py is the README's script, run by tests/dist/test_readme.py


def parse_pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"^\.\[([\w,]+)\]$|^autopar\[([\w,]+)\]$", "\n".join(words), re.M):
        assert set("".join(extras).split(",")) <= set(known), f"there is no extra {extras}"


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command.replace("[", "").replace("]", "") if command.startswith("python") else command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        variable = words.pop(0).partition("=")[0]
        assert not variable.startswith("AUTOPAR_") or variable in variables(), f"nothing reads {variable}"
    match words[0]:
        case "autopar":
            parse_autopar(words[1:])
        case "python":
            parse_python(words[1:], monkeypatch)
        case "torchrun":
            parse_torchrun(words[1:])
        case "pip":
            parse_pip(words[2:])
        case "make":
            assert re.search(rf"^{words[1]}\b.*:", (ROOT / "Makefile").read_text(), re.M), f"make has no {words[1]}"
        case other:
            raise AssertionError(f"{other} is no command that pages use")


@pytest.mark.parametrize(("page_", "command"), [(p, c) for p in pages() for c in p.commands()], ids=lambda x: getattr(x, "name", x)[:60])
def test_commands_parse(page_: Page, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        parse(command, monkeypatch)
    except WRONG as e:
        raise AssertionError(f"{page_.name}: {command}: {e}") from None


@EACH_PAGE
def test_named_commands_exist(page_: Page) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for span in page_.spans():
        if (found := re.match(r"autopar ([a-z]+)(?= |$)", span)) and not any(span in s for s in said()) and ": " not in span:
            assert found[1] in known, f"{page_.name} names {span}"


def test_a_wrong_option_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (
        "autopar plan gpt2 --clutser h100:8 --batch 8 --seq 8",
        "python -m benchmarks.page --figure",
        "torchrun --nprocs 2 train.py",
    ):
        with pytest.raises(WRONG), monkeypatch.context() as m:
            parse(command, m)


# ---- what pages quote ------------------------------------------------------------------------------------------


@functools.cache
def said() -> tuple[str, ...]:
    """Every text constant of the package, also the pieces of formatted ones."""
    files = [f for folder in ("autopar", "passes", "solver", "kernels") for f in (ROOT / folder).rglob("*.py")]
    nodes = (n for f in files for n in ast.walk(ast.parse(f.read_text())))
    return tuple({n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)})


@functools.cache
def variables() -> frozenset[str]:
    """Environment variables that the package names outside of its docstrings."""
    return frozenset(s for s in said() if re.fullmatch(r"AUTOPAR_[A-Z]+", s))


def test_errors_are_those_of_the_code() -> None:
    cells = re.findall(r"^\| (`[^|]+`) \|", page("docs/errors.md").prose, re.M)
    assert len(cells) > 30
    for cell in cells:
        for quoted in re.findall(r"`([^`]+)`", cell):
            assert any(quoted in s for s in said()), f"no error says {quoted!r}"


@EACH_PAGE
def test_environment_variables_are_read(page_: Page) -> None:
    named = {v for b in [*page_.spans(), *(b.text for b in page_.blocks)] for v in re.findall(r"AUTOPAR_[A-Z]+", b)}
    assert named <= variables()


def test_a_tensor_goes_through_each_room_once() -> None:
    path = page("docs/architecture.md").prose.split("## The path of one tensor")[1].split("\n## ")[0]
    rooms = re.findall(r"^\d+\. `([\w/]+)/`:", path, re.M)
    assert len(rooms) >= 10 and len(set(rooms)) == len(rooms)
    assert all((ROOT / r / "__init__.py").exists() for r in rooms)
    assert rooms[0] == "autopar/capture" and rooms[-1] == "autopar/runtime"


def test_every_room_is_described() -> None:
    table = page("docs/architecture.md").prose.split("## The rooms")[1].split("\n## ")[0]
    have = {f.parent.relative_to(ROOT).as_posix() for f in (ROOT / "autopar").glob("*/__init__.py")} | {"solver", "passes", "kernels"}
    assert {s.rstrip("/") for s in re.findall(r"`([\w/]+/)`", table)} >= have


# ---- sizes, and the generated page -------------------------------------------------------------------------------


def test_readme_and_glossary_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert len((ROOT / "docs" / "glossary.md").read_text().splitlines()) <= 40


def test_benchmarks_page_is_what_the_results_say() -> None:
    assert benchmarks_page.PAGE.read_text() == benchmarks_page.page(benchmarks_page.read()), "run python -m benchmarks.page"


def test_benchmarks_page_follows_a_result() -> None:
    results = benchmarks_page.read()
    results["planning"]["rows"][0]["command_s"] += 1000
    assert benchmarks_page.page(results) != benchmarks_page.PAGE.read_text()


def test_every_result_is_on_the_page() -> None:
    text = benchmarks_page.PAGE.read_text()
    assert not [p.name for p in Path(benchmarks_page.RESULTS).glob("*.json") if p.name not in text]


@pytest.mark.parametrize("page_", [p for p in pages() if p.name != "docs/benchmarks.md"], ids=lambda p: p.name)
def test_lines_are_at_most_160_wide(page_: Page) -> None:
    """But for rows of tables, which cannot be broken, and the generated page."""
    for line in page_.prose.splitlines():
        assert len(line) <= 160 or line.startswith("|"), f"{page_.name}: {line[:60]}..."
