"""What elastic training refuses, before it costs anything; and what its supervisor makes of processes that end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.elastic import words
from autopar.elastic.agent import Agent
from autopar.elastic.attach import refuse
from autopar.elastic.boxes import elements
from autopar.elastic.supervisor import Supervisor, started
from autopar.errors import AutoparError
from autopar.run import main
from tests.models import Toy


@pytest.fixture(autouse=True)
def leaves_no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


PLAIN: dict[str, Any] = {"inputs": "global", "has_plan": False}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"has_plan": True}, "a plan that is passed is for one mesh"),
        ({"inputs": "local"}, "samples would be seen twice or never"),
    ],
)
def test_what_is_not_survived_yet_is_said_at_compile(given: dict[str, Any], said: str) -> None:
    refuse(**PLAIN)
    with pytest.raises(AutoparError, match=said) as e:
        refuse(**{**PLAIN, **given})
    assert e.value.where == "autopar.compile, elastic=" and e.value.fix


@pytest.mark.parametrize("given", [{"survive": 0}, {"survive": True}, {"survive": 1.5}, {"silence_s": 0}, {"regroup_s": -1}])
def test_options_that_mean_nothing(given: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match=next(iter(given))):
        autopar.Elastic(**given)


class Factored(torch.optim.Optimizer):
    """State that is no tensor like its parameter, as Adafactor's rows are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.sum(-1, keepdim=True) if p.dim() > 1 else p.clone()


def test_optimizer_state_that_cannot_be_moved() -> None:
    from autopar.elastic.state import State

    model = autopar.compile(nn.Linear(4, 3), {"dp": 1}, layout="fsdp", backend="aot_eager")
    optimizer = Factored(model.parameters())
    state = State(model, optimizer, [])
    assert [s.name for s in state.specs()] == ["parameter weight", "parameter bias"]
    optimizer.step()
    with pytest.raises(AutoparError, match="'rows' does not lie as its parameter does, so it cannot be moved"):
        state.specs()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_parameter_of_no_dims() -> None:
    """Packed as one number, so that a stage may have none of it; it comes back with no dims."""
    from autopar.elastic.state import State

    model = autopar.compile(Scaled(), {"dp": 1}, layout="fsdp", backend="aot_eager")
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    packed = state.pack(state.specs(), 0, state.sizes)
    (spec,) = [s for s in packed.specs if s.name == "parameter scale"]
    assert spec.shape == (1,) and elements(replace(spec, stages=(0, (1,))).box(0, (2,))) == 0
    with torch.no_grad():
        model.scale.zero_()
    state.put(packed, {n: model._builder.lies(n, tuple(p.shape)) for n, p in model.named_parameters()})
    assert model.scale.shape == () and model.scale.item() == 1.5


def test_counts_of_an_optimizer_stay_where_it_has_them() -> None:
    """In a pipeline they move with their stage: those of most optimizers are in host memory, those of fused and capturable ones on the device. (The meta device stands for one.)"""
    from autopar.elastic.state import State

    model = autopar.compile(Toy(), {"pp": 1, "dp": 1}, layout="fsdp", backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state = State(model, optimizer, [])
    packed = state.pack(state.specs(), 0, state.sizes)
    counts = [s for s in packed.specs if s.name.startswith("count:step")]
    assert len(counts) == len(list(model.parameters())) and all(s.on_host for s in counts)
    packed.specs = tuple(replace(s, on_host="bias" in s.name) for s in packed.specs)
    model._builder.device = torch.device("meta")
    found = state.put(packed, {n: model._builder.lies(n, tuple(p.shape)) for n, p in model.named_parameters()})
    assert {n: c.device.type for (n, _), c in found.items()} == {n: "cpu" if "bias" in n else "meta" for n, _ in model.named_parameters()}
    assert all(c.dtype == torch.float32 and c.shape == () for c in found.values())


def test_an_optimizer_of_one_stage() -> None:
    """Made after the first call it lacks what another stage has, and could not go on with that."""
    from autopar.elastic.state import State

    model = autopar.compile(Toy(), {"pp": 1, "dp": 1}, layout="fsdp", backend="aot_eager")
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids)
    model._stages.pipeline.away = frozenset({"head.weight"})
    with pytest.raises(AutoparError, match=r"of this rank's stages alone, and without 'head.weight' it cannot") as e:
        State(model, torch.optim.AdamW(model.parameters()), [])
    assert "before the first call" in e.value.fix


def test_an_optimizer_of_other_tensors() -> None:
    from autopar.elastic.state import State

    model = autopar.compile(nn.Linear(4, 3), {"dp": 1}, layout="fsdp", backend="aot_eager")
    with pytest.raises(AutoparError, match="1 tensors that are no parameters of the model"):
        State(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1), [])


def test_one_process_needs_no_supervisor() -> None:
    """The loop is the same; there is nobody to go on."""
    model = autopar.compile(nn.Linear(4, 3), {"dp": 2 - 1}, layout="fsdp", backend="aot_eager", elastic=autopar.Elastic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = autopar.elastic.Session(model, optimizer)
    for x in session.batches(torch.ones(3, 2, 4)):
        with session.step():
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.version == 3
    with pytest.raises(AutoparError, match=r"optimizer.step\(\) outside of a step"):
        optimizer.step()
    with pytest.raises(AutoparError, match="went on without a step"):
        list(session.batches(torch.ones(3, 2, 4)))


def test_a_model_that_is_not_elastic() -> None:
    model = autopar.compile(nn.Linear(4, 3), {"dp": 1}, layout="fsdp", backend="aot_eager")
    with pytest.raises(AutoparError, match="was not compiled with elastic="):
        autopar.elastic.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))


