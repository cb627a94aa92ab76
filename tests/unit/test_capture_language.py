"""What dynamo refuses unless asked is captured; what cannot be is refused by an error of ours that names the user's line."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.errors import CaptureError
from autopar.graph.graph import Graph
from autopar.rules import lookup


def graph(model: nn.Module, *inputs: Tensor, train: bool = True) -> Graph:
    call = Call.of(inputs, {})
    return describe(capture(model.train(train), call, tuple((tuple(t.shape), t.dtype) for t in inputs)))


def targets(g: Graph) -> Counter[str]:
    return Counter(op.target for op in g.ops)


class Scaled(nn.Module):
    """A weight times what a function gives."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.fn(x)).sum()


class Recurrent(nn.Module):
    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, num_layers=3, **kwargs)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].sum()


def test_recurrent_layers_drop_out_between_each_other() -> None:
    assert targets(graph(Recurrent(dropout=0.5), torch.ones(2, 3, 4)))["aten.native_dropout.default"] == 2
    assert not targets(graph(Recurrent(dropout=0.5), torch.ones(2, 3, 4), train=False))["aten.native_dropout.default"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_recurrent_layers_are_operators_with_rules(dtype: torch.dtype) -> None:
    """torch has one operator for a layer of float32, of CPUs alone."""
    g = graph(Recurrent(bidirectional=True, proj_size=2).to(dtype), torch.ones(2, 3, 4, dtype=dtype))
    assert not [op.target for op in g.ops if lookup(op).is_fallback]


FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "indices": lambda x: torch.triu_indices(4, 4) + torch.tril_indices(4, 4),
    "windows": lambda x: torch.hann_window(8) + torch.kaiser_window(8) + torch.bartlett_window(8, periodic=False),
    "frequencies": lambda x: torch.fft.fftfreq(8) * torch.logspace(0, 1, 8),
    "diagonals": lambda x: torch.diag_embed(x) + torch.block_diag(x, x)[:4, :4].rot90(),
    "classes": lambda x: F.one_hot(x.long()[0], 4),
    "norm": lambda x: torch.norm(x, dim=1) + F.pairwise_distance(x, x + 1),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_have_rules(name: str) -> None:
    g = graph(Scaled(FACTORIES[name]), torch.ones(4, 4))
    assert not [op.target for op in g.ops if lookup(op).is_fallback]


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "nonzero": lambda x: x.nonzero().float(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: x[0].long().bincount().float(),
    "combinations": lambda x: torch.combinations(x[0]),
    "item": lambda x: x * x.sum().item(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "repeated": lambda x: x.repeat_interleave(x[0].long(), dim=1),
    "settled later": lambda x: x.repeat_interleave(x[0].long(), dim=1).expand(4, 4),
    "packed": lambda x: nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), (x[:, 0] + 1).long(), enforce_sorted=False).data,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_data_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="cannot be captured") as error:
        graph(Scaled(UNKNOWN[name]), torch.ones(4, 4))
    assert "where:" in str(error.value) and "what to do:" in str(error.value)


def test_torch_is_left_as_it_was() -> None:
    from torch._decomp import decompositions
    from torch._dynamo import config

    def state() -> tuple[object, ...]:
        kernels = (torch.ops.aten.ctc_loss.IntList.py_kernels, torch.ops.aten.embedding_bag.padding_idx.py_kernels)
        return (
            config.allow_rnn, decompositions._rnn_helper, transformer._detect_is_causal_mask, F.embedding_bag,
            torch.backends.mha.get_fastpath_enabled(), *(dict(k) for k in kernels),
        )  # fmt: skip

    before = state()
    graph(Recurrent(), torch.ones(2, 3, 4))
    with pytest.raises(CaptureError):
        graph(Scaled(UNKNOWN["nonzero"]), torch.ones(4, 4))
    assert state() == before


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "ignore_logging_functions"), reason="torch leaves out a logger's lines alone")
def test_warnings_are_left_out() -> None:
    def warned(x: Tensor) -> Tensor:
        warnings.warn("this will go", FutureWarning, stacklevel=2)
        return x.exp()

    assert targets(graph(Scaled(warned), torch.randn(3)))["aten.exp.default"] == 1


class Moved(nn.Module):
    """Sets a buffer to what it is, another one to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(x.device, x.dtype)
        self.seen = self.table + x
        return (self.weight * self.table * self.seen).sum()


def test_a_buffer_that_stays_as_it_is_is_no_update() -> None:
    assert set(graph(Moved(), torch.randn(3)).buffer_updates) == {"seen"}
