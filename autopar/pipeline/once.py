"""What is done once a step beside a pipeline's work: parameters gathered for a rank's first forwards, gradients reduced behind its last backwards."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.replay import Replay


def beyond(seconds: float, windows: Sequence[float]) -> float:
    """What does not fit of traffic that comes in equal parts, one for every window."""
    n = max(1, len(windows))
    return max(0.0, *(seconds * (n - k) / n - w for k, w in enumerate(sorted(windows or (0.0,), reverse=True))))


def waits_s(
    ran: Replay,
    backward_s: Sequence[Sequence[float]],
    gathered_s: Sequence[float],
    reduced_s: Sequence[float],
    contended_s: Sequence[float],
) -> float:
    """What the step takes longer than its replay. backward_s: by rank, of each of its stages; gathered_s, reduced_s: by rank. Gathers run until a stage's first forward ends,
    reductions from its last backward on until the end of the step. contended_s: what compute beside them loses, by rank: no less is waited for."""
    waits = [0.0]
    for r, (gathered, reduced, lost) in enumerate(zip(gathered_s, reduced_s, contended_s, strict=True)):
        after = [ran.total_s - end + s for end, s in zip(ran.last_backward_s[r], backward_s[r], strict=True)]
        waits.append(max(lost, beyond(gathered, ran.first_forward_s[r]) + beyond(reduced, after)))
    return max(waits)
