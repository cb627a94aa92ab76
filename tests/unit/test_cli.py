"""The command line: what it prints where, and its exit codes. Planning itself is replaced: here is tested what it is given."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli.main import app
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.plan.schema import save
from autopar.planner.explain import Explanation
from autopar.planner.infeasible import InfeasibleError
from autopar.text.sizes import SizeError, format_bytes, parse_bytes
from tests.plans import full, made

PLAN = ["plan", "qwen3-0.6b", "--cluster", "h100:1x8", "--batch", "16", "--seq", "512"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def a_plan() -> Plan:
    return full(made("tiny", {"dp": 2, "tp": 2}, "fsdp+tp"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    save(a_plan(), tmp_path / "a.json")
    return str(tmp_path / "a.json")


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replaces what plans; returns the list of what it will have been called with."""

    def replace(raises: BaseException | None = None) -> list[Any]:
        calls: list[Any] = []

        def plan(*args: Any, progress: Callable[[str, float], None], **kwargs: Any) -> Plan:
            calls.append((args, kwargs))
            progress("capture", 1.25)
            if raises is not None:
                raise raises
            return a_plan()

        def explain(*args: Any, **kwargs: Any) -> Explanation:
            plan(*args, **kwargs)
            return Explanation("costs", "because", 1.0, 2.0)

        monkeypatch.setitem(sys.modules, "autopar.planner.offline", types.SimpleNamespace(explain=explain))
        monkeypatch.setitem(sys.modules, "autopar.search.everywhere", types.SimpleNamespace(plan=plan))
        return calls

    return replace


# ---- looking at plans ----------------------------------------------------------------------------------------------


def test_show(file: str) -> None:
    r = run("show", file)
    assert (r.exit_code, r.stderr) == (0, "") and r.stdout == a_plan().text() + "\n"


def test_diff_exits_as_diff_does(file: str, tmp_path: Path) -> None:
    r = run("diff", file, file)
    assert (r.exit_code, r.output) == (0, "")
    other = tmp_path / "b.json"
    save(made("tiny", {"dp": 2, "tp": 2}, "ddp"), other)
    r = run("diff", file, str(other))
    assert r.exit_code == 1 and "layout: fsdp+tp -> ddp" in r.stdout and r.stderr == ""
    assert run("diff", file, str(tmp_path / "none.json")).exit_code == 2


def test_damaged_files_are_told_not_traced(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema_version": 1, "plan"')
    r = run("show", str(bad))
    assert r.exit_code == 2 and r.stdout == ""
    what, where, fix = r.stderr.splitlines()
    assert what == "error: The plan cannot be read: it ends in the middle, after 28 bytes"
    assert where == f"  where: {bad}" and fix.startswith("  fix: ")


# ---- planning ------------------------------------------------------------------------------------------------------


def test_plan_passes_everything_on(planning: Callable[..., list[Any]], tmp_path: Path) -> None:
    calls = planning()
    out = tmp_path / "plan.json"
    options = [
        "--mesh",
        "4x2",
        "--precision",
        "fp32",
        "--optimizer",
        "sgd",
        "--grad-accumulation",
        "4",
        "--micro-batches",
        "auto",
        "--memory",
        "70GB",
        "--layout",
        "fsdp",
        "--offload",
        "host",
        "--loss-head",
        "chunked",
        "--imbalance",
        "1.5",
    ]
    r = run(*PLAN, *options, "-v", "--time-limit", "30", "--gap", "0.02", "--layers", "2", "-o", str(out))
    assert r.exit_code == 0, r.stderr
    ((model, inputs, cluster, mesh), kwargs) = calls[0]
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config.num_hidden_layers == 2
    assert (inputs, cluster, mesh) == ({"input_ids": (16, 512), "labels": (16, 512)}, "h100:1x8", "4x2")
    assert kwargs == {
        "precision": "fp32", "optimizer": "sgd", "grad_accumulation": 4, "micro_batches": "auto", "memory": 70 * 10**9, "layout": "fsdp", "options": {"seconds": 30.0, "gap": 0.02},
        "in_subprocess": False, "offload": "host", "loss_head": "chunked", "imbalance": 1.5,
    }  # fmt: skip
    assert r.stdout == a_plan().text() + "\n" and "capture: 1.2 s" in r.stderr
    assert Plan.load(out) == a_plan()


def test_plan_defaults(planning: Callable[..., list[Any]]) -> None:
    calls = planning()
    r = run(*PLAN, "-o", "-")
    assert r.exit_code == 0 and Plan.loads(r.stdout) == a_plan()
    ((model, _, _, mesh), kwargs) = calls[0]
    assert model.config.num_hidden_layers == 28 and mesh is None
    said = {"precision": "bf16", "optimizer": "adamw", "grad_accumulation": 1, "micro_batches": "auto"}
    assert kwargs == {
        **said,
        "memory": None,
        "offload": None,
        "layout": None,
        "options": None,
        "in_subprocess": False,
        "loss_head": "auto",
        "imbalance": 1.0,
    }
    run(*PLAN, "--mesh", "dp=4,tp=2")
    assert calls[1][0][3] == {"dp": 4, "tp": 2}
    # The smallest peak would be that of one sample at a time.
    run(*PLAN, "--memory", "least")
    assert calls[2][1]["micro_batches"] == 1


def test_explain(planning: Callable[..., list[Any]]) -> None:
    calls = planning()
    r = run("explain", PLAN[1], "mlp.gate_proj", "tp:out", *PLAN[2:], "--mesh", "4x2", "--layers", "2")
    assert (r.exit_code, r.stdout) == (0, "because\n")
    ((model, inputs, cluster, mesh), kwargs) = calls[0]
    assert (
        model.config.num_hidden_layers == 2
        and (cluster, mesh) == ("h100:1x8", "4x2")
        and inputs == {"input_ids": (16, 512), "labels": (16, 512)}
    )
    assert (kwargs["op"], kwargs["placement"], kwargs["precision"]) == ("mlp.gate_proj", "tp:out", "bf16")
    planning(AutoparError("The program has no operator 'x'", where="OPERATOR", fix="did you mean y?"))
    r = run("explain", PLAN[1], "x", "tp:out", *PLAN[2:])
    assert r.exit_code == 2 and r.stderr.endswith("error: The program has no operator 'x'\n  where: OPERATOR\n  fix: did you mean y?\n")


def test_infeasible_has_a_code_of_its_own(planning: Callable[..., list[Any]]) -> None:
    planning(InfeasibleError("memory in backward of layer 3", 1.5e9, "give 72 GB or more devices"))
    r = run(*PLAN)
    assert r.exit_code == 3 and r.stdout == ""
    assert "error: No plan fits: memory in backward of layer 3; 1.50 GB too much\n  fix: give 72 GB or more devices\n" in r.stderr


def test_interrupted(planning: Callable[..., list[Any]], tmp_path: Path) -> None:
    planning(KeyboardInterrupt())
    r = run(*PLAN, "-o", str(tmp_path / "plan.json"))
    assert r.exit_code == 130 and "Traceback" not in r.output and not list(tmp_path.iterdir())


def test_a_defect_keeps_its_traceback(planning: Callable[..., list[Any]]) -> None:
    planning(RuntimeError("a defect"))
    r = run(*PLAN)
    assert isinstance(r.exception, RuntimeError) and r.exit_code == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qwen3-0.6b": "qwen-0.6b"}, "did you mean qwen3-0.6b"),
        ({"qwen3-0.6b": "gpt2", "512": "4096"}, "1024 tokens, not 4096"),
        ({"16": "0"}, "--batch"),
        ({"16": "many"}, "--batch"),
        ({"--cluster": "--clutser"}, "--clutser"),
        ({"+": "--memory", "++": "70 parsecs"}, "not one of kB"),
        ({"+": "--memory", "++": "-5GB"}, "not an amount of memory"),
        ({"+": "--mesh", "++": "0x8"}, "not a mesh"),
        ({"+": "--mesh", "++": "dp=4,dp=2"}, "not a mesh"),
        ({"+": "--mesh", "++": "dp=4 tp=2"}, "not a mesh"),
        ({"+": "--gap", "++": "2"}, "--gap"),
        ({"+": "-o", "++": "/nowhere/plan.json"}, "cannot be written"),
        ({"+": "-o", "++": "/"}, "cannot be written"),
        ({"+": "--layers", "++": "29"}, "28 layers, not 29"),
    ],
)
def test_wrong_calls(planning: Callable[..., list[Any]], change: dict[str, str], said: str) -> None:
    calls = planning()
    args = [change.get(a, a) for a in PLAN] + [v for k, v in change.items() if k.startswith("+")]
    r = run(*args)
    assert r.exit_code == 2 and r.stdout == "" and not calls
    assert said in " ".join(r.stderr.replace("│", " ").split()) and "Traceback" not in r.stderr