# ---- the supervisor ----------------------------------------------------------------------------------------------


def supervised(tmp_path: Path, program: str, n: int = 2, least: int = 1) -> tuple[int, list[str]]:
    (tmp_path / "program.py").write_text(program)
    said: list[str] = []
    return Supervisor(started([str(tmp_path / "program.py")]), n, least, said.append).run(30.0), said


def test_workers_that_end_well(tmp_path: Path) -> None:
    program = "import os\nassert os.environ['WORLD_SIZE'] == '2' and os.environ['RANK'] == os.environ['LOCAL_RANK'] in '01'"
    assert supervised(tmp_path, program) == (0, [])


def test_a_program_that_is_not_elastic_ends_as_a_whole(tmp_path: Path) -> None:
    code, said = supervised(tmp_path, "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(7)\ntime.sleep(60)")
    assert code == 1 and said[0] == "worker 1 (rank 1 of 2) is lost: ended with exit code 7"
    assert said[1].startswith("the run ends: a worker was lost before all had come to autopar.compile(elastic=...)")


def test_a_failed_collective_without_a_loss_begins_a_generation_with_the_same_members(tmp_path: Path) -> None:
    """And not for ever."""

    class Alive:
        pid = 0
        ended = False

        def poll(self) -> int | None:
            return 1 if self.ended else None

        def kill(self) -> None:
            self.ended = True

    said: list[str] = []
    s = Supervisor(lambda w, e: Alive(), 2, 1, said.append)
    s.members, s.processes = [0, 1], {0: Alive(), 1: Alive()}
    s._announce()
    generations = []
    for _ in range(4):
        s.store.add(words.failed(s.generation), 1)
        s._look()
        assert s.alarmed is not None
        s.alarmed -= 10.0
        going = s._look()
        generations.append((s.generation, list(s.members), going))
    assert generations == [(1, [0, 1], True), (2, [0, 1], True), (3, [0, 1], True), (3, [0, 1], False)]
    assert "failed 4 times one after the other, and nobody is missing" in said[-1]


@pytest.mark.parametrize(("code", "how"), [(0, ""), (3, "with exit code 3"), (-6, "by signal 6")])
def test_what_goes_wrong_after_training_is_told(code: int, how: str) -> None:
    class Ended:
        pid = 0

        def __init__(self, code: int) -> None:
            self.code = code

        def poll(self) -> int | None:
            return self.code

        def kill(self) -> None:
            pass

    said: list[str] = []
    s = Supervisor(lambda w, _: Ended(code if w else 0), 2, 1, said.append)
    for w in range(2):
        words.write(s.store, words.finished(w), [1, False])
    assert s.run(30.0) == (1 if code else 0)
    assert said == ([f"worker 1 had trained to the end, and then ended {how}"] if code else [])


def test_the_command() -> None:
    with pytest.raises(AutoparError, match="--min-procs 5 of --nproc-per-node 4"):
        main(["--nproc-per-node", "4", "--min-procs", "5", "train.py"])
    told = subprocess.run([sys.executable, "-m", "autopar.run", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--min-procs" in told


# ---- several nodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--nnodes", "2"], "--nnodes 2 without --coordinator"),
        (["--nnodes", "2", "--coordinator", "here"], "--coordinator here"),
        (["--nnodes", "2", "--coordinator", "here:70000"], "--coordinator here:70000"),
        (["--nnodes", "2", "--node-rank", "2", "--coordinator", "here:1"], "--node-rank 2 of --nnodes 2"),
        (["--min-procs", "3"], "--min-procs 3 of --nproc-per-node 2"),
    ],
)
def test_nodes_that_mean_nothing(given: list[str], said: str) -> None:
    with pytest.raises(AutoparError, match=said) as e:
        main(["--nproc-per-node", "2", *given, "program.py"])
    assert e.value.fix


def test_a_node_that_does_not_come() -> None:
    said: list[str] = []
    supervisor = Supervisor(started(["program.py"]), 1, 1, said.append, nodes=3, arrive_s=0.1)
    assert supervisor.run() == 1 and said == ["node 1, 2 of 3 has not come within 0.1 s"]


def test_two_nodes(tmp_path: Path) -> None:
    """Who is where; and a node whose worker fails ends with the run's status."""
    (tmp_path / "program.py").write_text(
        "import os, sys\nkeys = ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
        "open(sys.argv[1] + '/' + os.environ['RANK'], 'w').write(' '.join(os.environ[k] for k in keys))\nsys.exit(int(sys.argv[2]))"
    )
    for code in (0, 7):
        command = started([str(tmp_path / "program.py"), str(tmp_path), str(code)])
        supervisor = Supervisor(command, 1, 1, lambda line: None, nodes=2)
        agent = Agent(command, 2, 1, "127.0.0.1", supervisor.port, lambda line: None)
        with ThreadPoolExecutor() as pool:
            there = pool.submit(agent.run)
            assert (supervisor.run(30.0), there.result(30.0)) == (bool(code), bool(code))
        assert [(tmp_path / str(r)).read_text() for r in range(3)] == ["0 3 0 0 1", "1 3 1 0 2", "2 3 1 1 2"]


def test_an_agent_without_a_supervisor() -> None:
    said: list[str] = []
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent = Agent(started(["program.py"]), 1, 1, "127.0.0.1", store.port, said.append, arrive_s=0.2)
    del store
    assert agent.run() == 1 and "does not answer" in said[0]
