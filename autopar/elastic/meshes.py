"""The mesh that so many ranks are laid out on: the first one's axes, for another number.

The first axis that is no pipeline's takes what is lost or won. The others keep their sizes where these divide the ranks that there are; else each takes a divisor of its own, so that no rank idles
and what was divided by the size still is: of {"dp": 4, "tp": 2} seven ranks are {"dp": 7, "tp": 1}, and six {"dp": 3, "tp": 2}.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from autopar.planner.axes import PIPELINE


def ranks_of(place: int, largest: int, ranks: int) -> range:
    """What the rank of the process at `place` of `largest` may be where `ranks` of them are there, itself among them: ranks have the order of places."""
    return range(max(0, place - (largest - ranks)), min(place, ranks - 1) + 1)


def axes_for(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Sizes of the axes of `ranks` ranks. Of those that fill them, the other axes' sizes that have the largest product; of equals the last axes keep theirs."""
    first = next((a for a in axes if a != PIPELINE), PIPELINE)
    others = [a for a in axes if a != first]
    divisors = [[d for d in range(1, axes[a] + 1) if axes[a] % d == 0] for a in others]
    filling = [sizes for sizes in itertools.product(*divisors) if ranks % math.prod(sizes) == 0]
    best = max(filling, key=lambda sizes: (math.prod(sizes), tuple(reversed(sizes))))
    found = {first: ranks // math.prod(best), **dict(zip(others, best, strict=True))}
    return {a: found[a] for a in axes}
