"""What does not fit is said in terms of what the user wrote: devices of the mesh, the batch, modules of the model. Never as a size of memory that no device has."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli.main import app
from autopar.errors import LayoutError, MeshError
from autopar.hardware.cluster import Cluster
from autopar.planner.axes import better_batches, divides_poorly, refuse_unfilled
from autopar.planner.infeasible import InfeasibleError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).square().mean()


class AcrossTheBatch(nn.Module):
    """Convolves over the samples of a batch: what one rank makes needs its neighbours'."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.t().unsqueeze(0)).square().mean()


def inputs(batch: int, width: int = 256) -> dict[str, torch.Tensor]:
    return {"x": torch.empty(batch, width, device="meta")}


@pytest.mark.parametrize("axes", [{"dp": 7, "tp": 9}, {"dp": 5, "tp": 13}, {"dp": 128}])
def test_a_mesh_that_has_not_the_clusters_devices_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(MeshError, match=r"has (63|65|128) devices, not the 64 of h100:8x8") as e:
        refuse_unfilled(axes, Cluster.of("h100:8x8"))
    assert "8x8" in e.value.fix
    refuse_unfilled({"a": 2, "b": 32}, Cluster.of("h100:8x8"))


def test_it_is_refused_before_torch_is_imported() -> None:
    code = (
        "import atexit, sys\n"
        "from autopar.cli import main as cli\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv = 'autopar plan gpt2 --cluster h100:8x8 --mesh 7x9 --batch 64 --seq 64'.split()\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n") and "has 63 devices, not the 64 of h100:8x8" in done.stderr


def test_a_batch_that_cannot_be_split_is_what_is_wrong() -> None:
    with pytest.raises(InfeasibleError, match="a batch of 65 can be split over none of dp=8") as e:
        autopar.plan(Two(), inputs(65), "h100:8", "8", memory=1e5)
    assert e.value.remedy == "a batch of 64 or 72, or a mesh whose sizes divide 65"
    with pytest.raises(InfeasibleError, match="too much") as e:
        autopar.plan(Two(), inputs(64), "h100:8", "8", memory=1e5)
    assert "a device would do" in e.value.remedy and "batch of" not in e.value.constraint


def test_a_plan_says_why_its_batch_is_not_split() -> None:
    assert "batch of 65 split 1 way: it does not divide over 8 devices" in autopar.plan(Two(), inputs(65), "h100:8", "8").text()
    assert "it does not divide" not in autopar.plan(Two(), inputs(64), "h100:8", "8").text()


@pytest.mark.parametrize(
    ("batch", "axes", "said", "better"),
    [
        (64, {"dp": 7, "tp": 9}, "a batch of 64 can be split over none of dp=7 x tp=9", "63 or 126"),
        (12, {"dp": 8}, "a batch of 12 can be split at most 4 ways of 8", "8 or 16"),
        (5, {"dp": 8}, "a batch of 5 can be split over none of dp=8", "8"),
        (4, {"dp": 8}, "", "8"), (16, {"dp": 8}, "", "16"), (1, {"dp": 8}, "", "8"), (7, {"dp": 1}, "", "7"), (0, {"tp": 4}, "", ""),
    ],
)  # fmt: skip
def test_which_batches_divide(batch: int, axes: dict[str, int], said: str, better: str) -> None:
    assert divides_poorly(batch, axes) == said and better_batches(batch, axes) == better


def test_a_layout_says_what_in_the_model_keeps_it_from_being() -> None:
    with pytest.raises(LayoutError) as e:
        autopar.plan(AcrossTheBatch(), inputs(64, 32), "h100:4", "4", layout="fsdp")
    assert e.value.what.startswith("layout fsdp cannot split mix over dp (4 devices): ") and "the batch" in e.value.what
    assert "aten.convolution" in e.value.where and e.value.fix == "no layout: the planner then splits each operator as it can"
    autopar.plan(AcrossTheBatch(), inputs(64, 32), "h100:4", "4")  # which it can
    with pytest.raises(LayoutError, match="splits the batch 4 ways, but it is 6") as e:
        autopar.plan(Two(), inputs(6), "h100:4", "4", layout="fsdp")
    assert e.value.fix.startswith("give a batch of 4 or 8, a mesh whose data axes have 2 devices in all, or no layout")


WRONG = [
    (["plan", "gpt2", "--cluster", "h100:8", "--batch", "8", "--seq", "64", "--layers", "1", *more], said)
    for more, said in (
        (["--precision", "int4"], "int4"), (["--optimizer", "adamx"], "adamx"), (["--layout", "zero"], "zero"), (["--offload", "moon"], "moon"),
        (["--mesh", "2x3"], "6 devices"), (["--mesh", "8x8"], "64 devices"), (["-v", "-q"], "opposite"), (["--json", "-o", "-"], "--json"),
        (["--memory", "nan"], "nan"),
    )
] + [
    (["plan", "gpt2", "--cluster", "h900:8", "--batch", "8", "--seq", "64"], "h900"),
    (["plan", "/no/such.json", "--cluster", "h100:8", "--batch", "8", "--seq", "64"], "/no/such.json"),
    (["predict", "gpt2", "--cluster", "h100:8", "--batch", "8", "--seq", "64", "--tp", "3"], "does not fill 8"),
    (["predict", "gpt2", "--cluster", "h100:8", "--batch", "9", "--seq", "64", "--layers", "1"], "9"),
    (["search", "gpt2", "--cluster", "nowhere.json", "--batch", "8", "--seq", "64"], "nowhere.json"),
    (["show", "."], "cannot be read"), (["diff", "a.json", "b.json"], "a.json"),
    (["explain", "gpt2", "nothing", "dp:out", "--cluster", "h100:8", "--batch", "8", "--seq", "64", "--layers", "1"], "nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "said"), WRONG, ids=[" ".join(a[:1] + a[8:]) for a, _ in WRONG])
def test_bad_arguments_end_with_status_2_and_what_to_do(args: list[str], said: str) -> None:
    r = CliRunner().invoke(app, args)
    assert r.exit_code == 2 and r.stdout == "", (r.output, r.exception)
    assert r.stderr.startswith("error: ") and "\n  fix: " in r.stderr and said in r.stderr and "Traceback" not in r.stderr
    assert isinstance(r.exception, SystemExit)
