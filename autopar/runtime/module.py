"""ParallelModule: the user's model with DTensor parameters, whose call runs the compiled step.

It shares the model's submodules, parameters and buffers under their own names. The first call of each kind captures and compiles;
the first with a backward plans, and settles where parameters live and moves them there, DTensor for DTensor, so that an
optimizer built earlier keeps working.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar._torch import stepping
from autopar.capture.capture import LOSS, Call, NotGeneralError, Role, Shapes, off_cache, tensor_named
from autopar.capture.effects import refuse_global_hooks, set_flags
from autopar.capture.micro_batches import WholeBatch
from autopar.checkpoint.pretrained import read_pretrained, write_pretrained
from autopar.distributed.failures import during
from autopar.distributed.shards import cut
from autopar.errors import InputError
from autopar.passes.stages.separate import owner
from autopar.plan.plan import Plan
from autopar.runtime import sharded_output
from autopar.runtime.buckets import Buckets, Lengths, to_longest
from autopar.runtime.buckets import cut as cut_padding
from autopar.runtime.build import Builder, no_plan
from autopar.runtime.calls import autocast_dtype, hashable, signed
from autopar.runtime.check import FirstStep, asked
from autopar.runtime.config import Config
from autopar.runtime.copies import copied
from autopar.runtime.executor import EvaluationRun, TrainingRun
from autopar.runtime.gradients import GradSync
from autopar.runtime.hooks import refuse_unfit_hooks
from autopar.runtime.inputs import UnequalSizesError
from autopar.runtime.micro_batches import MicroBatches, PartedCall, not_kept
from autopar.runtime.optimizers import watch
from autopar.runtime.outputs import LossOutput, NotComputedError, OutputGiver
from autopar.runtime.programs import FIXED, Counts, Program, Programs
from autopar.runtime.python_state import PythonState, constants_hold, said
from autopar.runtime.remesh import on_the_mesh_of
from autopar.runtime.run import Apply, Run, Tensors, padded_local
from autopar.runtime.sizes import SizesSeen
from autopar.runtime.staged_calls import StagedCalls, refuse_away
from autopar.runtime.stages import StagedStep
from autopar.runtime.step import Step, StepStats
from autopar.runtime.wrapping import WrappingModule
from autopar.tensors.memory_format import lies_in, order_of

OFTEN = 8  # captures of one kind of call, from which on it is worth a warning


class ParallelModule(WrappingModule):
    """A model that trains on a mesh as it would on one device. Made by `autopar.compile`."""

    # Hugging Face's Trainer: a loss is the mean over all rows already (`autopar.integrations.trainer` has its loss arguments).
    accepts_loss_kwargs = False

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, config: Config) -> None:
        super().__init__()
        builder = Builder(model, device_mesh, config)
        builder.distribute()
        self._join(model, builder, config)

    def _join(self, model: nn.Module, builder: Builder, config: Config) -> None:
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_modules"] = model._modules
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.training = model.training
        self.__dict__["_wrapped"] = model
        self._config = config
        self._buckets = None if config.buckets is None else Buckets(config.buckets, model)
        self._state = PythonState(model, config.loss_fn)
        self._found = -1, Tensors({}, {}, {}, [])
        self._checked = -1  # the state whose hooks were looked at
        self._touched: set[bool] = set()  # in training (True), in evaluation (False): outputs besides the loss were asked for
        self._lie_on(builder)
        self._seed: int | None = None
        self._calls = 0
        watch(self, config.optimizer)
        if config.loss_fn is None:
            self.__dict__["forward"] = signed(self.forward, model.forward)
        self.__dict__["_made"] = True  # from here on, attributes are the model's

    def _lie_on(self, builder: Builder) -> None:
        """All that depends on the mesh, which is the builder's."""
        config = self._config
        self._builder = builder
        # A bucket is a size of its own: there are few of them.
        self._programs = Programs(False if config.buckets is not None and config.dynamic is None else config.dynamic)
        self._reader = builder.reader
        self._outputs = OutputGiver(builder.groups, self._reader, builder.device)
        self._sync = GradSync(config.grad_accumulation, builder.reduced)
        self._micro = MicroBatches()
        self._stages = None if builder.pipeline is None else StagedCalls(builder.pipeline, builder.device)

    # ---- the call --------------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> object:
        args, kwargs = sharded_output.whole((args, off_cache(self.__dict__["_wrapped"], kwargs)))
        call, step, lengths = self._agreed(args, kwargs)
        if self._stages is not None:
            return self._pack(*self._stages.run(self, call, step), lengths)
        tensors = self._tensors()
        with during("forward: local inputs", self._builder.groups.ranks):
            if isinstance(step, PartedCall):
                run: Run = self._micro.run(self, call, step, tensors)
            else:
                values = self._values(step, call, tensors)
        if isinstance(step, PartedCall):
            outputs = Apply.apply(run, len(tensors.trained), *tensors.trained.values())
        else:
            run, outputs = self._run(step, values, call, tensors)
        if run.step.captured.notes.sets:
            set_flags(self.__dict__["_wrapped"], run.step.captured.notes)
        return self._pack(run, outputs, lengths)

    def _agreed(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Call, Step | PartedCall, Lengths]:
        """The call, padded where it has to be, and its step. Ranks that pass sequences of other lengths than each other, as those do that pad their batches one by one,
        pad to the longest of all."""

        if self._config.find is not None and self.training and self._needs_grad(Call.of(args, kwargs)):
            self._find_mesh(self._config.find, args, kwargs)

        def of(lengths: Lengths, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Call, Step | PartedCall, Lengths]:
            call = Call.of(args, kwargs)
            trains = self._needs_grad(call) and (self.training or self._stages is not None)
            if trains and (number := self._micro.number(self, call)) > 1:
                return call, self._micro.parted(self, call, number), lengths
            return call, self._step_for(call, self._needs_grad(call)), lengths

        given: tuple[tuple[object, ...], Mapping[str, object]] = args, kwargs
        lengths: Lengths = {}
        if self._buckets is not None:
            padded, lengths = self._buckets.padded(args, kwargs)
            given = (), padded
        try:
            return of(lengths, *given)
        except UnequalSizesError as e:
            try:
                padding = self._buckets or Buckets((), self.__dict__["_wrapped"])
                padded, lengths = to_longest(self._builder.groups, padding, args, kwargs)
            except InputError:
                raise e from None
        return of(lengths, (), padded)

    def _find_mesh(self, find: Callable[..., Plan], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """The mesh that is best for such a call, and all else, is planned, and the model goes over to it. What was compiled so far is compiled anew when it is called again. Collective."""
        with during("planning", self._builder.groups.ranks):
            plan = find(self.__dict__["_wrapped"], args, kwargs)
        builder, self._config = on_the_mesh_of(plan, self._builder)
        self._lie_on(builder)

    def _run(
        self, step: Step, values: dict[Role, torch.Tensor], call: Call, tensors: Tensors, again: bool = False
    ) -> tuple[Run, tuple[torch.Tensor | None, ...]]:
        grad = torch.is_grad_enabled()
        trained = tensors.trained if grad and step.has_backward else {}
        extra = [t for t in call.tensors if t.requires_grad] if grad else []
        run = Run(self, step, values, list(trained), call, tensors.buffers, again)
        if trained or extra:
            return run, Apply.apply(run, len(trained), *trained.values(), *extra)
        with torch.no_grad():
            return run, run.forward()

    def _tensors(self) -> Tensors:
        """Found anew when the state that was looked at last has changed."""
        looks, found = self._found
        if looks != self._state.looks or not found.hold():
            self._found = self._state.looks, (found := Tensors.of(self))
        return found

    def _step_for(self, call: Call, grad: bool, batch: WholeBatch | None = None, whole: Call | None = None) -> Step:
        """batch, whole: that the call is a micro-batch of."""
        stepping.leave()
        version = self._state.now()
        self._check_hooks(version)
        refuse_global_hooks()
        self._builder.groups.bind()
        autocast = autocast_dtype(self._builder.device)
        shapes = self._reader.global_shapes(call)
        formats = tuple((t.requires_grad, order_of(t)) for t in call.tensors)
        loss_only = self._config.outputs == "loss" and self.training not in self._touched
        constants = hashable(call.constants)
        loss_only = loss_only or batch is not None or (grad and self._stages is not None)
        part = None if batch is None else (batch.of, batch.parts)
        kind = (self.training, grad, autocast, call.spec, constants, formats, loss_only, part)
        step = self._held(kind, shapes, version)
        with during("comparing the batches of the ranks", self._builder.groups.ranks):
            how = (self.training, grad, autocast, formats, loss_only, part)
            self._reader.check_same(whole or call, shapes, how, None if step is not None else lambda: self._why_new(kind, shapes))
        if grad and (told := self._builder.too_large(shapes)) and self._builder.groups.rank == 0:
            warnings.warn(told, stacklevel=4)
        if step is not None:
            return step
        was_planned = self._builder.planned
        content = dict(self._state.content)
        seen = self._programs.seen(call, constants)
        while True:
            general = batch is None and self._stages is None and self._programs.may_generalize(kind)
            varying = seen.varying(call, shapes, self._builder.batch_ranks, was_planned) if general else ()
            try:
                made = self._builder.build(call, shapes, grad, autocast, loss_only, varying, batch)
            except NotGeneralError as e:
                seen.refused(e.what)
                continue
            if self._builder.planned and not was_planned:
                self._programs.clear()  # made for parameters that lay elsewhere
                was_planned = True
            program = Program(made, content, version, shapes if made.general is None else made.captured.input_shapes)
            self._programs.add(kind, program, lambda: self._too_many(call, seen))
            step = program.at(shapes)
            if step is not None:
                break
            seen.missed.add(shapes)  # what was assumed of the sizes that vary is not true of these
        if seen.tell and self._builder.groups.rank == 0:
            warnings.warn(
                f"{type(self.__dict__['_wrapped']).__name__} is captured and compiled anew for every size of its inputs, since it cannot be compiled once for all of them: "
                f"{seen.given_up}",
                stacklevel=4,
            )
        seen.tell = False
        same = self._programs.of(kind, shapes)
        if len(same) == OFTEN:
            changed = self._changed_since(same[-2])
            warnings.warn(f"captured {OFTEN} times, since Python state that forward reads changes: {changed}", stacklevel=3)
        return step

    def _changed_since(self, program: Program) -> str:
        since = self._state.matter(program.version, program.content, program.step.captured.notes)
        return ", ".join(sorted(map(said, since))[:3]) or "a global variable"

    def _why_new(self, kind: tuple[Any, ...], shapes: Shapes) -> str:
        """Why there is no program for such a call."""
        same = self._programs.of(kind, shapes)
        return f"changed there: {self._changed_since(same[-1])}" if same else "it was not called so before"

    def _too_many(self, call: Call, seen: SizesSeen) -> str:
        why = seen.given_up or (
            "dynamic=False was passed" if self._config.dynamic is False else "sizes of a batch do not divide over the ranks"
        )
        return (
            f"{type(self.__dict__['_wrapped']).__name__} was called with more than {FIXED} different sizes, and each has a program of its own ({why}): those that were not used "
            f"for longest are given up, and captured and compiled anew when they come again. Pad batches to few sizes: buckets=(...) of autopar.compile does so"
        )

    def _held(self, kind: tuple[Any, ...], shapes: Shapes, version: int) -> Step | None:
        """The step of such calls that was captured with the Python state that there is now, or with what is the same to it."""
        held = [p for p in self._programs.of(kind, shapes) if constants_hold(p.step.captured.notes)]
        found = next((p for p in held if p.version == version), None)
        if found is None:
            found = next((p for p in held if not self._state.matter(p.version, p.content, p.step.captured.notes)), None)
        if found is None:
            return None
        found.version = version
        self._programs.used(kind, found)
        return found.at(shapes)

    def _values(
        self,
        step: Step,
        call: Call,
        tensors: Tensors | None = None,
        counters: Callable[[], torch.Tensor] | None = None,
        given: Mapping[Role, torch.Tensor] = MappingProxyType({}),
    ) -> dict[Role, torch.Tensor]:
        """A local tensor for every role of the step's graph inputs but tangents. counters: of random operators, by default those of a new call; given: values of the
        batch that the call is a part of."""
        values: dict[Role, torch.Tensor] = {}
        tensors = tensors or Tensors.of(self)
        params, buffers = tensors.params, tensors.buffers
        for role in step.taken:
            if role.kind == "param":
                values[role] = padded_local(params[owner(role.name)], step.local_shapes[role.name])
            elif role.kind == "buffer":
                values[role] = buffers[role.name] if role.name in buffers else self._attribute(role.name)
            elif role.kind == "coordinate":
                values[role] = self._builder.coordinate(role.name)
            elif role.kind == "seed":
                values[role] = (counters or self._counters)()
            elif role in given:
                values[role] = given[role]
        for a in self._builder.mesh.axes:
            values.setdefault(Role("coordinate", a.name), self._builder.coordinate(a.name))
        for i, (t, p) in enumerate(zip(call.tensors, step.plan.inputs, strict=True)):
            role = Role("input", "", i)
            if role in step.dtypes:
                if i in step.captured.notes.lies and not lies_in(t, order_of(t)):
                    raise InputError(
                        f"forward writes to what is a view of input {call.paths[i]}, or a copy, by how that lies in memory: with strides {tuple(t.stride())} it is another program",
                        fix="pass x.contiguous(), or write x = x.clone() before what is written in place",
                    )
                values[role] = self._reader.local(t, p, self._builder.device, step.dtypes[role])
        return values

    def _attribute(self, name: str) -> torch.Tensor:
        """A tensor that is a plain attribute of a module."""
        return tensor_named(self.__dict__["_wrapped"], name).detach().to(self._builder.device)

    def _first_step(self, step: Step) -> FirstStep | None:
        """The checks of a step that has not run yet, where AUTOPAR_CHECK asks for them."""
        groups = self._builder.groups
        if not asked() or not step.first_run() or groups.alone:
            return None
        return FirstStep(step.written_out(), lambda t, p: cut(t, p, groups.mesh, groups.coordinates), groups.rank)

    def _counters(self, of: int | None = None) -> torch.Tensor:
        """(seed, step) of a new call, or of an earlier one: torch.manual_seed starts the count again."""
        seed = torch.initial_seed()
        if seed != self._seed:
            self._seed, self._calls = seed, 0
        if of is None:
            of, self._calls = self._calls, self._calls + 1
        return torch.tensor([seed % (1 << 62), of], dtype=torch.int64, device=self._builder.device)

    def _pack(self, run: Run | TrainingRun | EvaluationRun, outputs: tuple[torch.Tensor | None, ...], lengths: Lengths) -> object:
        """lengths: of what was padded, before that."""
        captured = run.step.captured
        places = run.step.plan.outputs
        leaves = [captured.constants.get(i, self._outputs.worn(o, places[i])) for i, o in enumerate(outputs)]
        result = _torch.pytree.tree_unflatten(leaves, captured.out_spec)
        if captured.loss_only:
            rest = not_kept(self._builder.micro_batches) if isinstance(run, TrainingRun) or captured.samples else self._rest(run, lengths)
            return result[LOSS] if self._config.loss_fn is not None else LossOutput(result[LOSS], rest)
        return cut_padding(result, lengths) if lengths else result

    def _rest(self, run: Run | EvaluationRun, lengths: Lengths) -> Callable[[], Any]:
        """What computes all outputs of a call that has computed its loss alone: the same call again, with the same random numbers. Later calls then compute them at
        once."""
        call, number, before, training = run.call, self._calls - 1, run.before, self.training
        grad, state = torch.is_grad_enabled(), self._builder.device.type
        autocast = torch.is_autocast_enabled(state), torch.get_autocast_dtype(state)
        versions = {n: p._version for n, p in self.named_parameters()}

        def rest() -> Any:
            self._touched.add(training)
            changed = next((n for n, p in self.named_parameters() if p._version != versions.get(n)), "")
            if changed or self.training != training:
                what = f"parameter {changed!r} has changed since that call" if changed else f"train({self.training}) was called since"
                raise NotComputedError(
                    f"the outputs besides the loss are computed when they are first asked for, and {what}",
                    fix='ask for them before optimizer.step(), or pass outputs="all" to autopar.compile; later calls compute them at once',
                )
            with torch.set_grad_enabled(grad), torch.autocast(state, dtype=autocast[1], enabled=autocast[0]):
                step = self._step_for(call, self._needs_grad(call))
                if self._stages is not None:
                    return self._pack(*self._stages.run(self, call, step, lambda: self._counters(number), before), lengths)
                tensors = Tensors.of(self)
                with during("outputs that were asked for: local inputs", self._builder.groups.ranks):
                    values = self._values(step, call, tensors, lambda: self._counters(number))
                values |= {r: before[r.name] for r in values if r.kind == "buffer" and r.name in before}
                again, outputs = self._run(step, values, call, tensors, again=True)
                return self._pack(again, outputs, lengths)

        return rest

    def prepare(self, *args: object, **kwargs: object) -> Step:
        """Captures and compiles the step for a call with these arguments, without running it."""
        kwargs = off_cache(self.__dict__["_wrapped"], kwargs)
        step = self._agreed(args, kwargs)[1]
        return step.steps[-1] if isinstance(step, PartedCall) else step

    def _needs_grad(self, call: Call) -> bool:
        """Also where only inputs want gradients: a frozen or parameterless model."""
        return torch.is_grad_enabled() and any(
            t.requires_grad for t in itertools.chain(self.__dict__["_wrapped"].parameters(), call.tensors)
        )

    # ---- what the user may ask -------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in use. Before the first call there is none yet."""
        plan = self._builder.plan
        if plan is None:
            raise no_plan()
        return plan

    @property
    def lies_on_stages(self) -> bool:
        """Whether this rank has the tensors of its stages of a pipeline alone: from the first call on."""
        return self._stages is not None and self._stages.pipeline.placed

    @property
    def data_world(self) -> int:
        """Over how many ranks the batch is split: as local inputs must be, as the plan does for global ones."""
        return self._builder.data_world

    @property
    def data_rank(self) -> int:
        """Which part of the batch is this rank's (for a DistributedSampler)."""
        return self._builder.data_rank

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forwards run in here leave gradients unreduced; the next one outside adds them in."""
        before, self._sync.enabled = self._sync.enabled, False
        try:
            yield
        finally:
            self._sync.enabled = before

    def rng_state(self) -> dict[str, int]:
        """The counters of random ops, for a checkpoint."""
        return {"seed": torch.initial_seed() if self._seed is None else self._seed, "step": self._calls}

    def load_rng_state(self, state: Mapping[str, int]) -> None:
        torch.manual_seed(state["seed"])
        self._seed, self._calls = int(torch.initial_seed()), int(state["step"])

    @property
    def stats(self) -> dict[str, StepStats]:
        """Counts of what compilation did: distinct layers lowered, cache hits, copies made for kernels that demand another layout."""
        return {str(i): s.stats for i, s in enumerate(self.compiled_steps)}

    @property
    def programs(self) -> Counts:
        """How often this model's calls were captured and compiled, and how many programs are kept."""
        return self._programs.counts()

    @property
    def compiled_steps(self) -> tuple[Step, ...]:
        """One for each kind of call so far; in a pipeline, for each of this rank's stages."""
        mine = () if self._stages is None else self._stages.pipeline.mine
        return tuple(
            s for step in self._programs.steps() for s in ([step.steps[i] for i in mine] if isinstance(step, StagedStep) else (step,))
        )

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int = 5 * 1000**3) -> None:
        """Config and weights in Hugging Face layout; of a peft model its adapters, in peft's. Collective: every rank calls it, rank 0 writes, and holds one file's
        worth. max_shard_size: bytes of a file. Raises CheckpointError on all ranks."""
        refuse_away(self._builder.pipeline, "save_pretrained")
        write_pretrained(self, self.__dict__["_wrapped"], folder, max_shard_size)

    def load_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Fills the model in place from what `save_pretrained` wrote, or transformers or peft: every rank reads the slices of its shards, and adapters whole. Raises
        CheckpointError, before any tensor is touched, where names or shapes do not match."""
        refuse_away(self._builder.pipeline, "load_pretrained")
        read_pretrained(self, self.__dict__["_wrapped"], folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module of its own on the same mesh, by the same plan, with parameters and buffers of its own."""
        refuse_away(self._builder.pipeline, "copy.deepcopy")
        wrapped = copied(self.__dict__["_wrapped"], memo)
        other = ParallelModule.__new__(ParallelModule)
        memo[id(self)] = other
        nn.Module.__init__(other)
        other._join(wrapped, self._builder.of(wrapped), self._config)
        other._seed, other._calls, other._touched = self._seed, self._calls, set(self._touched)
        return other

    def _check_hooks(self, version: int) -> None:
        own = self._backward_hooks or self._backward_pre_hooks or self._forward_hooks or self._forward_pre_hooks
        if version == self._checked and not own:
            return
        for name, m in [("", self), *self.__dict__["_wrapped"].named_modules()]:
            refuse_unfit_hooks(m, name or type(self.__dict__["_wrapped"]).__name__)
        self._checked = version
