"""autopar: one line that makes an ordinary PyTorch training program run fast on many GPUs.

model = autopar.compile(model, mesh)
"""

from autopar import checkpoint
from autopar.api import compile
from autopar.build import Precision
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.offline import plan
from autopar.plan import Plan
from autopar.runtime import ParallelModule

__all__ = ["AutoparError", "Cluster", "Layout", "ParallelModule", "Plan", "Precision", "checkpoint", "compile", "plan"]
