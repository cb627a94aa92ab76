"""What was compiled ahead: a second start compiles nothing, whatever has changed is named and made anew, and a file that others can write is not read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import autopar
from autopar.errors import AutoparError
from autopar.runtime import artifacts, bundle
from autopar.runtime.artifacts import Artifacts, folder_of
from autopar.runtime.bundle import Bundle, DamagedError

GRAPH, LIBRARY = "graphs/a", f"libraries/ab/{'c' * 40}.main.so"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = folder_of(tmp_path / "kept", "inductor")
    assert found is not None
    return found


def opened(folder: Path, name: str = "dp2.rank0", tells: bool = True, **facts: str) -> Artifacts:
    return Artifacts(folder, name, {"the model": "a", **facts}, torch.device("cpu"), writes=True, tells=tells)


class Inductor:
    """Stands in for Inductor's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: list[bytes] = []
        self.content = b"graph"
        monkeypatch.setattr(artifacts._torch, "taken_along", self.taken_along)
        monkeypatch.setattr(artifacts._torch, "put_back", lambda graphs, libraries: self.there.extend([*graphs, *libraries.values()]))

    def taken_along(self, no_headers: bool = False) -> Any:
        import contextlib

        return contextlib.nullcontext(artifacts._torch.Compiled(self.content, {LIBRARY.removeprefix("libraries/"): b"library"}))


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    return Inductor(monkeypatch)


def test_a_later_start_has_what_the_first_one_wrote(folder: Path, inductor: Inductor) -> None:
    first = opened(folder).program("train (4, 8)", "program", "plan")
    assert first.run(lambda: 3, writes=True) == 3 and inductor.there == []
    opened(folder).program("train (4, 8)", "program", "plan").run(lambda: 3, writes=True)
    assert inductor.there == [b"graph", b"library"]
    assert (folder / "dp2.rank0.zip").stat().st_mode & 0o777 == 0o600 and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda f, m: opened(f, **{"the model": "b"}), "the model"),
        (lambda f, m: (m.setattr(torch, "__version__", "9.9"), opened(f))[1], r"torch \(.* here\)|9\.9"),
        (lambda f, m: (m.setattr(artifacts, "_code", lambda: "0" * 64), opened(f))[1], "autopar"),
        (lambda f, m: (m.setattr(artifacts, "_processor", lambda: "another"), opened(f))[1], "the processor"),
        (lambda f, m: opened(f, name="dp4.rank0"), "other meshes.*dp2.rank0.*not dp4.rank0"),
        (lambda f, m: opened(f), "the program"),
        (lambda f, m: opened(f), "the plan"),
    ],
    ids=["model", "torch", "autopar", "processor", "mesh", "program", "plan"],
)
def test_what_is_stale_is_named_once_and_not_used(
    folder: Path, inductor: Inductor, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Artifacts], named: str
) -> None:
    opened(folder).program("train", "program", "plan").run(lambda: None, writes=True)
    inductor.content = b"another graph"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        later = changed(folder, monkeypatch)
        text, plan = ("other" if named == "the program" else "program"), ("other" if named == "the plan" else "plan")
        later.program("train", text, plan).run(lambda: None, writes=True)
    assert inductor.there == [] and len(said) == 1
    with pytest.warns(UserWarning, match=named):
        warnings.warn_explicit(said[0].message, UserWarning, "", 1)
    # It is made anew: the next start has it, and says nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Artifacts(
            folder, later.bundle.path.stem, {"the model": "b" if named == "the model" else "a"}, torch.device("cpu"), True, True
        )
        again.program("train", text, plan).run(lambda: None, writes=True)
    assert inductor.there == [b"another graph", b"library"]


