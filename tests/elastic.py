"""Runs of a small training under a supervisor, with processes that die where a test wants them to, beside plain eager PyTorch on one device.

`tests.elastic_soak` has runs with losses at random places.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.elastic import copies as copies_
from autopar.elastic import newcomer, room, words
from autopar.elastic import session as session_
from autopar.elastic.agent import Agent, Start
from autopar.elastic.session import Session
from autopar.elastic.supervisor import Supervisor
from autopar.kernels.random import EagerRandom
from autopar.runtime.step import Step
from tests.models import Toy

PHASES = ("between", "forward", "backward", "reduced", "commit", "committed", "stepped", "copy", "copied")
TWICE = ("regrouped", "moved")  # phases of a recovery


@dataclass(frozen=True)
class Death:
    """A worker that ends at a phase of the step after `step` steps, in a generation. how: "killed", "stopped" (SIGSTOP), or "with its node" (not the first)."""

    worker: int
    step: int
    phase: str
    generation: int = 0
    how: str = "killed"


@dataclass(frozen=True)
class Task:
    layout: str | autopar.Layout | None = "fsdp"
    ranks: int = 4
    steps: int = 6
    batch: int = 12
    deaths: tuple[Death, ...] = ()
    survive: int = 1
    silence_s: float = 20.0
    least: int = 1
    backend: str = "aot_eager"
    optimizer: str = "adamw"
    pause_s: float = 0.0  # of a step, for deaths from outside
    every: int = 1
    nodes: tuple[int, ...] = ()  # ranks of each; none: all on one
    rejoin: int = 0  # how often a lost worker's place is filled again
    hold: int = 1 << 30  # from this step on members wait with each until somebody is ready to join, and has joined, or was refused
    joins: int = 1  # as many have to, for that
    passes: int = 1  # through the data, each of as many steps
    late_s: float = -1.0  # the run begins without the other nodes, which come so much later; below 0: at once
    axes: tuple[tuple[str, int], ...] = ()  # of the mesh, behind "dp"; one named "pp" stands before it
    model: str = "net"  # or "toy", a small decoder; "llama", "mixtral"
    memory: str | None = None
    micro_batches: int | None = None
    saves: int = -1  # after so many steps a checkpoint is written
    full: tuple[int, int] = (-1, 0)  # a worker on whose machine host memory is full, and how many bytes are left of it
    others_program: str = ""  # what is different in a worker that is to join: "width", "dropout", "optimizer", "data"

    def mates(self, worker: int) -> tuple[int, range]:
        """The node a worker is on, and all who are."""
        first = 0
        for node, n in enumerate(self.nodes or (self.ranks,)):
            if worker < first + n:
                return node, range(first, first + n)
            first += n
        raise AssertionError(worker)


@dataclass
class Done:
    """What a worker that got to the end says. losses: by step; recoveries: as the session has them; compiled: steps that were made at failures."""

    losses: dict[int, float]
    parameters: dict[str, torch.Tensor]
    rate: float
    recoveries: list[Any]
    held_bytes: int
    captured: int
    draws: dict[int, float] = field(default_factory=dict)  # of torch's own generator, by step


@dataclass
class Outcome:
    code: int
    lost: list[tuple[int, str]]
    said: list[str]
    done: dict[int, Done] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class Net(nn.Module):
    """Dropout, sums over the batch that a buffer remembers, sizes that do not divide."""

    def __init__(self, width: int = 22, drop: float = 0.2) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(10, 24), nn.BatchNorm1d(24), nn.Linear(24, width), nn.Linear(width, 5)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.drop(torch.relu(self.norm(self.a(x))))
        return {"loss": ((self.c(self.drop(torch.tanh(self.b(h)))) - y) ** 2).mean()}


VOCABULARY = 61


def batches(task: Task, seed: int = 7) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    for _ in range(task.steps):
        if task.model == "net":
            yield (
                torch.randn(task.batch, 10, generator=g, dtype=torch.float64),
                torch.randn(task.batch, 5, generator=g, dtype=torch.float64),
            )
        else:
            ids = torch.randint(VOCABULARY, (task.batch, 8), generator=g)
            yield ids, ids


def _model(task: Task, other: str = "") -> nn.Module:
    torch.manual_seed(0)
    if task.model == "net":
        return Net(23 if other == "width" else 22, 0.3 if other == "dropout" else 0.2).double()
    if task.model == "toy":
        return Toy(width=36 if other == "width" else 32, dropout=0.3 if other == "dropout" else 0.1).double()
    import transformers

    common: Any = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attention_dropout": 0.1, "use_cache": False,
    }  # fmt: skip
    if task.model == "llama":
        made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    else:
        more: Any = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, **more))
    return made


def _loss(task: Task, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x, y)["loss"] if task.model == "net" else model(input_ids=x, labels=y).loss
    return loss


def _optimizer(task: Task, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    if task.optimizer == "adamw":
        o: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    else:
        o = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return o, torch.optim.lr_scheduler.StepLR(o, 2, 0.5)


def reference(task: Task) -> Done:
    """The run that nothing happens to: one process, plain PyTorch."""
    model = _model(task)
    optimizer, scheduler = _optimizer(task, model)
    losses = {}
    for i, (x, y) in enumerate(batches(task)):
        with EagerRandom(0, i):
            loss = _loss(task, model, x, y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[i] = loss.item()
    tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return Done(losses, tensors, scheduler.get_last_lr()[0], [], 0, 0)


# ---- a worker ----------------------------------------------------------------------------------------------------


def _die(task: Task, worker: int, how: str) -> None:
    if how == "with its node":
        folder = Path(os.environ["TEST_FOLDER"])
        node, mates = task.mates(worker)
        for name in [f"agent.{node}", *(f"pid.{w}" for w in mates if w != worker)]:
            os.kill(int((folder / name).read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    time.sleep(60)


def _wrapped(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before()
        out = original(*args, **kwargs)
        after()
        return out

    setattr(owner, name, wrapper)


def _doomed(task: Task, session: Session, told: Any) -> Callable[[str], None]:
    """What kills this worker where it is to die, at a phase that is told."""
    assert session.member is not None
    mine = [d for d in task.deaths if d.worker == session.member.worker]

    def at(phase: str) -> None:
        assert session.member is not None
        for d in mine:
            if (d.phase, d.step, d.generation) == (phase, session.version, session.member.generation):
                told(("died", time.time()))
                _die(task, d.worker, d.how)

    def half_sent() -> None:
        if session.version and any(d.phase == "copy" for d in mine):
            time.sleep(0.1)
            at("copy")

    _wrapped(Step, "forward", lambda: at("forward"))
    _wrapped(Step, "backward", lambda: at("backward"))
    _wrapped(copies_.Copies, "meet", lambda: at("commit"))
    _wrapped(copies_.Copies, "_send", lambda: None, half_sent)  # its header has gone
    _wrapped(session_, "recover", lambda: at("regrouped"), lambda: at("moved"))
    return at


def _work(task: Task, told: Any) -> Done:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    elastic = autopar.Elastic(survive=task.survive, silence_s=task.silence_s, regroup_s=20.0, every=task.every)
    other = task.others_program if newcomer.joins() else ""
    inner = dict(task.axes)
    first = {"pp": inner.pop("pp")} if "pp" in inner else {}
    mesh = {
        **first,
        "dp": (task.ranks if task.late_s < 0 else dist.get_world_size()) // math.prod([*first.values(), *inner.values()]),
        **inner,
    }
    model = autopar.compile(
        _model(task, other),
        mesh,
        layout=task.layout,
        backend=task.backend,
        elastic=elastic,
        memory=task.memory,
        micro_batches=task.micro_batches,
        optimizer=task.optimizer.replace("sgd", "sgd-momentum"),
    )
    optimizer, scheduler = _optimizer(task if other != "optimizer" else replace(task, optimizer="sgd"), model)
    session = autopar.elastic.Session(model, optimizer, scheduler)
    at = _doomed(task, session, told)
    optimizer.register_step_pre_hook(lambda *_: at("committed"))
    optimizer.register_step_post_hook(lambda *_: at("stepped"))
    losses: dict[int, float] = {}
    draws: dict[int, float] = {}
    assert session.member is not None
    if session.member.worker == task.full[0]:
        vars(room)["free_bytes"] = lambda: task.full[1]
    every = list(batches(task, 8 if other == "data" else 7))
    size = task.steps // task.passes
    for k in range(task.passes):
        for x, y in session.batches(iter(every[k * size : (k + 1) * size])):
            _hold(task, session)
            _one(task, session, model, optimizer, scheduler, losses, draws, at, told, x, y)
            if session.version == task.saves:
                autopar.checkpoint.save(Path(os.environ["TEST_FOLDER"]) / "checkpoint", model, optimizer, step=session.version)
            if any(d.phase == "copied" for d in task.deaths):
                time.sleep(0.1)
                at("copied")
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in (*model.named_parameters(), *model.named_buffers())}
    return Done(
        losses,
        {n: t.detach() for n, t in whole.items()},
        scheduler.get_last_lr()[0],
        session.recoveries,
        session.holdings.bytes(),
        model.programs.captured,
        draws,
    )


def _hold(task: Task, session: Session) -> None:
    """Before a step: members wait until those are ready that are to join, so that a short training sees them."""
    end = time.monotonic() + 300.0
    while session.newcomer is None and session.version >= task.hold and sum(r.joined for r in session.recoveries) < task.joins:
        member = session.member
        assert member is not None and time.monotonic() < end, "nobody came"
        is_refused = member.store.check([words.unfit(task.ranks)])
        if is_refused or (session.recoveries and session.recoveries[-1].joined) or member.asked_in(len(session.passes) - 1):
            return
        time.sleep(0.01)
        if member.is_superseded:
            return


def _one(
    task: Task, session: Session, model: Any, optimizer: Any, scheduler: Any, losses: dict[int, float], draws: dict[int, float],
    at: Callable[[str], None], told: Any, x: torch.Tensor, y: torch.Tensor,
) -> None:  # fmt: skip
    at("between")
    with session.step() as number:
        draws[number] = torch.rand(()).item()
        loss = _loss(task, model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        at("reduced")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[number] = loss.item()
        time.sleep(task.pause_s)
        if session.recoveries and session.recoveries[-1].version == number:
            told(("redone", time.time()))


def _child(environment: Mapping[str, str], task: Task, folder: Path, worker: int) -> None:
    os.environ.update(environment, TEST_FOLDER=str(folder))
    (folder / f"pid.{worker}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    code = 0

    def told(x: tuple[str, float]) -> None:
        with (folder / f"told.{worker}").open("a") as f:
            f.write(f"{x[0]} {x[1]!r}\n")

    try:
        said = pickle.dumps(_work(task, told))
    except BaseException:
        said, code = pickle.dumps(traceback.format_exc()), 3
    (folder / f"said.{worker}").write_bytes(said)
    os._exit(code)


class _Process:
    """A forked worker as the supervisor knows processes."""

    def __init__(self, process: Any) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def kill(self) -> None:
        self.process.kill()


def _starting(context: Any, task: Task, folder: Path) -> Start:
    def start(worker: int, environment: Mapping[str, str]) -> _Process:
        p = context.Process(target=_child, args=(dict(environment), task, folder, worker), daemon=True)
        p.start()
        return _Process(p)

    return start


def _agent(task: Task, folder: Path, node: int, port: int) -> None:
    """Another node: a process of its own, and its workers its children."""
    if task.late_s > 0:
        time.sleep(task.late_s)
    if task.rejoin and any(d.how == "with its node" for d in task.deaths) and (child := os.fork()):
        # The node that comes back: a second agent, started by what is no part of it.
        os.waitpid(child, 0)
        task = replace(task, deaths=())
    (folder / f"agent.{node}").write_text(str(os.getpid()))
    start = _starting(mp.get_context("fork"), task, folder)
    raise SystemExit(Agent(start, task.nodes[node], node, "127.0.0.1", port, print).run())


def run(task: Task, limit_s: float = 120.0) -> Outcome:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.ready"])
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), task.nodes or (task.ranks,)
        supervisor = Supervisor(
            _starting(context, task, folder), sizes[0], task.least, said.append, nodes=len(sizes),
            arrive_s=60.0 if task.late_s < 0 else 0.0, node_silence_s=1.0, rejoin=task.rejoin,
        )  # fmt: skip
        agents = [context.Process(target=_agent, args=(task, folder, k, supervisor.port)) for k in range(1, len(sizes))]
        for a in agents:
            a.start()
        out = Outcome(supervisor.run(limit_s), supervisor.lost, said)
        for a in agents:
            a.join(10)
            assert a.exitcode in (out.code, -signal.SIGKILL), a.exitcode
        for w in range(len(supervisor.place_of)):
            if (folder / f"said.{w}").exists():  # a pickle, since survivors have no queue that a killed process might have locked
                value = pickle.loads((folder / f"said.{w}").read_bytes())
                (out.errors if isinstance(value, str) else out.done)[w] = value
            if (folder / f"told.{w}").exists():
                for line in (folder / f"told.{w}").read_text().splitlines():
                    what, at = line.split()
                    out.times[what] = max(out.times.get(what, 0.0), float(at))
    return out


def compare(task: Task, out: Outcome, dead: set[int] | None = None) -> None:
    """Raises AssertionError where survivors' curve or state is not that of the one process. dead: who is to be lost; default: all that the task says."""
    dead = {d.worker for d in task.deaths} if dead is None else dead
    assert out.code == 0 and not out.errors, (out.said, *out.errors.values())
    assert {w for w, _ in out.lost} == dead and set(range(task.ranks)) - dead <= set(out.done), (out.lost, sorted(out.done), out.said)
    assert task.rejoin or set(out.done) == set(range(task.ranks)) - dead, sorted(out.done)
    drawn = [{(n, x) for n, x in d.draws.items() if n >= 0} for d in out.done.values()]
    assert len(set.union(*drawn)) == task.steps, "torch's own random numbers differ"
    want = reference(task)
    assert set().union(*(d.parameters for d in out.done.values())) == set(want.parameters)
    for worker, done in out.done.items():
        first = (
            done.recoveries[0].version if -1 in done.losses else 0
        )  # which one that joined has of its first batch, that it went through alone
        numbers = sorted(n for n in done.losses if n >= 0)
        assert numbers == list(range(first, task.steps)), (worker, numbers)
        worst = max(abs(done.losses[i] - want.losses[i]) / abs(want.losses[i]) for i in numbers)
        in_float64 = task.model in ("net", "toy")  # norms and losses of transformers are computed in float32 whatever the model's dtype is
        assert worst < (1e-11 if in_float64 else 1e-5), f"worker {worker}: losses differ by {worst:.1e}"
        for n in done.parameters:  # on the stages of a pipeline, some
            t = want.parameters[n]
            rtol, atol = (1e-9, 1e-10) if in_float64 else (1e-3, 2e-5)
            torch.testing.assert_close(done.parameters[n], t, rtol=rtol, atol=atol, msg=f"worker {worker}, {n}: {{}}".format)
        assert done.rate == want.rate