def test_as_a_module() -> None:
    """In a process of its own: the exit code reaches the shell, and no traceback the terminal."""
    done = subprocess.run([sys.executable, "-m", "autopar", "show", "nothing.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: The plan cannot be read")


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """Also where Python does not see the signal: in an import, in torch's compiler, in the solver."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import ctypes, sys, time\n"
        "from autopar.cli import main as cli\n"
        "def wait():\n"
        "    print('begun', file=sys.stderr, flush=True)\n"
        "    ctypes.CDLL(None).sleep(60)\n"  # outside of Python
        "cli.app.command('wait')(wait)\n"
        "sys.argv = ['autopar', 'wait']\n"
        "cli.main()\n"
    )
    with subprocess.Popen([sys.executable, str(slow)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None and p.stderr.readline() == "begun\n"
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30)
    assert (p.returncode, out, err) == (130, "", "interrupted\n")


def test_a_process_of_its_own_collects_little_garbage() -> None:
    """But one that it is called in keeps its ways, and has no forked child."""
    code = (
        "import atexit, gc\n"
        "from autopar.cli import main as cli, options as cli_options\n"
        "def look():\n"
        "    print(gc.isenabled(), gc.get_threshold()[0], gc.get_freeze_count(), cli_options.alone)\n"
        "cli.app.command('look')(look)\n"
        "cli.app(['look'], standalone_mode=False)\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "import sys; sys.argv = ['autopar', 'look']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True 700 0 False", "True 50000 0 True", "True"]


def test_looking_at_plans_needs_no_torch(file: str) -> None:
    code = f"import sys, autopar.cli.main as c; c.app(['show', {file!r}], standalone_mode=False); assert 'torch' not in sys.modules and 'ortools' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- amounts of memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("70GB", 70 * 10**9), ("64GiB", 64 << 30), ("512 MiB", 512 << 20), ("1.5kb", 1500), ("80e9", 80 * 10**9), ("123", 123), ("7B", 7), ("1tb", 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "70G", "1e99GB", "-1", "nan", "inf", "0", "1..2GB", "70 GB please", "1" * 400, "٣GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(SizeError) as e:
        parse_bytes(text, "--memory")
    assert e.value.where == "--memory" and "70GB" in e.value.fix


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1.5e9, 2e18)] == ["0 B", "999 B", "1.00 kB", "1.50 GB", "2000.00 PB"]
