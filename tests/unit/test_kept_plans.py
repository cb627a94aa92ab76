"""Plans kept on disk: a second start finds its plan, any other setting does not, a damaged file is not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner import kept_plans, request
from autopar.planner.kept_plans import folder
from autopar.text.progress import told
from tests.plans import made

Step = Callable[..., Plan]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_process: None) -> Step:
    """A start of a program: the plan of its first step."""
    monkeypatch.setenv(kept_plans.VARIABLE, str(tmp_path / "kept"))

    def step(width: int = 16, **said: object) -> Plan:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))
        asked = {"loss_fn": nn.functional.mse_loss, "backend": "aot_eager", "cluster": "h100:1", **said}
        compiled = autopar.compile(model, (1,), example_inputs=(torch.ones(4, 8), torch.ones(4, 4)), **asked)
        assert compiled.plan is not None
        return compiled.plan

    return step


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every time that something is planned."""
    calls: list[str] = []
    real = request.plan_graph

    def plan_graph(*args: object, **kw: object) -> object:
        calls.append("planned")
        return real(*args, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(request, "plan_graph", plan_graph)
    return calls


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").rglob("*.json"))


def test_the_second_start_does_not_plan(start: Step, planned: list[str], tmp_path: Path) -> None:
    first, second = start(), start()
    assert planned == ["planned"] and dumps(first) == dumps(second)
    assert len(files(tmp_path)) == 1 and not list((tmp_path / "kept").rglob("*.tmp"))
    assert second.frontier(2).points  # it still knows its program


@pytest.mark.parametrize(
    "said",
    [{"width": 32}, {"cluster": "a100:1"}, {"memory": 2e9}, {"memory": "least"}, {"optimizer": "sgd"}, {"grad_accumulation": 2},
     {"options": {"gap": 0.2}}, {"precision": "bf16"}, {"backend": "inductor"}],
    ids=str,
)  # fmt: skip
def test_what_a_plan_depends_on_is_in_its_name(start: Step, planned: list[str], tmp_path: Path, said: dict[str, object]) -> None:
    start()
    start(**said)
    assert len(planned) == 2 and len(files(tmp_path)) == 2


def test_other_code_has_other_plans(start: Step, planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(kept_plans, "code", lambda: "of another version")
    start()
    assert len(planned) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_a_damaged_file_is_not_believed(start: Step, planned: list[str], tmp_path: Path, damage: str) -> None:
    good = start()
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    foreign = dumps(made("tiny", {"dp": 2}, "fsdp")).encode()
    path.write_bytes(
        {
            "cut": whole[:-100],
            "changed": whole.replace(b"mm", b"bm", 1),
            "empty": b"",
            "other": kept_plans._sum(foreign) + b"\n" + foreign,
        }[damage]
    )
    assert path.read_bytes() != whole
    with pytest.warns(UserWarning, match="is ignored, and made again"):
        again = start()
    assert len(planned) == 2 and again.ops == good.ops
    start()
    assert len(planned) == 2, "it was written anew"


def test_a_folder_that_cannot_be_written_costs_a_warning(
    start: Step, planned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(kept_plans.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="plan cannot be kept"):
        start()
    assert len(planned) == 1


@pytest.mark.parametrize("off", ["0", "off"])
def test_it_can_be_switched_off(start: Step, planned: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: str) -> None:
    monkeypatch.setenv(kept_plans.VARIABLE, off)
    start(), start()
    assert len(planned) == 2 and not files(tmp_path)


def test_where_plans_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kept_plans.VARIABLE)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder() == tmp_path / "xdg" / "autopar"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # which the specification says to ignore
    assert folder() == tmp_path / ".cache" / "autopar"


def test_a_terminal_alone_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_LOG", raising=False)
    with told("captured"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with told("captured"):
        pass
    with told("planned", here=False):
        pass
    assert capsys.readouterr().err == "autopar: captured in 0.0 s\n"
