"""Prices of hand layouts: `pieces.py` takes a micro-batch apart, `step.py` puts a run together of it. Add what a framework does in `runtime.py`."""

from autopar.predict.api import predict
from autopar.predict.prediction import Prediction
from autopar.predict.runtime import RUNTIMES, Runtime

__all__ = ["RUNTIMES", "Prediction", "Runtime", "predict"]
