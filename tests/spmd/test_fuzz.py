"""Random programs under random settings equal eager on one device (`tests/fuzz`). A failing one is made small by

python -m tests.fuzz --seed SEED --programs 1
"""

from __future__ import annotations

import random

import pytest

from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.loops import draw as draw_loop
from tests.fuzz.loops import is_failure, one_process
from tests.fuzz.settings import Wanted, draw
from tests.wide import cases

FIRST, PROGRAMS, CHUNKS = 20_000, 300, 12
WIDE = 120
WITHOUT = frozenset({"mutated_inputs"})


def run(seeds: range, wanted: Wanted, longest: int) -> None:
    compared, unfit = 0, 0
    for seed in seeds:
        program, _ = generate(seed, WITHOUT, longest)
        found = check(program.source, draw(random.Random(seed), wanted))
        assert found.failure is None, f"seed {seed}, {found.setting}\n{program.source}\n{found.failure}"
        compared += found.equal > 0
        unfit += bool(found.unfit)
    # A generator of programs that nothing can be compared of would find nothing.
    assert compared >= 0.8 * len(seeds), f"{compared} of {len(seeds)} programs compared, {unfit} unfit"


@pytest.mark.parametrize("chunk", cases(range(CHUNKS), range(4)))
def test_programs(chunk: int) -> None:
    n = PROGRAMS // CHUNKS
    run(range(FIRST + chunk * n, FIRST + (chunk + 1) * n), Wanted(planned=0.0, ranks=int(chunk % 4 == 0)), 4)


@pytest.mark.wide
@pytest.mark.parametrize("chunk", range(8))
def test_many_programs(chunk: int) -> None:
    n = WIDE // 8
    run(range(100_000 + chunk * n, 100_000 + (chunk + 1) * n), Wanted(planned=0.1, inductor=0.02, ranks=2), 14)


def loops(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        what, actions = draw_loop(seed)
        said = one_process(what, actions)
        assert not is_failure(said), f"loop {seed}: {what}\n{actions}\n{said}"
        compared += not said
    assert compared >= 0.7 * len(seeds), f"{compared} of {len(seeds)} loops compared"


@pytest.mark.parametrize("chunk", cases(range(3), [0]))
def test_loops(chunk: int) -> None:
    loops(range(20_000 + 4 * chunk, 20_000 + 4 * (chunk + 1)))


@pytest.mark.wide
@pytest.mark.parametrize("chunk", range(4))
def test_many_loops(chunk: int) -> None:
    loops(range(30_000 + 10 * chunk, 30_000 + 10 * (chunk + 1)))
