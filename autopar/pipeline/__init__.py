"""What a pipeline takes: `schedule.py` says who does what in which order, `times.py` what that takes, `replay.py` when all is done, `spans.py` when each action runs, `once.py` what is done once a step beside them, `held.py` what is held,
`actions.py` is a schedule written out, which `autopar.runtime` runs, `named.py` makes one by its name, `filling.py` one for given times; `closed.py` what can be said without a replay, `assign.py` which layers lie where. No torch, nothing of the rest of autopar but its errors."""

from autopar.pipeline.actions import Action, Lists, load, parse, verified
from autopar.pipeline.assign import deal, explicit, stage_times
from autopar.pipeline.closed import bubble_fraction, in_flight, lower_bound_s, step_time_s
from autopar.pipeline.filling import filled
from autopar.pipeline.held import peak_by_chunk, peak_held
from autopar.pipeline.named import scheduled
from autopar.pipeline.once import beyond, waits_s
from autopar.pipeline.replay import Replay, replay
from autopar.pipeline.schedule import Schedule, Work
from autopar.pipeline.spans import Span, spans
from autopar.pipeline.times import Times

__all__ = [
    "Action", "Lists", "Replay", "Schedule", "Span", "Times", "Work", "beyond", "bubble_fraction", "deal", "explicit", "filled", "in_flight", "load", "lower_bound_s", "parse", "peak_by_chunk", "peak_held",
    "replay", "scheduled", "spans", "stage_times", "step_time_s", "verified", "waits_s",
]  # fmt: skip
