"""The operators that exchange rows inside: by op its body, which takes the same arguments, and at which of them its group stands."""

from __future__ import annotations

from collections.abc import Callable

from autopar.kernels import experts, ring
from autopar.kernels.exchange import Body

BODIES: dict[str, tuple[Callable[..., Body], int]] = {
    "autopar.experts_v1.default": (experts.forward_body, 10),
    "autopar.experts_backward_v1.default": (experts.backward_body, 11),
    "autopar.ring_attention_v2.default": (ring.forward_body, 13),
    "autopar.ring_attention_backward_v2.default": (ring.backward_body, 16),
}
