"""How often to write a checkpoint that training waits for, when failures come one after the other at random (a Poisson process) every M seconds.

A segment is t seconds of work and a write of d seconds. It is done when no failure comes in its t + d seconds, else begun again after a restart of R seconds, in which failures
come too. A try ends well with p = exp(-(t + d) / M), so there are 1 / p - 1 bad ones, each followed by a restart; of a stretch of w seconds without a failure in it the expected time
is M (exp(w / M) - 1), all tries and what was lost in them together. A segment so takes, restarts of M (exp(R / M) - 1) included,

    (exp((t + d) / M) - 1) M  +  (exp((t + d) / M) - 1) M (exp(R / M) - 1)  =  M exp(R / M) (exp((t + d) / M) - 1)

which is Daly's complete model (2006). Per second of work it is least where its derivative by t is zero, whatever R is:

    (1 - t / M) exp(t / M) = exp(-d / M)

with one root in (0, M): Lambert's function, 1 + W(-exp(-1 - d / M)). Young's sqrt(2 d M) is its first order, Daly's formula a higher one.
"""

from __future__ import annotations

import math


def young_s(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (9), 1974."""
    return math.sqrt(2 * write_s * mtbf_s)


def daly_s(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (3), 2006."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(write_s / (2 * mtbf_s))
    return math.sqrt(2 * write_s * mtbf_s) * (1 + x / 3 + x * x / 9) - write_s


def best_s(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that cost the least by the model above: the root, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        # As logarithms: for short intervals both sides are next to 1.
        low, high = (middle, high) if math.log1p(-middle) + middle > -write_s / mtbf_s else (low, middle)
    return low * mtbf_s


def expected_s(interval_s: float, write_s: float, mtbf_s: float, restart_s: float) -> float:
    """Seconds that a second of work takes; inf where that is more than numbers hold."""
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s) / interval_s
    except OverflowError:
        return math.inf


def best_steps(step_s: float, write_s: float, mtbf_s: float) -> int:
    """Steps between checkpoints: the better of the whole numbers beside `best_s`."""
    less = max(1, math.floor(best_s(write_s, mtbf_s) / step_s))
    return min((less, less + 1), key=lambda n: expected_s(n * step_s, write_s, mtbf_s, 0.0))
