"""Meta models on one process: what initialisers set is what a normally built model has, and what they draw has the distribution they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.errors import AutoparError
from autopar.runtime.init import distribute, materialize
from tests.models import ZOO

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def placements(name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    return (Shard(0) if shape else Replicate(),)


def on_meta(build: Callable[[], nn.Module], mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        module = build()
    materialize(module, mesh, placements, seed, CPU)
    return module


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    out = {}
    for n, p in module.named_parameters(remove_duplicate=False):
        assert isinstance(p, DTensor)
        out[n] = p.full_tensor().detach()
    return out


def ties(module: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for n, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), set()).add(n)
    return {frozenset(s) for s in names.values() if len(s) > 1}


def assert_distribution(x: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Kolmogorov and Smirnov's test: sqrt(n) times the distance of the distributions exceeds 1.95 once in a thousand times."""
    x = x.double().flatten().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf(x) - steps[:-1]).abs().max(), (cdf(x) - steps[1:]).abs().max())
    assert float(distance) * math.sqrt(n) < 1.95


def uniform(a: float, b: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ((x - a) / (b - a)).clamp(0, 1)


def normal(mean: float, std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.special.ndtr((x - mean) / std)


def truncated(mean: float, std: float, a: float, b: float) -> Callable[[torch.Tensor], torch.Tensor]:
    f = normal(mean, std)
    low, high = f(torch.tensor(a, dtype=torch.float64)), f(torch.tensor(b, dtype=torch.float64))
    return lambda x: ((f(x) - low) / (high - low)).clamp(0, 1)


# ---- against a normally built model --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ZOO) - {"lora"}))
def test_models(name: str, mesh: DeviceMesh) -> None:
    """Names, ties, requires_grad, buffers and every constant parameter are equal; drawn ones agree in mean and standard deviation."""
    torch.manual_seed(0)
    want, got = ZOO[name].build(), on_meta(ZOO[name].build, mesh)
    ours = whole(got)
    assert ties(got) == ties(want)
    assert [n for n, _ in got.named_parameters()] == [n for n, _ in want.named_parameters()]
    drawn = 0
    for n, p in want.named_parameters(remove_duplicate=False):
        x, y = p.detach(), ours[n]
        assert x.dtype == y.dtype and x.shape == y.shape and p.requires_grad == got.get_parameter(n).requires_grad
        if x.numel() == 1 or float(x.std()) == 0:
            assert torch.equal(x, y), n
            continue
        drawn += 1
        sigma, size = float(x.std()), x.numel()
        assert abs(float(y.mean() - x.mean())) < 5 * sigma * math.sqrt(2 / size), n
        assert abs(float(y.std()) - sigma) < 5 * sigma / math.sqrt(size), n
        zero_rows = (x.flatten(1) == 0).all(1) if x.dim() > 1 else torch.zeros(0)
        assert torch.equal(zero_rows, (y.flatten(1) == 0).all(1) if x.dim() > 1 else torch.zeros(0)), n
    assert drawn > 5
    mine = dict(got.named_buffers())
    assert mine.keys() == dict(want.named_buffers()).keys()
    for n, b in want.named_buffers():
        assert torch.equal(mine[n], b) and mine[n].dtype == b.dtype, n
    assert got.state_dict().keys() == want.state_dict().keys()


def test_lora(mesh: DeviceMesh) -> None:
    model = on_meta(ZOO["lora"].build, mesh)
    for n, p in whole(model).items():
        if "lora_A" in n:
            assert_distribution(p, uniform(-1 / math.sqrt(p.shape[1]), 1 / math.sqrt(p.shape[1])))
        assert ("lora_B" in n) == (not p.any())
        assert model.get_parameter(n).requires_grad == ("lora_" in n)


def test_a_materialised_model_runs_as_it_should(mesh: DeviceMesh) -> None:
    """The rotary tables and all else that a forward pass reads are there: with the same weights, the loss is the same."""
    for name in ("llama", "gemma3", "bert"):
        torch.manual_seed(0)
        one, ours = ZOO[name].build().eval(), on_meta(ZOO[name].build, mesh).eval()
        one.load_state_dict({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in ours.state_dict().items()})
        plain = ZOO[name].build().eval()
        for n, m in plain.named_modules():
            other = ours.get_submodule(n)
            m._buffers.update(other._buffers)
            m._parameters.update({k: None if p is None else nn.Parameter(p.full_tensor()) for k, p in other._parameters.items()})
        batch = ZOO[name].inputs(2, 16)
        assert torch.equal(one(**batch).loss, plain(**batch).loss)


# ---- torch's layers ------------------------------------------------------------------------------------------------


def test_distributions(mesh: DeviceMesh) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunc = nn.Parameter(torch.empty(300, 400))
            self.wide = nn.Parameter(torch.empty(300, 400, dtype=torch.float64))
            self.coin = nn.Parameter(torch.empty(300, 400))
            self.kaiming = nn.Parameter(torch.empty(300, 400))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.trunc, mean=0.1, std=0.5, a=-0.4, b=1.2)
            nn.init.normal_(self.wide, 3.0, 2.0)
            with torch.no_grad():
                self.coin.bernoulli_(0.3)
            nn.init.kaiming_normal_(self.kaiming)

    x = whole(on_meta(lambda: nn.ModuleDict({"l": nn.Linear(300, 400), "e": nn.Embedding(300, 400), "o": Own()}), mesh))
    assert_distribution(x["l.weight"], uniform(-1 / math.sqrt(300), 1 / math.sqrt(300)))
    assert_distribution(x["l.bias"], uniform(-1 / math.sqrt(300), 1 / math.sqrt(300)))
    assert_distribution(x["e.weight"], normal(0, 1))
    assert_distribution(x["o.trunc"], truncated(0.1, 0.5, -0.4, 1.2))
    assert_distribution(x["o.wide"], normal(3, 2))
    assert_distribution(x["o.kaiming"], normal(0, math.sqrt(2 / 400)))
    assert set(x["o.coin"].unique().tolist()) == {0.0, 1.0}
    assert abs(float(x["o.coin"].mean()) - 0.3) < 4 * math.sqrt(0.21 / 120_000)
    for a, b in [
        (x["e.weight"], x["o.kaiming"]),
        (x["e.weight"], x["o.wide"]),
        (x["e.weight"][:, 1:], x["e.weight"][:, :-1]),
        (x["e.weight"][1:], x["e.weight"][:-1]),
        (x["e.weight"], x["o.kaiming"].abs()),
    ]:
        r = torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1]
        assert abs(float(r)) < 4 / math.sqrt(a.numel())


