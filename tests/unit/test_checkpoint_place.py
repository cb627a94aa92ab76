"""Checkpoints on disks and behind URLs: an earlier one stays until the new one is whole, and what was cut short is no checkpoint."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autopar.checkpoint import dcp as checkpoint
from autopar.checkpoint.place import Local, Remote, place_of
from autopar.errors import CheckpointError


def _model(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.detach().fill_(value)
    return model


def _value(at: Any) -> float:
    model = _model(-1)
    checkpoint.load(at, model)
    values = {float(x) for p in model.parameters() for x in p.detach().flatten()}
    assert len(values) == 1
    return values.pop()


@pytest.fixture(params=["folder", "text", "url"])
def at(request: Any, tmp_path: Path) -> Any:
    return {"folder": tmp_path / "a" / "b", "text": str(tmp_path / "c"), "url": f"memory://{uuid.uuid4().hex}/b"}[request.param]


def test_a_save_over_another(at: Any) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.load(at, _model(0))
    for value in (1.0, 2.0, 3.0):
        checkpoint.save(at, _model(value), step=int(value))
        assert _value(at) == value
        names = place_of(at).names()
        assert len(names) == 2 and checkpoint.MANIFEST in names, "something is left of an earlier one"


def _fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["put", "write"])
def test_a_save_that_fails(at: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk full: the earlier one is there, and the room that the new one took is free again."""
    checkpoint.save(at, _model(1))
    with monkeypatch.context() as m:
        if what == "put":
            m.setattr(type(place_of(at)), "put", _fail)
        else:
            m.setattr(checkpoint, "_sum", _fail)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(at, _model(2))
    assert _value(at) == 1 and len(place_of(at).names()) == 2


def test_a_first_save_that_was_cut_short(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a killed process leaves it: nothing is removed by itself."""
    with monkeypatch.context() as m:
        m.setattr(type(place_of(at)), "put", _fail)
        m.setattr(type(place_of(at)), "remove", _fail)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(at, _model(2))
    assert [n for n in place_of(at).names() if checkpoint.DATA.fullmatch(n)]
    with pytest.raises(CheckpointError, match="incomplete: its manifest, which is written last, is missing"):
        checkpoint.load(at, _model(0))
    checkpoint.save(at, _model(3))
    assert _value(at) == 3 and len(place_of(at).names()) == 2


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "autopar-notes").mkdir()
    (tmp_path / "mine.distcp").write_text("x")
    for value in (1, 2):
        checkpoint.save(tmp_path, _model(value))
    assert (tmp_path / "autopar-notes").is_dir() and (tmp_path / "mine.distcp").read_text() == "x" and _value(tmp_path) == 2


def test_places(tmp_path: Path) -> None:
    assert isinstance(place_of("s3.bucket/x"), Local) and isinstance(place_of("memory://x"), Remote)
