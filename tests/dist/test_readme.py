"""What README and the quickstart have a reader run first: as it stands there, on two processes, from an empty directory; and it is what one process does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import readme
from tests.documents import page

Torchrun = Callable[..., str]


def script_of(name: str, folder: Path) -> Path:
    """The page's script, as a file."""
    text = next(b.text for b in page(name).python() if "init_process_group" in b.text)
    path = folder / "train.py"
    path.write_text(text)
    return path


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^(?:step )?\d+:? (?:loss )?([\d.]+)$", printed, re.M)]


def test_readme_script_is_one_process_on_two(torchrun: Torchrun, tmp_path: Path) -> None:
    script = script_of("README.md", tmp_path)
    printed = torchrun(str(script), processes=2)
    found = losses(printed)
    assert len(found) == 10 and found[-1] < found[0] - 1, "it does not learn"
    assert "plan: layout planned on mesh dp=2" in printed and "model.layers.*  (2 layers)" in printed
    assert (tmp_path / "checkpoint" / "autopar.json").exists()

    # The same script without the one line, and without what only a compiled model has. It still learns the source of train.py.
    only = r"^(model = autopar\.compile\(|autopar\.checkpoint\.|if dist\.get_rank\(\) == 0:$|    print\(model\.plan\)).*\n"
    text, left_out = re.subn(only, "", script.read_text(), flags=re.M)
    assert left_out == 4
    plain = tmp_path / "plain.py"
    plain.write_text(text.replace("__file__", '"train.py"'))
    assert losses(torchrun(str(plain), processes=1)) == pytest.approx(found, abs=2e-4), "not the losses of one process"


def test_quickstart_script_runs_as_architecture_and_debugging_tell(
    torchrun: Torchrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_DUMP", "dump")
    printed = torchrun(str(script_of("docs/quickstart.md", tmp_path)), processes=2)
    assert len(losses(printed)) == 5
    # The path of one tensor in docs/architecture.md, the files and lines in docs/debugging.md.
    assert "mm  dp:out" in printed and "mm  dp:in" in printed
    (captured, activation), (sharded, shard) = _quoted()
    folder = tmp_path / "dump" / "0-train"
    assert activation in (folder / captured).read_text() and shard in (folder / sharded).read_text()
    named = re.findall(r"dump/0-train/([\w-]+\.txt)", "".join(b.text for b in page("docs/debugging.md").blocks))
    assert named and all((folder / n).exists() for n in named)


def _quoted() -> list[tuple[str, str]]:
    """Lines of dumped graphs that docs/debugging.md shows, by the file they are in."""
    block = next(b for b in page("docs/debugging.md").blocks if b.text.startswith("%gelu"))
    return list(zip(("00-captured.txt", "02-shard.txt"), block.text.strip().splitlines(), strict=True))


def test_readme_plan_is_what_its_command_prints() -> None:
    text = readme.README.read_text()
    assert readme.printed(readme.command(text)) == readme.shown(text), "run python -m benchmarks.readme"
