"""Imported once by a server that forks processes for tests which start many: what takes seconds to import is there already in each."""

from __future__ import annotations

import gc

import torch
import transformers
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from autopar import _torch, api

torch.set_num_threads(1)
_torch.import_compiler()
gc.freeze()  # what was imported stays, and is shared with all that are forked
gc.set_threshold(50_000, 20, 100)

__all__ = ["DTensor", "api", "checkpoint", "transformers"]
