"""What a captured program may draw random numbers with."""

from __future__ import annotations

from torch import fx

from autopar import _torch
from autopar.errors import CaptureError
from autopar.rules import targets


def refuse_unknown_random(gm: fx.GraphModule) -> None:
    """A random op without a rule would draw from torch's own generator: ranks would silently differ."""
    for n in gm.graph.nodes:
        if _torch.draws_random(n) and str(n.target) not in targets():
            raise CaptureError(
                f"{n.target} draws random numbers, and autopar has no counter-based form of it",
                where=_torch.line_of(n),
                fix="draw the numbers outside the model and pass them in, or use rand, randn, randint, bernoulli or dropout",
            )
