"""A `save_safetensors` that is cut short leaves the earlier files as they were, and the next one clears up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.checkpoint import safetensors as safetensors_io
from autopar.checkpoint.safetensors import load_safetensors, save_safetensors


@pytest.mark.parametrize("largest", [5 * 1000**3, 300], ids=["one file", "many"])
def test_cut_short(tmp_path: Path, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    save_safetensors(model, tmp_path, largest)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    real, calls = safetensors_io.save_file, []

    def full(tensors: Any, file: Path, **kwargs: Any) -> None:
        calls.append(file)
        if len(calls) == (1 if largest > 300 else 2):
            file.write_bytes(b"half of it")
            raise OSError("no space left on device")
        real(tensors, file, **kwargs)

    monkeypatch.setattr(safetensors_io, "save_file", full)
    with pytest.raises(Exception, match="no space left"):
        save_safetensors(model, tmp_path, largest)
    monkeypatch.undo()
    load_safetensors(model, tmp_path)
    for n, t in model.state_dict().items():
        assert torch.equal(t, before[n]), n
    save_safetensors(model, tmp_path, largest)
    assert not list(tmp_path.glob("*.writing"))
