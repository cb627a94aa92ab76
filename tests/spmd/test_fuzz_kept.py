"""Programs that the fuzzer found wrong once (`tests/fuzz/kept`), under the settings they were found in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import keeping
from tests.fuzz.check import check
from tests.fuzz.loops import Action, one_process


@pytest.mark.parametrize("path", sorted(keeping.KEPT.glob("*.py")), ids=lambda p: p.stem)
def test_equals_eager(path: Path) -> None:
    source, settings = keeping.read(path)
    found = check(source, settings)
    assert not found.unfit, found.unfit
    assert found.failure is None, f"{found.setting}\n{found.failure}"
    assert not found.refused, found.refused


LOOPS: list[tuple[dict[str, str], list[Action]]] = [
    # Evaluated in inference mode before it trains: what was made then is used later, too.
    (
        {"model": "tied", "optimizer": "sgd", "scheduler": "", "layout": "ddp"},
        [("no_grad", 8, 614, False, 3), ("accumulate", 8, 615, True, 3)],
    ),
]


@pytest.mark.parametrize(("what", "actions"), LOOPS, ids=lambda x: x["model"] if isinstance(x, dict) else "")
def test_loop(what: dict[str, str], actions: list[Action]) -> None:
    said = one_process(what, actions)
    assert not said, said
