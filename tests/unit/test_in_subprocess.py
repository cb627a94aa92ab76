"""Two results at once: the same results and errors as one after the other, whatever becomes of the forked copy, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.capture import in_subprocess as in_subprocess
from autopar.errors import AutoparError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a command forks on Linux only")
HERE = os.getpid()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_subprocess, "PATIENCE_S", 60.0)


def in_the_copy(do: Callable[[], Any]) -> Callable[[], str]:
    def find() -> str:
        return str(do()) if os.getpid() != HERE else "found here"

    return find


def test_one_of_two_runs_in_a_copy() -> None:
    first, second = in_subprocess.beside(lambda: (os.getpid(), "a"), lambda: (os.getpid(), "b"))
    assert first[0] != second[0] == HERE and (first[1], second[1]) == ("a", "b")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "do",
    [
        lambda: os._exit(0),
        lambda: os._exit(7),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: os.kill(os.getpid(), signal.SIGINT),
        lambda: sys.exit("it says so"),
        lambda: 1 / 0,
    ],
)
def test_a_copy_that_ends_otherwise(do: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert in_subprocess.beside(in_the_copy(do), lambda: 1) == ("found here", 1)
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_subprocess, "PATIENCE_S", 0.1)
    assert in_subprocess.beside(in_the_copy(lambda: time.sleep(60)), lambda: 1) == ("found here", 1)
    assert not multiprocessing.active_children()


def test_what_does_not_pickle() -> None:
    first, _ = in_subprocess.beside(lambda: lambda: HERE, lambda: 1)
    assert first() == HERE


def test_errors_are_those_of_one_after_the_other() -> None:
    def bad(what: str) -> Callable[[], Any]:
        def find() -> None:
            raise AutoparError(what, where="there", fix="do")

        return find

    for first, second, said in ((bad("1"), lambda: 2, "1"), (lambda: 1, bad("2"), "2"), (bad("1"), bad("2"), "1")):
        with pytest.raises(AutoparError) as e:
            in_subprocess.beside(first, second)
        assert (e.value.what, e.value.where, e.value.fix) == (said, "there", "do")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            in_subprocess.beside(lambda: time.sleep(60), lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not multiprocessing.active_children()


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_copy_ends_with_its_command(tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    script = tmp_path / "command.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from autopar.capture import in_subprocess\n"
        "from autopar.cli import main as cli\n"
        "def copy():\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "    print('begun', file=sys.__stderr__, flush=True)\n"
        "    time.sleep(60)\n"
        "cli.app.command('wait')(lambda: print(in_subprocess.beside(copy, lambda: time.sleep(60))))\n"
        "sys.argv = ['autopar', 'wait']\n"
        "cli.main()\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None and p.stderr.readline() == "begun\n"
        p.send_signal(number)  # to it alone: a terminal would tell the copy too
        out, err = p.communicate(timeout=30)
    assert (p.returncode, out, err) == ((130, "", "interrupted\n") if number == signal.SIGINT else (-number, "", ""))
    until = time.monotonic() + 10
    while runs(pid.read_text()):
        assert time.monotonic() < until, "the copy outlives its command"
        time.sleep(0.05)


def test_a_signal_to_the_copy_is_none_to_its_command() -> None:
    script = (
        "import os, signal, sys, time\n"
        "from autopar.capture import in_subprocess\n"
        "from autopar.cli import main as cli\n"
        "here = os.getpid()\n"
        "def copy():\n"
        "    if os.getpid() != here:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "    return 'found here'\n"
        "cli.app.command('wait')(lambda: print(in_subprocess.beside(copy, lambda: time.sleep(1))))\n"
        "sys.argv = ['autopar', 'wait']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "('found here', None)\n", "")
