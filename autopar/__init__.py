"""autopar: one line that makes an ordinary PyTorch training program run fast on many GPUs.

model = autopar.compile(model, mesh)

What is not used is not imported: looking at a plan, or asking the command line for help, needs no torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import checkpoint, elastic
    from autopar.api import compile
    from autopar.capture.tags import must_recompute, must_save
    from autopar.elastic.options import Elastic
    from autopar.errors import AutoparError
    from autopar.hardware.cluster import Cluster
    from autopar.integrations.callback import monitor_callback
    from autopar.integrations.fabric import strategy
    from autopar.integrations.pretrained import from_pretrained
    from autopar.integrations.trainer import trainer
    from autopar.plan.plan import Plan
    from autopar.planner.layout import Layout
    from autopar.planner.offline import explain
    from autopar.planner.offload import Offload
    from autopar.planner.precision import Precision
    from autopar.predict import Prediction, predict
    from autopar.runtime.module import ParallelModule
    from autopar.search import search
    from autopar.search.everywhere import plan
    from autopar.watch.monitor import monitor

__all__ = [
    "AutoparError", "Cluster", "Elastic", "Layout", "Offload", "ParallelModule", "Plan", "Precision", "Prediction", "checkpoint", "compile", "elastic", "explain", "from_pretrained", "monitor", "monitor_callback", "must_recompute",
    "must_save", "plan", "predict", "search", "strategy", "trainer",
]  # fmt: skip

_WHERE = {
    "AutoparError": "errors", "Cluster": "hardware.cluster", "Elastic": "elastic.options", "Layout": "planner.layout", "Offload": "planner.offload", "ParallelModule": "runtime.module",
    "Plan": "plan.plan", "Precision": "planner.precision", "Prediction": "predict", "compile": "api", "explain": "planner.offline",
    "must_recompute": "capture.tags", "must_save": "capture.tags", "plan": "search.everywhere", "predict": "predict", "search": "search",
    "from_pretrained": "integrations.pretrained", "monitor": "watch.monitor", "monitor_callback": "integrations.callback", "strategy": "integrations.fabric", "trainer": "integrations.trainer",
}  # fmt: skip


class _Package(types.ModuleType):
    """`autopar.plan`, `autopar.explain`, `autopar.predict` and `autopar.search` are functions, also after the modules of these names were imported."""

    plan = property(lambda self: self.__getattr__("plan"), lambda self, module: None)
    explain = property(lambda self: self.__getattr__("explain"), lambda self, module: None)
    predict = property(lambda self: self.__getattr__("predict"), lambda self, module: None)
    search = property(lambda self: self.__getattr__("search"), lambda self, module: None)

    def __getattr__(self, name: str) -> Any:
        if name in _WHERE:
            return getattr(importlib.import_module(f"{self.__name__}.{_WHERE[name]}"), name)
        if name in ("checkpoint", "elastic"):
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
