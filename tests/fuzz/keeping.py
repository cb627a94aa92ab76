"""Programs that failed, as text: tests from then on (`kept/`), or what is still to be mended (`open/`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.program import load
from tests.fuzz.settings import Setting

HERE = Path(__file__).parent
KEPT, OPEN = HERE / "kept", HERE / "open"


def write(folder: Path, name: str, source: str, settings: Sequence[Setting], said: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')[:60]}.py"
    given = ", ".join(str(s.as_dict()) for s in settings)
    path.write_text(f'"""{said}"""\n\n{source}\n\nSETTINGS = [{given}]\n')
    return path


def read(path: Path) -> tuple[str, list[Setting]]:
    source = path.read_text()
    return source, [Setting.of(s) for s in load(source).settings]
