"""Activations that wait for backward somewhere else than on the device: in host memory or in a file. The runtime of it; what goes where
is the plan's.

`open_store` makes the place, the ops of `ops` (registered on import) move tensors there and back, `close_store` ends it.
"""

from autopar.offload import ops
from autopar.offload.errors import OffloadError
from autopar.offload.medium import Counters
from autopar.offload.registry import close_store, find_store, next_number, numbered, open_store
from autopar.offload.store import OffloadSettings, Store

__all__ = [
    "Counters",
    "OffloadError",
    "OffloadSettings",
    "Store",
    "close_store",
    "find_store",
    "next_number",
    "numbered",
    "open_store",
    "ops",
]
