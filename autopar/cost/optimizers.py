"""What optimizers keep and move. **Add an optimizer here.**"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from autopar.errors import OptimizerError

HALF = 2.0  # bytes


@dataclass(frozen=True)
class Kind:
    """What one step of an optimizer needs, per element of a parameter.

    moments: tensors of state as wide as the parameter; state_bytes: of state besides; temporaries: elements, as wide as the parameter, that
    live at once during the step (measured on torch 2.13: tests/unit/test_optimizers.py); traffic_bytes: to and from memory, where
    parameters are 4 bytes wide and are written a second time in half precision.
    """

    moments: float
    temporaries: float
    traffic_bytes: float
    state_bytes: float = 0.0

    def traffic_of(self, width: float) -> float:
        """Bytes to and from memory, where parameters are `width` bytes wide: those in half precision are not written a second time."""
        return width / 4 * (self.traffic_bytes - (HALF if width < 4 else 0.0))


# 8-bit moments come with a 4-byte scale for every 256 of them (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.2).
_EIGHT_BITS = 2 * (1 + 4 / 256)
# Where a name leaves open which of torch's implementations runs, memory is that of foreach and traffic that of one fused pass over
# gradient, parameter and moments. Foreach AdamW goes through memory once for every formula of its step.
KINDS = {
    "sgd": Kind(0, 1.0, 14.0),  # a temporary for weight decay
    "sgd-momentum": Kind(1, 1.0, 22.0),
    "sgd-fused": Kind(0, 0.0, 14.0),
    "sgd-momentum-fused": Kind(1, 0.0, 22.0),
    "rmsprop": Kind(1, 1.0, 22.0),
    "adagrad": Kind(1, 2.0, 22.0),
    "adagrad-fused": Kind(1, 0.0, 22.0),
    "lion": Kind(1, 1.0, 22.0),
    "adam": Kind(2, 1.0, 30.0),
    "adam-foreach": Kind(2, 1.0, 80.0),
    "adam-fused": Kind(2, 0.0, 30.0),
    "adam8bit": Kind(0, 0.0, 18.0, _EIGHT_BITS),
    "adamw": Kind(2, 1.0, 30.0),
    "adamw-foreach": Kind(2, 1.0, 80.0),
    "adamw-fused": Kind(2, 0.0, 30.0),
    "adamw8bit": Kind(0, 0.0, 18.0, _EIGHT_BITS),
    "nadam": Kind(2, 1.0, 30.0),
    "radam": Kind(2, 1.0, 30.0),
    "adamax": Kind(2, 1.0, 30.0),
}
UNKNOWN = Kind(0, 1.0, 30.0, 8.0)  # a class that is not listed counts as Adam in single precision


def known(name: str) -> str:
    """`name` as KINDS has it. Raises OptimizerError, with what may have been meant."""
    if name.lower() in KINDS:
        return name.lower()
    close = difflib.get_close_matches(name.lower(), KINDS, n=1)
    meant = f"did you mean {close[0]}? Else " if close else ""
    raise OptimizerError(f"unknown optimizer {name!r}", fix=f"{meant}use one of {', '.join(KINDS)}, or the class itself (in compile)")


def kind_of(optimizer: str | type) -> Kind:
    """A name of KINDS, or the class of an optimizer."""
    if isinstance(optimizer, str):
        return KINDS[known(optimizer)]
    return KINDS.get(optimizer.__name__.lower(), UNKNOWN)
