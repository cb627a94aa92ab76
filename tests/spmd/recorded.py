"""Calls to check rules on, recorded from what people write: a function of `torch.nn.functional` runs forward and backward, and each
aten call it makes is a sample."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar import rules
from autopar.passes import local
from tests.spmd.ops import MismatchError, Report, aten_calls, check

Recorded = tuple[Any, tuple[Any, ...], dict[str, Any]]
_G = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    """A float64 leaf that wants a gradient."""
    return torch.randn(shape, dtype=torch.float64, generator=_G).requires_grad_()


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_G)


def registered(registry: dict[str, Any], *files: str) -> set[str]:
    """The targets that `files` (last part of the module name) put into a registry of rules or lowerings."""
    rules.targets()
    local.lookup("")
    return {t for t, fn in registry.items() if fn.__module__.rsplit(".", 1)[1] in files}


def record(targets: set[str], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Recorded]:
    """The calls of `targets` in forward and backward."""
    found = [c for c in aten_calls(fn, args, kwargs, backward=True) if str(c[0]) in targets]
    assert found
    return found


def check_all(calls: Iterable[Recorded]) -> dict[str, list[Report]]:
    """Every strategy of every call; none may fall back, and every way of passing a Partial through must have been tried."""
    reports: dict[str, list[Report]] = {}
    for op, args, kwargs in calls:
        report = check(op, args, kwargs)
        assert not report.rule.is_fallback, op
        assert report.partials == set(report.rule.linear), op
        reports.setdefault(str(op), []).append(report)
    return reports


def fails(calls: Iterable[Recorded], target: str) -> bool:
    """Whether some call of `target` does not give what one device does.

    In a process of its own: an op robbed of its lowering may write past its tensors (the gradient of nll_loss2d does not check its
    labels), and a crash is a failure too. It is given two minutes, for a heap that was written over may also hang.
    """
    child = multiprocessing.get_context("fork").Process(target=_check_all_or_exit, args=(calls, target))
    child.start()
    child.join(120)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode != _OTHER_ERROR, "the check itself failed: see the traceback above"
    return child.exitcode != 0


_OTHER_ERROR = 3


def _check_all_or_exit(calls: Iterable[Recorded], target: str) -> None:
    code = 0
    try:
        for op, args, kwargs in calls:
            if str(op) == target:
                check(op, args, kwargs)
    except MismatchError:
        code = 1
    except Exception:
        traceback.print_exc()
        code = _OTHER_ERROR
    os._exit(code)
