"""The loop of an elastic run: steps that are done again when a process is lost, by those that are left.

    session = autopar.elastic.Session(model, optimizer, scheduler)
    for batch in session.batches(loader):
        with session.step() as number:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

A step that a loss interrupts is left, and the loop gets its batch again, on a new group, with the state as it was before that step. docs/elastic.md has the rule.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autopar import _torch
from autopar.distributed.failures import is_of_others
from autopar.elastic import words
from autopar.elastic.ahead import Ahead
from autopar.elastic.attach import Attached, attached_to
from autopar.elastic.copies import Copies, Holdings
from autopar.elastic.member import StoppedError, SupersededError
from autopar.elastic.recover import Moved, recover
from autopar.elastic.remesh import rejoin
from autopar.elastic.state import Alike, State, Stateful
from autopar.errors import AutoparError, LostRankError
from autopar.runtime.module import ParallelModule
from autopar.text.log import log

T = TypeVar("T")
EXPLAINED_S = 1.0  # so long an error that may come of a loss waits for the supervisor to say so


@dataclass(frozen=True)
class Recovery:
    """One loss. ranks: that were left; version: steps that counted as done; seconds of its parts; moved: of the state. ahead: the steps were there, nothing is compiled."""

    generation: int
    ranks: int
    version: int
    regroup_s: float
    move_s: float
    moved: Moved
    ahead: bool


class Session:
    """Training of a model that was compiled with `elastic=`. others: what counts along and has a state_dict, such as a scheduler or a scaler.

    version: steps done; recoveries: what was survived so far. One optimizer step belongs to one `step()`. Raises AutoparError where the optimizer has state that cannot be
    moved, and, when more is lost than can be survived, on every survivor."""

    def __init__(self, model: ParallelModule, optimizer: Optimizer, *others: Stateful) -> None:
        attached: Attached = attached_to(model)
        self.model, self.optimizer = model, optimizer
        self.options, self.member = attached.options, attached.member
        self.state = State(model, optimizer, others)
        self.timeout_s = _torch.default_timeout("cpu").total_seconds()
        self.backend = str(dist.get_backend())
        self.ahead: Ahead = attached.ahead
        self.version, self.recoveries = 0, list[Recovery]()
        self.published = 0  # the newest version that there are copies of, or will be
        self.is_split = self.state.is_split()
        self.holdings = Holdings()
        self.copies = None if self.member is None else self._new_copies()
        self.alike: dict[int, Alike] = {}
        self.is_live = True  # the tensors on the device are those of `version`, not half a step further
        self.in_step, self.committed = False, False
        self.numbers: dict[int, torch.Tensor] = {}  # torch's own random state where a step began
        optimizer.register_step_pre_hook(self._before_optimizer)
        if self.member is not None:
            self._guarded(self._publish)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """What `loader` gives, each as often as it takes: a batch whose step is to be done again comes again. Every rank's loader gives the same whole batches.

        The loop's body is `with session.step():`, around all of a step. At the end, all ranks have the same version, or have lost nobody since."""
        source, kept, first = iter(loader), dict[int, T](), self.version
        while True:
            if self.version not in kept:
                try:
                    kept[self.version] = next(source)
                except StopIteration:
                    if self._finished():
                        return
                    continue
            for old in [v for v in kept if v < self._oldest()]:
                del kept[old]
            before = self.version, len(self.recoveries)
            yield kept[self.version]
            if (self.version, len(self.recoveries)) == before:
                raise AutoparError(
                    f"the loop went on without a step, at step {self.version - first}", where="autopar.elastic.Session.batches",
                    fix="put what a batch is for into `with session.step():`",
                )  # fmt: skip

    @contextlib.contextmanager
    def step(self) -> Iterator[int]:
        """Around all of one step: calls, backward, the optimizer. Gives the number of steps done before. What a loss makes fail is not raised: the step is done again."""
        assert not self.in_step, "a step within a step"
        number = self.version
        if number in self.numbers:  # done again
            torch.set_rng_state(self.numbers[number])
        else:
            self.numbers = {v: s for v, s in self.numbers.items() if v >= self._oldest()} | {number: torch.get_rng_state()}
        self.in_step, self.committed = True, False
        try:
            try:
                yield number
            finally:
                self.in_step = False
            if not self.committed:  # no optimizer step, as a scaler that found no finite gradients has none
                self._commit()
            self.version += 1
            self.is_live = True
            if self.member is not None:
                if not self.is_split or self.version - self.published >= self.options.every:
                    self._publish()
                self.ahead.make()
        except Exception as e:
            if not self._is_of_a_loss(e):
                raise
            log.info("step %d: %s", number, str(e).splitlines()[0] if str(e) else type(e).__name__)
            self._recover()

    def _before_optimizer(self, *_: object) -> None:
        if not self.in_step or self.committed:
            raise AutoparError(
                "optimizer.step() " + ("a second time in one step" if self.in_step else "outside of a step"),
                where="autopar.elastic.Session", fix="put each optimizer step, with its calls and backwards, into one `with session.step():`",
            )  # fmt: skip
        self._commit()

    # ---- versions ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The commit of `version`, where it is one that is copied: after it, all copies of it are whole, everywhere."""
        if self.copies is not None and self.is_split and self.version == self.published:
            self.copies.wait()
            self.copies.meet()
        self.committed, self.is_live = True, False

    def _publish(self) -> None:
        """The state as it is now becomes `version`: kept here, and on its way to the partner."""
        copies = self.copies
        assert copies is not None
        before, self.published = self.published, self.version
        self.alike = {v: a for v, a in self.alike.items() if v < self.version and (v >= before or before >= self.version)}
        self.alike[self.version] = self.state.alike()
        if self.is_split:
            packed = self.state.pack(copies.rank, copies.ranks, copies.place_for(before))
            copies.begin(self.version, packed, before)
        else:
            self.state.tensors()  # what could not be moved is said now, not at a loss

    def _oldest(self) -> int:
        """The oldest version that a loss may go back to: the last but one that was copied, as the last one's copies may not be whole."""
        return min(self.alike, default=self.version)

    def _finished(self) -> bool:
        """The last version is whole everywhere, and all ranks know; False where it had to be recovered first."""
        if self.member is None:
            return True
        before = len(self.recoveries)
        if self.is_split and self.version > self.published:
            self._guarded(self._publish)
        self._guarded(self._commit)
        self.is_live = True
        if len(self.recoveries) > before:
            return False
        if self.member.finish():
            return True
        self._recover()
        return False

    def _guarded(self, do: Any) -> None:
        try:
            do()
        except Exception as e:
            if not self._is_of_a_loss(e):
                raise
            self._recover()

    def _new_copies(self) -> Copies:
        groups = self.model._builder.groups
        timeout = _torch.default_timeout("cpu")
        group = _torch.new_group(groups.ranks, f"{groups.id}.copies", timeout, "gloo") if len(groups.ranks) > 1 else None
        assert self.member is not None
        return Copies(group, self.member.generation, groups.rank, len(groups.ranks), self.holdings, self.member.stride)

    # ---- after a loss --------------------------------------------------------------------------------------------

    def _is_of_a_loss(self, e: Exception) -> bool:
        """Whether others are to blame: by what the error is, or because the supervisor begins a new generation just then."""
        if self.member is None or isinstance(e, StoppedError):
            return False
        if isinstance(e, (LostRankError, SupersededError)) or is_of_others(e):
            return True
        return isinstance(e, (AutoparError, RuntimeError)) and self.member.moves_on(EXPLAINED_S)

    def _recover(self) -> None:
        """Goes on with those that are left, at the newest version that they have whole. Another loss meanwhile begins it anew."""
        assert self.member is not None
        while True:  # every round is a new generation; the supervisor ends a run in which nobody gets further
            self.member.abort()
            try:
                self._once()
                return
            except Exception as e:
                if not self._is_of_a_loss(e):
                    raise
                log.info("another loss while recovering: %s", str(e).splitlines()[0] if str(e) else type(e).__name__)

    def _once(self) -> None:
        member = self.member
        assert member is not None
        begun = time.monotonic()
        member.next()
        if self.copies is not None:
            self.copies.salvage()
        rank, ranks = member.rank, len(member.members)
        try:
            _torch.join_group(
                self.backend, member.store, f"autopar.generation.{member.generation}", rank, ranks, self.options.regroup_s, self.timeout_s
            )
        except RuntimeError as e:
            raise SupersededError(f"generation {member.generation} did not come about: {e}") from e
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
        rejoin(self.model, ranks)
        ahead = self.ahead.take()
        self.copies = self._new_copies()
        regrouped = time.monotonic()
        was_split, self.is_split = self.is_split or bool(self.holdings.own), self.state.is_split()
        moved = recover(self, was_split)
        self.committed = False
        self._publish()
        self.copies.wait()
        self.copies.meet()
        # Now the copies of the new layout are whole everywhere, and what is of older ones may go.
        for held in (self.holdings.own, self.holdings.wards):
            for shard in [s for s in held if s.generation != member.generation]:
                del held[shard]
        member.store.add(words.whole(member.generation), 1)
        self.recoveries.append(
            Recovery(member.generation, ranks, self.version, regrouped - begun, time.monotonic() - regrouped, moved, ahead)
        )
        if rank == 0:
            r = self.recoveries[-1]
            made = "its step was made ahead" if ahead else "no step was made ahead for so many: the next one is captured and compiled"
            print(
                f"autopar: {ranks} processes go on from step {r.version}: group {r.regroup_s:.2f} s, state {r.move_s:.2f} s, {moved.bytes:,} bytes moved; {made}",
                flush=True,
            )
