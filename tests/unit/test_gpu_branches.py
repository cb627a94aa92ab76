"""Every file that does something else on a GPU is either run by `make gpu-check`, by a test that there is, or listed as not run."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import ROOT
from tests.gpu.branches import EXERCISED, NOT_EXERCISED, branching


def test_every_branch_is_listed_once() -> None:
    found = branching()
    assert found == {*EXERCISED, *NOT_EXERCISED}
    assert not EXERCISED.keys() & NOT_EXERCISED.keys()


@pytest.mark.parametrize("test", sorted(set(EXERCISED.values())))
def test_what_runs_them_exists(test: str) -> None:
    path, _, function = test.partition("::")
    if not function:
        assert list((ROOT / path).glob("test_*.py"))
        return
    tree = ast.parse((ROOT / path).read_text())
    assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
