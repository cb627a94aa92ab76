"""Programs that the fuzzer found wrong once (`tests/fuzz/kept`), under the settings they were found in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import kept
from tests.fuzz.check import check


@pytest.mark.parametrize("path", sorted(kept.KEPT.glob("*.py")), ids=lambda p: p.stem)
def test_equals_eager(path: Path) -> None:
    source, settings = kept.read(path)
    found = check(source, settings)
    assert not found.unfit, found.unfit
    assert found.failure is None, f"{found.setting}\n{found.failure}"
    assert not found.refused, found.refused
