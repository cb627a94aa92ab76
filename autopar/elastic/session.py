"""The loop of an elastic run: steps that are done again when a process is lost, by those that are left.

    session = autopar.elastic.Session(model, optimizer, scheduler)
    for batch in session.batches(loader):
        with session.step() as number:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

A step that a loss interrupts is left, and the loop gets its batch again, on a new group, with the state as it was before that step. Between two steps processes may join, which have gone through the
same loop to there (`autopar.elastic.newcomer`). docs/elastic.md has the rule.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autopar import _torch
from autopar.distributed.agreement import DisagreementError
from autopar.distributed.failures import is_of_others
from autopar.distributed.groups import be_alone
from autopar.elastic import words
from autopar.elastic.ahead import Ahead
from autopar.elastic.attach import Attached, attached_to
from autopar.elastic.boxes import Spec, offsets
from autopar.elastic.copies import Copies, Holdings
from autopar.elastic.member import StoppedError, SupersededError
from autopar.elastic.newcomer import PAUSE_S, Newcomer, timeout_of_groups_s
from autopar.elastic.program import FIX, digest_of, of_model, of_session, of_steps
from autopar.elastic.recover import Moved, Random, recover
from autopar.elastic.remesh import remesh
from autopar.elastic.room import Need, refuse_full
from autopar.elastic.state import Alike, State, Stateful
from autopar.errors import AutoparError, InputError, LostRankError
from autopar.plan.schema import dumps
from autopar.runtime.module import ParallelModule
from autopar.runtime.optimizers import move_state
from autopar.text.log import log

T = TypeVar("T")
EXPLAINED_S = 1.0  # so long an error that may come of a loss waits for the supervisor to say so


@dataclass(frozen=True)
class Recovery:
    """One loss, or processes that joined. ranks: that there are then; version: steps that counted as done; seconds of its parts; moved: of the state. ahead: the steps were there,
    nothing is compiled. joined: ranks that came new."""

    generation: int
    ranks: int
    version: int
    regroup_s: float
    move_s: float
    moved: Moved
    ahead: bool
    joined: int = 0


class Session:
    """Training of a model that was compiled with `elastic=`. others: what counts along and has a state_dict, such as a scheduler or a scaler.

    version: steps done; recoveries: what was survived so far. One optimizer step belongs to one `step()`. Raises AutoparError where the optimizer has state that cannot be
    moved, and, when more is lost than can be survived, on every survivor."""

    def __init__(self, model: ParallelModule, optimizer: Optimizer, *others: Stateful) -> None:
        attached: Attached = attached_to(model)
        self.model, self.optimizer = model, optimizer
        self.options, self.member = attached.options, attached.member
        self.state = State(model, optimizer, others)
        self.newcomer = attached.newcomer  # until it is let in
        if self.newcomer is None:
            self.backend, self.timeout_s = str(dist.get_backend()), timeout_of_groups_s()
        else:
            self.backend, self.timeout_s = self.newcomer.backend, self.newcomer.timeout_s
            self.newcomer.compare("session", of_session(model, optimizer, self.state.others))
        self.ahead: Ahead = attached.ahead
        self.version, self.recoveries = 0, list[Recovery]()
        self.published = 0  # the newest version that there are copies of, or will be
        self.is_split, self.is_settled = self.state.is_split(), False
        self.has_room: tuple[int, int] | None = None  # for copies: of this generation, of so many tensors
        self.holdings = Holdings()
        self.copies = None if self.member is None or self.newcomer is not None else self._new_copies()
        self.alike: dict[int, Alike] = {}
        self.is_live = self.newcomer is None  # the tensors on the device are those of `version`, not half a step further
        self.in_step, self.committed = False, False
        self.numbers: dict[int, torch.Tensor] = {}  # torch's own random state where a step began
        self.given: Random | None = None  # the same, of another rank
        self.passes: list[tuple[int, bool]] = []  # through the data: steps done before each, and whether it went to the loader's end
        self.lets_in = False  # all ranks know that somebody is to be let in after this step
        self.on_trial, self.is_new = False, False  # somebody joined, or this process did, and no step has been done since
        self.told_steps: set[str] = set()
        optimizer.register_step_pre_hook(self._before_optimizer)
        if self.member is not None and self.newcomer is None:
            if self.member.grows and self.member.rank == 0:
                self.member.says(words.program("session"), of_session(model, optimizer, self.state.others))
            self._guarded(self._publish)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """What `loader` gives, each as often as it takes: a batch whose step is to be done again comes again. Every rank's loader gives the same whole batches.

        The loop's body is `with session.step():`, around all of a step. At the end, all ranks have the same version, or have lost nobody since."""
        source, kept = iter(loader), dict[int, T]()
        if self.newcomer is not None:
            is_in = yield from self._as_a_newcomer(source, kept)
            if not is_in:
                return
        else:
            self._pass([*self.passes, (self.version, False)])
            if self.member is not None and len(self.passes) > 1:
                self.member.goes_on(len(self.passes) - 1)
        first = self.passes[-1][0]
        while True:
            if self.version not in kept:
                try:
                    kept[self.version] = next(source)
                except StopIteration:
                    if self._finished():
                        self._pass([*self.passes[:-1], (first, True)])
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
        if self.newcomer is not None:
            with self._rehearsed(self.newcomer):
                yield -1
            return
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
                self.on_trial, self.is_new, self.member.version = False, False, self.version
                self._settle()
                if not self.is_split or self.lets_in or self.version - self.published >= self.options.every:
                    self._publish()
                self.ahead.make()
                self._tell_steps()
                if self.lets_in:
                    self._let_in()
        except Exception as e:
            if not self._is_of_a_loss(e):
                raise
            log.info("step %d: %s", number, str(e).splitlines()[0] if str(e) else type(e).__name__)
            self._recover()

    def _before_optimizer(self, *_: object) -> None:
        if self.newcomer is not None and self.in_step:
            return
        if not self.in_step or self.committed:
            raise AutoparError(
                "optimizer.step() " + ("a second time in one step" if self.in_step else "outside of a step"),
                where="autopar.elastic.Session", fix="put each optimizer step, with its calls and backwards, into one `with session.step():`",
            )  # fmt: skip
        move_state(self.optimizer, self.model._stages)  # to where a plan that was made since has its parameters
        self._commit()

    # ---- versions ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The commit of `version`, where it is one that is copied: after it, all copies of it are whole, everywhere. Where processes may join, ranks agree in it whether they let somebody in."""
        is_copied = self.is_split and self.version == self.published
        if self.copies is not None and self.member is not None and (is_copied or self.member.grows):
            if is_copied:
                self.copies.wait()
            asks = self.in_step and self.member.grows and self.member.asked_in(len(self.passes) - 1)
            self.lets_in = self.copies.meet(asks)
        self.committed, self.is_live = True, False

    def _publish(self) -> None:
        """The state as it is now becomes `version`: kept here, and on its way to the partner."""
        copies = self.copies
        assert copies is not None
        before, self.published = self.published, self.version
        self.alike = {v: a for v, a in self.alike.items() if v < self.version and (v >= before or before >= self.version)}
        self.alike[self.version] = self.state.alike()
        if self.is_split:
            specs = self.state.specs()
            self._refuse_full(copies, specs)
            packed = self.state.pack(specs, copies.rank, self.state.sizes, copies.place_for(before))
            copies.begin(self.version, packed, before)
        else:
            self.state.tensors()  # what could not be moved is said now, not at a loss

    def _refuse_full(self, copies: Copies, specs: tuple[Spec, ...]) -> None:
        """Before the first copies of a generation, and before the first that have the optimizer's state."""
        if (now := (copies.generation, len(specs))) != self.has_room:
            self.has_room = now
            mine, wards = (offsets(specs, r, self.state.sizes)[1] for r in (copies.rank, copies.of))
            refuse_full(copies.gathered(Need.of(mine, wards if copies.ranks > 1 else 0, self.holdings.bytes())))

    def _settle(self) -> None:
        """Once there is a plan that replicates all, nothing is copied from then on: every rank that has done this step has the version it makes. Until all have, the copies stay."""
        if self.is_settled or self.copies is None or not self.model._builder.planned:
            return
        self.is_settled = True
        if self.is_split and not self.state.is_split():
            self.is_split = False
            self._publish()
            self.copies.meet()
            self.holdings.own.clear()
            self.holdings.wards.clear()

    def _oldest(self) -> int:
        """The oldest version that a loss may go back to: the last but one that was copied, as the last one's copies may not be whole."""
        return min(self.alike, default=self.version)

    def _finished(self) -> bool:
        """The last version is whole everywhere, and all ranks know; False where it had to be recovered first."""
        if self.member is None or self.member.has_passed(len(self.passes)):
            return True
        before = len(self.recoveries)
        if self.is_split and self.version > self.published:
            self._guarded(self._publish)
        self._guarded(self._commit)
        self.is_live = True
        if len(self.recoveries) > before:
            return False
        if self.member.finish(len(self.passes)):
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

    # ---- somebody joins ------------------------------------------------------------------------------------------

    def _pass(self, passes: list[tuple[int, bool]]) -> None:
        self.passes = passes
        if self.member is not None and self.member.grows:
            self.member.says(words.PASSES, passes)

    def _tell_steps(self) -> None:
        """What the steps compute, and how they are planned, for those that would join."""
        assert self.member is not None
        if self.member.grows and self.member.rank == 0 and (new := set(of_steps(self.model)) - self.told_steps):
            store, key = self.member.store, words.program("steps")
            before: list[str] = self.member.asks(lambda: words.read(store, key) or [], [])
            self.member.says(key, [*before, *sorted(new - set(before))])
            self.told_steps |= new
            if self.ahead.plans:
                self.member.says(words.program("plans"), {n: dumps(plan) for n, plan in self.ahead.plans.items()})

    def _let_in(self) -> None:
        """Waits for all members to be here, and goes on with those that join."""
        assert self.member is not None
        self.member.stand(len(self.passes) - 1)
        self._recover(broken=False)

    @contextlib.contextmanager
    def _rehearsed(self, newcomer: Newcomer) -> Iterator[None]:
        """Around the body of a step, alone: what it does is captured and compiled, what it computes is not kept."""
        self.in_step = True
        try:
            yield
        except (StoppedError, DisagreementError):
            raise
        except AutoparError as e:  # such as a program that the run's plans do not fit
            raise newcomer.unfit(e) from e
        finally:
            self.in_step = False
        self.optimizer.zero_grad()
        self.ahead.make()
        newcomer.compare_steps(of_steps(self.model))
        newcomer.rehearsed = True

    def _as_a_newcomer(self, source: Iterator[T], kept: dict[int, T]) -> Generator[T, None, bool]:
        """A pass through the data of a process that is to join: True where it is let in in this one, with `source` and `kept` as the others have them; False where they are past it."""
        newcomer = self.newcomer
        assert newcomer is not None
        number, taken = newcomer.passes, 0
        newcomer.passes += 1
        last: deque[T] = deque(maxlen=2 * self.options.every + 2)  # taken: a loss may take the others so many steps back

        def take(count: int) -> None:
            nonlocal taken
            while taken < count:
                try:
                    last.append(next(source))
                except StopIteration:
                    raise AutoparError(
                        f"the loader of pass {number} through the data ended after {taken} batches, and the run has had {count} of it already",
                        where="autopar.elastic.Session.batches", fix="start this process with the data that the run was started with",
                    ) from None  # fmt: skip
                taken += 1

        if not newcomer.rehearsed:
            for batch in source:
                taken += 1
                last.append(batch)
                yield batch
                if not newcomer.rehearsed:
                    raise AutoparError(
                        "the loop went on without a step",
                        where="autopar.elastic.Session.batches",
                        fix="put what a batch is for into `with session.step():`",
                    )
                break
        while True:
            data = newcomer.data()
            if len(data) > number + 1:
                newcomer.withdraw()
                first, is_whole = data[number]
                take(data[number + 1][0] - first)
                self.version = data[number + 1][0]
                if is_whole:
                    next(source, None)
                return False
            if len(data) == number + 1 and newcomer.rehearsed:
                if newcomer.member.is_let_in():
                    be_alone(False)
                    break
                take(min(newcomer.version() - data[number][0], taken + 1))
                newcomer.offer(number)
            time.sleep(0.0 if newcomer.version() - data[-1][0] > taken else PAUSE_S)
            newcomer.member.refuse_stopped()
        self._recover(broken=False)
        first = self.passes[-1][0]
        take(self.version - first)
        kept.update({first + taken - len(last) + i: batch for i, batch in enumerate(last)})
        assert self.given is not None
        if self.given[1]:
            self.numbers[self.version] = self.given[0]
        else:
            torch.set_rng_state(self.given[0])
        self.given = None
        os.environ.pop(words.JOINS, None)  # it is one of the members now
        return True

    def random_at(self, version: int) -> Random:
        """torch's own random state before the step after `version` steps."""
        return self.given or (self.numbers.get(version, torch.get_rng_state()), version in self.numbers)

    def _newcomers(self, ranks: int) -> int:
        """In a new group, how many are new, and that they may join; those get what is no part of a version. Collective."""
        mine = of_model(self.model, self.options, self.ahead.axes, self.ahead.lists_for(self.ahead.largest))
        digest = digest_of(mine | of_session(self.model, self.optimizer, self.state.others))
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, (self.newcomer is not None or self.is_new, digest, self.passes, self.model._touched))
        new = [x for x in told if x[0]]
        old = next((x for x in told if not x[0]), None)
        if not new or old is None:
            return 0
        if any(x[1] != old[1] for x in new):
            if self.newcomer is not None and digest != old[1]:
                raise DisagreementError(
                    "this process cannot join: it has another model, or other arguments, than the run has by now",
                    where="autopar.elastic",
                    fix=FIX,
                )
            raise SupersededError("a process that was to join has another program")
        if self.newcomer is not None:
            self.passes, self.model._touched = old[2], old[3]
        return len(new)

    # ---- after a loss --------------------------------------------------------------------------------------------

    def _is_of_a_loss(self, e: Exception) -> bool:
        """Whether others are to blame: by what the error is, or because the supervisor begins a new generation just then."""
        if self.member is None or isinstance(e, StoppedError):
            return False
        if isinstance(e, (LostRankError, SupersededError)) or is_of_others(e):
            return True
        if isinstance(e, (DisagreementError, InputError)) and (
            self.on_trial or self.newcomer is not None
        ):  # with one that joined, which ends of it
            return self.newcomer is None and not self.is_new
        return isinstance(e, (AutoparError, RuntimeError)) and self.member.moves_on(EXPLAINED_S)

    def _recover(self, broken: bool = True) -> None:
        """Goes on with those that are left, or are there now, at the newest version that they have whole. Another loss meanwhile begins it anew. broken: whether the others may wait for
        this rank in a collective."""
        assert self.member is not None
        while True:  # every round is a new generation; the supervisor ends a run in which nobody gets further
            if broken:
                self.member.abort()
            try:
                self._once(0.0 if broken else self.timeout_s)
                return
            except Exception as e:
                if not self._is_of_a_loss(e):
                    raise
                log.info("another loss while recovering: %s", str(e).splitlines()[0] if str(e) else type(e).__name__)
                broken = True

    def _once(self, patience_s: float) -> None:
        member = self.member
        assert member is not None
        self.lets_in = False
        begun = time.monotonic()
        member.next(patience_s)
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
        joined = self._newcomers(ranks) if member.grows else 0
        self.ahead.keep()
        remesh(self.model, self.ahead.axes_for(ranks), self.ahead.lists_for(ranks))
        ahead = self.ahead.take(joined > 0)
        if joined:
            self.ahead.common()
            ahead = ahead and bool(self.model._programs.kinds)
        self.ahead.adopt()
        self.state.new_mesh()
        self.on_trial = joined > 0
        self.copies = self._new_copies()
        regrouped = time.monotonic()
        was_split, self.is_split, self.is_settled = self.is_split, self.state.is_split(), False
        moved = recover(self, was_split)
        self.newcomer, self.is_new = None, self.newcomer is not None or self.is_new
        self.given = self.given if self.is_new else None
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
            Recovery(member.generation, ranks, self.version, regrouped - begun, time.monotonic() - regrouped, moved, ahead, joined)
        )
        if rank == 0:
            r = self.recoveries[-1]
            made = "its step was made ahead" if ahead else "no step was made ahead for so many: the next one is captured and compiled"
            print(
                f"autopar: {ranks} processes{f', {joined} of them new,' if joined else ''} go on from step {r.version}: group {r.regroup_s:.2f} s, state {r.move_s:.2f} s, {moved.bytes:,} bytes moved, {moved.least_bytes:,} at least; {made}",
                flush=True,
            )
