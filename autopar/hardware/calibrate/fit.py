"""Least squares: curves through samples, straight lines, the share of a product's memory traffic that is not hidden. With uncertainties.

A curve's knots are the amounts that were measured; its unknowns are the seconds at them, and a sample lies on the line between the two next to it:

    t = (1 - u) y_i + u y_{i+1},   u = (x - x_i) / (x_{i+1} - x_i)

solved for y by least squares of relative residuals, (t - a y) / (a y), small times counting like large ones; then made to rise (pool adjacent
violators). Residuals beyond HUBER standard deviations count by their size and not by its square (Huber 1964): windows that something else
interrupted do not carry the fit. The uncertainty of y is that of least squares, s^2 (A^T W A)^-1 with s^2 the weighted mean of squared residuals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.hardware.calibrate.timing import Sample

HUBER = 1.345
SAME = 1.3  # amounts as close as this share a knot
PRODUCTS_APART = 4.0  # products have fewer knots than shapes: what differs at one knot is the traffic
LEAST_S = 1e-9
WEIGHINGS = 10


@dataclass(frozen=True)
class Fitted:
    """A constant, and one standard deviation as a share of it."""

    value: float
    relative_sd: float


@dataclass(frozen=True)
class Points:
    """A curve: see `hardware.Curve`."""

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    relative_sd: tuple[float, ...]


def curve(amounts: Sequence[float], seconds: Sequence[float], apart: float = SAME) -> Points:
    """apart: amounts closer than this share a knot."""
    x, t = np.asarray(amounts, float), np.maximum(np.asarray(seconds, float), LEAST_S)
    knots = _knots(x, apart)
    a = _hats(x, knots)
    found, sd = _solved(a, t)
    rising = _isotonic(np.maximum(found, LEAST_S), a.sum(0))
    return Points(tuple(map(float, knots)), tuple(map(float, rising)), tuple(map(float, sd)))


def _solved(a: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y of t = a y, and a standard deviation of each as a share of it."""
    says, weight = t, np.ones_like(t)
    for _ in range(WEIGHINGS):  # relative at first to what was measured, which favours short times, then to what was fitted
        root = np.sqrt(weight) / says
        found, *_ = np.linalg.lstsq(a * root[:, None], t * root, rcond=None)
        says = np.maximum(a @ found, LEAST_S)
        residual = t / says - 1
        scale = max(1.4826 * float(np.median(np.abs(residual))), 1e-12)  # of a normal distribution its standard deviation
        weight = HUBER * scale / np.maximum(np.abs(residual), HUBER * scale)
    squares = float(weight @ residual**2) / max(len(t) - a.shape[1], 1)
    relative = a * found / says[:, None]
    return found, np.sqrt(squares * np.diag(np.linalg.pinv((relative.T * weight) @ relative)))


def _knots(x: np.ndarray, apart: float) -> np.ndarray:
    groups: list[list[float]] = []
    for v in sorted(x):
        if groups and v < groups[-1][0] * apart:
            groups[-1].append(v)
        else:
            groups.append([v])
    return np.array([float(np.mean(g)) for g in groups])


def _hats(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Rows of weights of the knots at each x."""
    return np.stack([np.interp(x, knots, row) for row in np.eye(len(knots))], axis=1)


def _isotonic(y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The nearest rising sequence: neighbours that fall are replaced by their mean."""
    blocks: list[list[float]] = []  # mean, weight, length
    for v, w in zip(y, weight, strict=True):
        blocks.append([float(v), float(w), 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (m, w1, n), (k, w2, o) = blocks[-2:]
            blocks[-2:] = [[(m * w1 + k * w2) / (w1 + w2), w1 + w2, n + o]]
    return np.concatenate([np.full(int(n), m) for m, _, n in blocks])


def line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[Fitted, Fitted]:
    """(latency, amount per second) of seconds = latency + amount / rate, small and large times counting alike."""
    x, t = np.asarray(amounts, float), np.asarray(seconds, float)
    a = np.stack([np.ones_like(x), x], axis=1)
    found, sd = _solved(a, t)
    if found[0] <= 0 or found[1] <= 0:  # no latency can be seen
        found, sd = (np.concatenate([[0.0], v]) for v in _solved(a[:, 1:], t))
    return Fitted(float(found[0]), float(sd[0])), Fitted(float(1 / found[1]), float(sd[1]))


def mean(values: Sequence[float]) -> Fitted:
    """The geometric one."""
    logs = np.log(np.asarray(values, float))
    return Fitted(float(np.exp(logs.mean())), float(logs.std(ddof=1) / math.sqrt(len(logs))) if len(logs) > 1 else 0.0)


def products(samples: Sequence[Sample], traffic: Callable[[float], float]) -> tuple[dict[str, Points], Fitted]:
    """seconds = curve(FLOPs) of its dtype + rho traffic(bytes): the curves, and the rho whose curves leave the least squares.

    traffic: seconds of cheap ops that move as much, less the least they take."""
    steps = np.linspace(0.0, 1.0, 21)
    errors = []
    for rho in steps:
        error = 0.0
        for same in _by_dtype(samples).values():
            p = curve([s.amount for s in same], _rest(same, traffic, float(rho)), PRODUCTS_APART)
            says = np.interp([s.amount for s in same], p.amounts, p.seconds)
            says = says + rho * np.array([traffic(s.nbytes) for s in same])
            error += float(np.sum(np.log(says / np.array([s.seconds for s in same])) ** 2))
        errors.append(error)
    best = int(np.argmin(errors))
    rho = float(steps[best])
    # One standard deviation is where the squares have grown by a sample's share.
    near = steps[np.asarray(errors) <= errors[best] * (1 + 1 / max(len(samples) - 1, 1))]
    sd = max(float(near.max() - near.min()) / 2, float(steps[1]) / 2)
    curves = {d: curve([s.amount for s in same], _rest(same, traffic, rho), PRODUCTS_APART) for d, same in _by_dtype(samples).items()}
    return curves, Fitted(rho, sd / max(rho, float(steps[1])))


def _rest(samples: Sequence[Sample], traffic: Callable[[float], float], rho: float) -> list[float]:
    """What is left to arithmetic; a tenth, where that would be less than nothing."""
    return [max(s.seconds - rho * traffic(s.nbytes), 0.1 * s.seconds) for s in samples]


def _by_dtype(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    out: dict[str, list[Sample]] = defaultdict(list)
    for s in samples:
        out[s.dtype].append(s)
    return out
