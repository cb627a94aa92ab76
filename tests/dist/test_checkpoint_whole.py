"""Whole tensors that one rank has, or wants."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import checkpoint
from autopar.checkpoint import whole
from autopar.errors import CheckpointError
from tests.dist.launch import run
from tests.dist.test_checkpoint import Mixed, _assert_same, _everything, _placed


class Largest(TorchDispatchMode):
    """The most bytes that one operator makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.made_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and out.is_floating_point():  # others carry what ranks tell each other
            self.made_bytes = max(self.made_bytes, out.numel() * out.element_size())
        return out


def _there_and_back(sizes: tuple[int, ...], source: int) -> None:
    torch.manual_seed(3)
    given = Mixed()
    given.norm.running_mean.normal_()
    want = dict(given.state_dict())
    for piece_bytes in (whole.PIECE_BYTES, 100):
        whole.PIECE_BYTES = piece_bytes
        model = _placed(dist.get_rank(), sizes)
        gone = model.gone.clone()
        with Largest() as largest:
            checkpoint.load_state_dict(model, want if dist.get_rank() == source else None, from_rank=source)
        _assert_same(_everything(model, None), want)
        assert any(isinstance(p, DTensor) for p in model.parameters()) and torch.equal(gone, model.gone) and model.tied is model.a.weight
        # The largest tensor has 416 bytes.
        assert 0 < largest.made_bytes <= piece_bytes
        back = checkpoint.state_dict(model, to_rank=source)
        if dist.get_rank() == source:
            _assert_same(back, want)
            assert list(back) == list(want) and back["tied"] is back["a.weight"]
        else:
            assert back == {}

    # Of a tied tensor one name is enough; the model's dtypes stay.
    model = _placed(7, sizes)
    fewer = {n: t.double() if t.is_floating_point() else t for n, t in want.items() if n != "a.weight"}
    checkpoint.load_state_dict(model, fewer if dist.get_rank() == source else {}, from_rank=source)
    _assert_same(_everything(model, None), want)


@pytest.mark.parametrize(("sizes", "source"), [((2,), 0), ((2, 2), 1)])
def test_there_and_back(sizes: tuple[int, ...], source: int) -> None:
    run(_there_and_back, 2 * len(sizes), sizes, source)


def _refused() -> None:
    model = _placed(0, (2,))
    before = {n: t.clone() for n, t in _everything(model, None).items()}
    state = dict(Mixed().state_dict())
    other = {"x": torch.ones(2), "scale": torch.ones(3)} | {n: t for n, t in state.items() if n not in ("b.bias", "scale")}
    mine = dist.get_rank() == 0
    with pytest.raises(
        CheckpointError, match=r"missing: b\.bias; unknown to the model: x; of another shape: scale \(\[3\] given, \[\] here\)"
    ):
        checkpoint.load_state_dict(model, other if mine else None)
    with pytest.raises(CheckpointError, match="rank 1 passes tensors, too"):
        checkpoint.load_state_dict(model, state)
    with pytest.raises(CheckpointError, match="missing: scale, tied"):
        checkpoint.load_state_dict(model, None)
    with pytest.raises(CheckpointError, match="there are ranks 0 to 1"):
        checkpoint.load_state_dict(model, state if mine else None, from_rank=2)
    with pytest.raises(CheckpointError, match="there are ranks 0 to 1"):
        checkpoint.state_dict(model, to_rank=-1)
    _assert_same(_everything(model, None), before)


def test_what_does_not_match_is_refused_on_every_rank() -> None:
    run(_refused, 2)


def test_without_processes() -> None:
    model, given = Mixed(), Mixed()
    checkpoint.load_state_dict(model, given.state_dict())
    _assert_same(checkpoint.state_dict(model), dict(given.state_dict()))
