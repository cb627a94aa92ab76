"""What routed experts get, beside what the plan assumes of it: a rank whose experts get clearly more rows than memory was counted for says so, once.

Of a forward the worst layer is named, also where it fails: memory may have run out because of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import fx

from autopar.kernels.exchanging import BODIES
from autopar.kernels.expert_load import heard
from autopar.rules.experts import FORWARD

GROUP = BODIES[FORWARD][1]  # among the operator's arguments; "" where nothing is exchanged
SLACK = 0.25  # of an even load: any run is so uneven, and a plan leaves a device that much


def layers_of(gm: fx.GraphModule, modules: Mapping[str, str]) -> tuple[str, ...]:
    """The modules of routed experts that exchange rows, in the order of a forward graph. modules: of operators, by name."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == FORWARD and n.args[GROUP]]
    return tuple(modules.get(n.meta.get("op", ""), "") or n.name for n in nodes)


class ExpertLoad:
    """Of one model, on one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.is_told = False

    @contextmanager
    def watched(self, layers: Sequence[str], imbalance: float) -> Iterator[None]:
        """A forward. layers: of it; imbalance: that the plan assumes."""
        if self.is_told or not layers:
            yield
            return
        loads: list[float] = []
        try:
            with heard(lambda received, even: loads.append(received / max(even, 1))):
                yield
        finally:
            load, layer = max(zip(loads, layers, strict=False), key=lambda found: found[0], default=(0.0, ""))
            if load > imbalance + SLACK:
                self.is_told = True
                enough = math.ceil(load * 10) / 10
                warnings.warn(
                    f"routed experts of {layer} got {load:.2f} times the rows of an even load on rank {self.rank}, "
                    f"and memory was counted for {imbalance:g} times as many; plan with imbalance={enough:g} for such a load. Others that follow are not told",
                    stacklevel=2,
                )