def test_seed_and_name_choose_the_draws(mesh: DeviceMesh) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(20, 20), "b": nn.Linear(20, 20)})

    one, again, other = (whole(on_meta(build, mesh, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one)
    assert not torch.equal(one["a.weight"], one["b.weight"])
    alone = whole(on_meta(lambda: nn.ModuleDict({"b": nn.Linear(20, 20)}), mesh))
    assert torch.equal(alone["b.weight"], one["b.weight"])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(50, 6, padding_idx=7),
    "layer norm": lambda: nn.LayerNorm(12),
    "group norm": lambda: nn.GroupNorm(3, 12),
    "rms norm": lambda: nn.RMSNorm(12),
    "batch norm": lambda: nn.BatchNorm2d(12),
    "batch norm without statistics": lambda: nn.BatchNorm1d(12, track_running_stats=False),
    "convolution": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose1d(4, 6, 3),
    "attention": lambda: nn.MultiheadAttention(16, 4),
    "attention of other widths": lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=8, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 4, 1, 1, 32),
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True, proj_size=3),
    "gru cell": lambda: nn.GRUCell(5, 7),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "prelu": lambda: nn.PReLU(4),
    "bfloat16": lambda: nn.Linear(40, 50, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    want, module = LAYERS[name](), on_meta(LAYERS[name], mesh)
    got = whole(module)
    assert list(got) == [n for n, _ in want.named_parameters(remove_duplicate=False)]
    for n, p in want.named_parameters():
        assert got[n].dtype == p.dtype
        if p.unique().numel() == 1:
            assert torch.equal(got[n], p), n
        else:
            assert got[n].unique().numel() > 0.3 * p.numel()
            assert 0.5 * p.abs().max() < got[n].abs().max() < 2 * p.abs().max()
            assert torch.equal(got[n] == 0, p == 0)
    mine = dict(module.named_buffers())
    assert mine.keys() == dict(want.named_buffers()).keys()
    assert all(torch.equal(mine[n], b) for n, b in want.named_buffers())


# ---- initialisers that are not elementwise -------------------------------------------------------------------------


class Special(nn.Module):
    """One parameter for each way of setting values that a shard alone cannot follow, or only with care."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(torch.empty(12, 8))
        self.dirac = nn.Parameter(torch.empty(6, 4, 3))
        self.sparse = nn.Parameter(torch.empty(40, 5))
        self.eye = nn.Parameter(torch.empty(6, 9))
        self.spectral = nn.Parameter(torch.empty(9, 9))
        self.table = nn.Parameter(torch.empty(10, 6))
        self.blocks = nn.Parameter(torch.empty(12, 6))
        self.scaled = nn.Parameter(torch.empty(8, 8))
        self.register_buffer("mask", torch.empty(5, 5))
        if not self.mask.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.orthogonal, gain=2.0)
        nn.init.dirac_(self.dirac)
        nn.init.sparse_(self.sparse, 0.5)
        nn.init.eye_(self.eye)
        self.spectral.copy_(torch.randn(9, 9))
        self.spectral.div_(torch.linalg.matrix_norm(self.spectral, 2))
        at = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.5, 0.25])
        self.table[:, 0::2] = at.sin()
        self.table[:, 1::2] = at.cos()
        for i, block in enumerate(self.blocks.chunk(3)):
            nn.init.constant_(block, float(i))
        self.blocks[:, 2:4].mul_(-1)
        nn.init.ones_(self.scaled)
        if float(self.scaled.sum()) > 0:  # needs the value
            self.scaled.fill_(float(self.scaled.sum()))
        self.mask.copy_(torch.ones(5, 5).tril())


def test_special_initialisers(mesh: DeviceMesh) -> None:
    module = on_meta(Special, mesh)
    got, want = whole(module), Special()
    q = got["orthogonal"].double() / 2
    torch.testing.assert_close(q.T @ q, torch.eye(8, dtype=torch.float64), atol=1e-6, rtol=0)
    for n in ("dirac", "eye", "table", "blocks", "scaled"):
        assert torch.equal(got[n], getattr(want, n)), n
    assert ((got["sparse"] == 0).sum(0) == 20).all()
    torch.testing.assert_close(torch.linalg.matrix_norm(got["spectral"], 2), torch.tensor(1.0))
    assert got["spectral"].unique().numel() == 81
    assert torch.equal(module.mask, want.mask)
    assert torch.nn.init.orthogonal_(torch.empty(3, 3, device="meta")).is_meta, "torch's own initialisers are as they were"


def test_an_initialiser_may_put_new_tensors_in_place(mesh: DeviceMesh) -> None:
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.register_buffer("here", torch.empty(8), persistent=False)
            self.register_buffer("there", torch.empty(8), persistent=False)
            self.reset_buffers()

        def reset_buffers(self) -> None:
            self.here = torch.arange(8, device=self.here.device) / 10
            self.there = torch.arange(8.0) * 2
            self.scale = nn.Parameter(torch.full((4,), 0.5, device=self.scale.device))

    module = on_meta(Rope, mesh)
    assert torch.equal(module.here, torch.arange(8) / 10)
    assert torch.equal(module.there, torch.arange(8.0) * 2)
    assert torch.equal(whole(module)["scale"], torch.full((4,), 0.5))


def test_an_initialiser_may_write_through_data(mesh: DeviceMesh) -> None:
    class Old(nn.Module):
        def __init__(self, needs_values: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.empty(300, 400)), nn.Parameter(torch.empty(5))
            self.needs_values = needs_values

        def reset_parameters(self) -> None:
            self.a.data.normal_(0.0, 0.1)
            self.b.data = torch.ones(5)
            if self.needs_values and not float(self.b.data.sum()) > 0:
                self.a.data.zero_()

    for needs_values in (False, True):
        got = whole(on_meta(lambda n=needs_values: Old(n), mesh))
        assert_distribution(got["a"], normal(0, 0.1))
        assert torch.equal(got["b"], torch.ones(5))


def test_rules_of_a_plain_model(mesh: DeviceMesh) -> None:
    """`self.apply(self._init_weights)` comes after the layers' constructors, as it does in a constructor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 30)
            self.b.weight = nn.Parameter(torch.empty(30, 40))
            self.c = nn.Linear(40, 30, bias=False)
            self.c.weight = self.b.weight
            self.apply(self._init_weights)

        def _init_weights(self, m: nn.Module) -> None:
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

    module = on_meta(Net, mesh)
    got = whole(module)
    for n in ("a.weight", "b.weight"):
        assert_distribution(got[n], normal(0, 0.02))
    assert not got["a.bias"].any() and (got["norm.weight"] == 1).all()
    assert module.c.weight is module.b.weight


def test_what_nobody_initialises_is_named(mesh: DeviceMesh) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(8.0), persistent=False)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    with pytest.raises(AutoparError, match=r"buffer 'rope.angles' is on the meta device and nothing initialises it[^$]*reset_buffers"):
        on_meta(lambda: nn.ModuleDict({"l": nn.Linear(3, 3), "rope": Table()}), mesh)
    with pytest.raises(AutoparError, match=r"parameter '1.gain' [^$]*reset_parameters"):
        on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()), mesh)


