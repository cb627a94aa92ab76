"""What was measured, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.hardware.calibrate.steps import Stepped
from autopar.hardware.calibrate.timing import Sample


@dataclass(frozen=True)
class Measured:
    """samples: of one process, or of all together. device: as its driver calls it; memory_bytes: of a device; host_bytes: of a node; threads: that compute
    in one process; processes: of a node; contention: see `wires`; seconds: that it took; steps: see `steps`."""

    samples: tuple[Sample, ...]
    device_type: str
    device: str
    memory_bytes: float
    host_bytes: float
    threads: int
    processes: int
    nodes: int
    contention: tuple[float, ...]
    seconds: float
    steps: tuple[Stepped, ...] = ()
