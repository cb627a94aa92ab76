"""Random programs under random settings equal eager on one device (`tests/fuzz`). A failing one is made small by

python -m tests.fuzz --seed SEED --programs 1
"""

from __future__ import annotations

import random

import pytest

from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.settings import Wanted, draw

FIRST, PROGRAMS, CHUNKS = 20_000, 300, 12
WIDE = 3000


def run(seeds: range, wanted: Wanted) -> None:
    compared, unfit = 0, 0
    for seed in seeds:
        program, _ = generate(seed)
        found = check(program.source, draw(random.Random(seed), wanted))
        assert found.failure is None, f"seed {seed}, {found.setting}\n{program.source}\n{found.failure}"
        compared += found.equal > 0
        unfit += bool(found.unfit)
    # A generator of programs that nothing can be compared of would find nothing.
    assert compared >= 0.8 * len(seeds), f"{compared} of {len(seeds)} programs compared, {unfit} unfit"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs(chunk: int) -> None:
    n = PROGRAMS // CHUNKS
    run(range(FIRST + chunk * n, FIRST + (chunk + 1) * n), Wanted(planned=0.0, ranks=chunk % 2))


@pytest.mark.wide
@pytest.mark.parametrize("chunk", range(30))
def test_many_programs(chunk: int) -> None:
    n = WIDE // 30
    run(range(100_000 + chunk * n, 100_000 + (chunk + 1) * n), Wanted(planned=0.1, inductor=0.05, ranks=2))
