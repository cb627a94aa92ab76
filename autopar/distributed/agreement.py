"""What the ranks of a mesh do together before a step exists: they compare what each has, and one decides for all.

Nobody waits for a rank that has given up: what goes wrong on one rank is raised on every one, and ranks that differ are refused on every one.
All here are collectives over objects, with the process group's own timeout; a rank that dies makes them fail.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError

T = TypeVar("T")
Facts = Mapping[str, str]  # what must be equal on all ranks: name for people -> text, one line an item
SHOWN = 160  # characters of a line that differs
FIX = "start every rank with the same code, model, arguments and batch shapes; what may differ by rank is only the data"


class DisagreementError(AutoparError):
    """Ranks were given different models, calls or arguments."""


def agreed(groups: Groups, work: Callable[[], tuple[T, Facts]]) -> T:
    """What `work` returns here, if it returns on all ranks, and with the same facts. Collective.

    Raises this rank's own error, or else the error of the first rank that has one, or DisagreementError.
    """
    own: Exception | None = None
    try:
        result, facts = work()
    except Exception as e:
        own, facts = e, {}
    if groups.talks:
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()}
        everyone = _gather(groups, _packed(own) if own is not None else digests)
        if own is None:
            _raise_first_failure(groups, everyone)
            _refuse_differences(groups, everyone, facts)
    if own is not None:
        raise own
    return result


def from_first(groups: Groups, work: Callable[[], str]) -> str:
    """What `work` returns on the mesh's first rank, on all ranks; what it raises there, Ctrl-C included, is raised on all. Collective."""
    if not groups.talks:
        return work()
    first = groups.ranks[0]
    if groups.rank == 0:
        try:
            text = work()
        except BaseException as e:
            dist.broadcast_object_list([_packed(e)], src=first, group=groups.everyone)
            raise
        dist.broadcast_object_list([text], src=first, group=groups.everyone)
        return text
    said: list[Any] = [None]
    dist.broadcast_object_list(said, src=first, group=groups.everyone)
    if isinstance(said[0], _Failed):
        raise said[0].error(first)
    return str(said[0])


def highest(groups: Groups, mine: int) -> int:
    """The highest of what the ranks pass. Collective."""
    return mine if not groups.talks else max(_gather(groups, mine))


def all_gathered(groups: Groups, mine: T) -> list[T]:
    """What each rank passes, in order. Collective."""
    return [mine] if not groups.talks else _gather(groups, mine)


def all_same(groups: Groups, numbers: Sequence[int]) -> list[bool]:
    """Of each of the numbers (below 2^63), whether all ranks pass the same. One all-reduce of a few bytes: on the host where the process group has a backend for it,
    as torch's default has, else the device is waited for. Collective."""
    if not groups.talks:
        return [True] * len(numbers)
    everyone = groups.everyone
    device = "cpu" if _torch.has_host(everyone) else groups.device_mesh.device_type
    highest = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=everyone)
    most = highest.tolist()
    return [high == -low for high, low in zip(most[: len(numbers)], most[len(numbers) :], strict=True)]


# ---- errors that travel ------------------------------------------------------------------------------------------


class _Failed:
    """An exception as another rank can raise it. pickled: its class, arguments and attributes, None where they cannot travel."""

    def __init__(self, text: str, pickled: bytes | None) -> None:
        self.text, self.pickled = text, pickled

    def error(self, rank: int) -> BaseException:
        try:
            kind, args, state = pickle.loads(self.pickled or b"")
            e: BaseException = kind.__new__(kind, *args)
            e.args = args
            e.__dict__.update(state)
        except Exception:  # a class that this rank does not have
            e = AutoparError(f"rank {rank} failed: {self.text}", fix="see its traceback")
        e.add_note(f"(raised on rank {rank}, and so on every rank)")
        return e


def _packed(e: BaseException) -> _Failed:
    text = f"{type(e).__name__}: {e}"[:2000]
    try:
        # Ours are rebuilt from what they carry, since their constructors take other arguments than `args`; so are Python's own.
        ours = isinstance(e, AutoparError) or type(e).__module__ == "builtins"
        return _Failed(text, pickle.dumps((type(e), e.args, _plain(e.__dict__))) if ours else None)
    except Exception:
        return _Failed(text, None)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if isinstance(v, (str, int, float)) and not k.startswith("__")}


def _raise_first_failure(groups: Groups, everyone: list[Any]) -> None:
    for rank, theirs in zip(groups.ranks, everyone, strict=True):
        if isinstance(theirs, _Failed):
            raise theirs.error(rank)


# ---- differences -------------------------------------------------------------------------------------------------


def _gather(groups: Groups, mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * len(groups.ranks)
    dist.all_gather_object(everyone, mine, group=groups.everyone)
    return everyone


def _refuse_differences(groups: Groups, everyone: list[dict[str, str]], facts: Facts) -> None:
    """All ranks see the same digests, so all get to the second gather or none."""
    for name in facts:
        digests = [theirs.get(name, "") for theirs in everyone]
        usual = Counter(digests).most_common(1)[0][0]  # the first rank's among equals
        odd = [r for r, d in zip(groups.ranks, digests, strict=True) if d != usual]
        if odd:
            texts = dict(zip(groups.ranks, _gather(groups, facts[name]), strict=True))
            normal = next(r for r, d in zip(groups.ranks, digests, strict=True) if d == usual)
            who = f"rank {odd[0]} disagrees" if len(odd) == 1 else f"ranks {', '.join(map(str, odd[:8]))} disagree"
            raise DisagreementError(
                f"{who} with rank {normal} about {name}",
                where=difference({r: texts[r] for r in (normal, odd[0])}),
                fix=FIX,
            )


def difference(texts: Mapping[int, str] | Mapping[str, str]) -> str:
    """The first line in which the texts of two ranks, or of two that are named, differ."""
    (a, mine), (b, theirs) = texts.items()
    left, right = mine.splitlines(), theirs.splitlines()
    n = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    said = {r: _shown(lines[n]) if n < len(lines) else "nothing more" for r, lines in ((a, left), (b, right))}
    one, other = (f"rank {x}" if isinstance(x, int) else x for x in (a, b))
    return f"{one} has {said[a]}, {other} has {said[b]}"


def _shown(line: str) -> str:
    return repr(line if len(line) <= SHOWN else line[: SHOWN - 3] + "...")
