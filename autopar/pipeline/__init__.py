"""What a pipeline takes: `schedule.py` says who does what in which order, `times.py` what that takes, `replay.py` when all is done, `held.py` what is held,
`closed.py` what can be said without a replay, `assign.py` which layers lie where. No torch, nothing of the rest of autopar but its errors."""

from autopar.pipeline.assign import deal, explicit, stage_times
from autopar.pipeline.closed import bubble_fraction, in_flight, lower_bound_s, step_time_s
from autopar.pipeline.held import peak_by_chunk, peak_held
from autopar.pipeline.replay import Replay, replay
from autopar.pipeline.schedule import Schedule, Work
from autopar.pipeline.times import Times

__all__ = [
    "Replay", "Schedule", "Times", "Work", "bubble_fraction", "deal", "explicit", "in_flight", "lower_bound_s", "peak_by_chunk", "peak_held", "replay",
    "stage_times", "step_time_s",
]  # fmt: skip