# ---- real tensors --------------------------------------------------------------------------------------------------


def test_what_is_real_keeps_its_values(mesh: DeviceMesh) -> None:
    module = nn.ModuleDict({"real": nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), "meta": nn.Linear(6, 7, device="meta")})
    module["real"][1].running_mean.fill_(3.0)
    before = {n: t.clone() for n, t in module["real"].state_dict().items()}
    materialize(module, mesh, placements, 0, CPU)
    after = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in module["real"].state_dict().items()}
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert all(isinstance(p, DTensor) for p in module.parameters())


def test_distribute_keeps_ties_flags_and_use(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module = ZOO["gpt2"].build()
    module.transformer.wpe.weight.requires_grad_(False)
    module.transformer.wte.weight.note = "kept"
    before = {n: p.detach().clone() for n, p in module.named_parameters(remove_duplicate=False)}
    tied = ties(module)
    distribute(module, mesh, placements)
    assert ties(module) == tied and tied
    assert all(torch.equal(before[n], p) for n, p in whole(module).items())
    assert [n for n, p in module.named_parameters() if not p.requires_grad] == ["transformer.wpe.weight"]
    assert module.lm_head.weight.note == "kept"
    again = dict(module.named_parameters())
    distribute(module, mesh, placements)
    assert all(again[n] is p for n, p in module.named_parameters())
    lstm = nn.LSTM(3, 4)
    distribute(lstm, mesh, placements)
    assert all(a is b for a, b in zip(lstm.parameters(), lstm._flat_weights, strict=True))
    assert F.linear(torch.ones(1, 3), lstm.weight_ih_l0.full_tensor()).shape == (1, 16)