def test_other_sizes_are_added_and_several_programs_of_a_kind_told_apart(folder: Path, inductor: Inductor) -> None:
    first = opened(folder)
    for kind, text in (("train 4", "p"), ("train 2", "p"), ("train 4", "after a change of Python state")):
        inductor.content = f"{kind} {text}".encode()
        first.program(kind, text, "plan").run(lambda: None, writes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = opened(folder)
        later.program("train 4", "p", "plan").run(lambda: None, writes=True)
        assert inductor.there[0] == b"train 4 p"
        later.program("train 4", "after a change of Python state", "plan").run(lambda: None, writes=True)
    assert inductor.there[2] == b"train 4 after a change of Python state" and len(later.programs) == 3


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
def test_files_that_others_can_write_are_not_read(folder: Path, inductor: Inductor, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(folder).program("train", "program", "plan").run(lambda: None, writes=True)
    path = folder / "dp2.rank0.zip"
    for target, mode in ((path, 0o620), (path, 0o602), (folder, 0o770), (folder, 0o777)):
        before = target.stat().st_mode
        target.chmod(mode)
        with pytest.raises(AutoparError, match="can be written by others") as e:
            opened(folder)
        assert "chmod go-w" in e.value.fix and str(target) in str(e.value)
        target.chmod(before)
    assert opened(folder).programs
    monkeypatch.setattr(bundle.os, "geteuid", lambda: folder.stat().st_uid + 7)
    if folder.stat().st_uid != 0:  # root's files are trusted
        with pytest.raises(AutoparError, match="belongs to user"):
            opened(folder)
    found = os.stat_result((0o100644, 1, 1, 1, folder.stat().st_uid + 8, 0, 0, 0, 0, 0))
    with pytest.raises(AutoparError, match="belongs to user"):
        bundle.refuse_open_to_others(path, found)


def test_an_open_file_made_between_start_and_first_use_is_not_read_either(folder: Path, inductor: Inductor) -> None:
    opened(folder).program("train", "program", "plan").run(lambda: None, writes=True)
    kept = opened(folder).program("train", "program", "plan")
    (folder / "dp2.rank0.zip").chmod(0o666)
    with pytest.raises(AutoparError, match="can be written by others"):
        kept.run(lambda: None, writes=True)
    assert inductor.there == []


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"not a zip file"], ids=["cut", "empty", "other"])
def test_a_damaged_file_is_said_and_made_anew(folder: Path, inductor: Inductor, damage: Callable[[bytes], bytes]) -> None:
    opened(folder).program("train", "program", "plan").run(lambda: None, writes=True)
    path = folder / "dp2.rank0.zip"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged"):
        opened(folder).program("train", "program", "plan").run(lambda: None, writes=True)
    assert inductor.there == [] and opened(folder).programs


def test_a_flipped_byte_of_a_member_is_found_when_it_is_read(folder: Path) -> None:
    b = Bundle(folder / "x.zip")
    b.write({"form": 1}, {GRAPH: os.urandom(4096)}, ())
    data = bytearray(b.path.read_bytes())
    at = data.index(GRAPH.encode()) + len(GRAPH) + 100
    data[at] ^= 0xFF
    b.path.write_bytes(data)
    with pytest.raises(DamagedError):
        Bundle(b.path).read([GRAPH])


def test_paths_are_those_of_libraries_alone(tmp_path: Path) -> None:
    with fresh_cache(), pytest.raises(AssertionError):
        artifacts._torch.put_back((), {"../../elsewhere.so": b""})


@pytest.mark.parametrize(
    ("said", "backend", "what"), [("", "inductor", "no path"), (3, "inductor", "no path"), ("a", "aot_eager", "compiles nothing")]
)
def test_arguments_that_make_no_sense_are_refused(
    said: Any, backend: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutoparError, match=what):
        folder_of(said, backend)
    (tmp_path / "file").touch()
    with pytest.raises(AutoparError, match="names a file"):
        folder_of(tmp_path / "file", "inductor")


@pytest.mark.usefixtures("one_process")
def test_inductor_compiles_nothing_that_is_in_the_bundle(tmp_path: Path) -> None:
    """With an empty folder of Inductor's at every start, and one library taken out of it before the last."""

    def start() -> tuple[float, dict[str, float]]:
        with fresh_cache():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
            x, y = torch.randn(4, 8), torch.randn(4, 4)
            compiled = autopar.compile(model, (1,), loss_fn=nn.functional.mse_loss, artifacts=tmp_path / "kept")
            loss = compiled(x, y)
            loss.backward()
            (step,) = compiled._programs.steps()
            halves = [step.stats["forward"], *step.stats["backward"].values()]
            libraries = list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))
            assert libraries
            return loss.item(), {k: sum(h[k] for h in halves) for k in ("hit", "miss")}

    loss, counts = start()
    assert counts == {"hit": 0, "miss": 2}
    written = (tmp_path / "kept" / "dp1.rank0.zip").stat().st_mtime_ns
    assert start() == (loss, {"hit": 2, "miss": 0})
    assert (tmp_path / "kept" / "dp1.rank0.zip").stat().st_mtime_ns == written and len(
        list((tmp_path / "kept" / "plans").glob("*.json"))
    ) == 1
