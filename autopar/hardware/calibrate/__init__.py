"""A cluster file of the machine at hand, from a few measurements: `autopar calibrate`.

    world.py      N processes on this machine, one device each; or the processes that torchrun started, on all nodes
    timing.py     seconds of a call, in windows that all processes fill at once: they share cores, memory and links as in training
    work.py       products, attention, memory-bound ops, the optimizer
    wires.py      collectives by kind, size and group; what they take from compute that runs beside them
    copies.py     to host memory and to files
    steps.py      whole steps of a small model, beside the calls that they are made of
    fit.py        least squares, with the uncertainty of every constant
    result.py     what was fitted as a Cluster, with its sources and uncertainties, and as text

Measured in under three minutes. The part for GPUs (NCCL, pinned copies) has been written but not run: no GPU was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from autopar.hardware.calibrate.measure import measure, together
from autopar.hardware.calibrate.measured import Measured
from autopar.hardware.calibrate.result import Calibration, calibration
from autopar.hardware.calibrate.world import joined, spawned

__all__ = ["Calibration", "Measured", "calibrate"]

SECONDS = 120.0


def calibrate(processes: int | None = None, seconds: float = SECONDS, progress: Callable[[str], None] | None = None) -> Calibration | None:
    """Measures this machine with `processes` processes (default: a GPU each, on a CPU a core each).

    Under torchrun its processes measure instead, on all nodes, and all but the first return None. seconds: what measurements may take in all; the
    largest sizes are left out where they would take longer.
    """
    on_progress = progress or (lambda line: None)
    found = (
        joined(measure, seconds, on_progress)
        if "RANK" in os.environ and processes is None
        else spawned(measure, processes, seconds, on_progress)
    )
    return None if found is None else calibration(together(found))
