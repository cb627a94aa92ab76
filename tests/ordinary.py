"""Modules as people write them by hand, small: each returns its loss. `ORDINARY[name]` builds (module, arguments of a call).

They are here for what they are written with (loops over experts, derivatives inside of a loss, recurrences, Fourier transforms), not for their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8


@dataclass(frozen=True)
class Ordinary:
    """build() -> module; inputs() -> keyword arguments of a call, whose first dim is the batch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def _g(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=_g(seed))


def _randint(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=_g(seed))


# ---- sequences -------------------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """Attention written out, tied head."""

    class Block(nn.Module):
        mask: Tensor

        def __init__(self, d: int, heads: int, seq: int) -> None:
            super().__init__()
            self.heads = heads
            self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            self.register_buffer("mask", torch.tril(torch.ones(seq, seq)).view(1, 1, seq, seq))

        def forward(self, x: Tensor) -> Tensor:
            b, t, d = x.shape
            q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(d, dim=2))
            att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
            x = x + self.proj((att @ v).transpose(1, 2).contiguous().view(b, t, d))
            return x + self.mlp(self.ln2(x))

    def __init__(self, vocab: int = 32, d: int = 16, heads: int = 4, seq: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(NanoGPT.Block(d, heads, seq) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).view(-1, self.head.out_features), targets.view(-1))


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab: int = 32, d: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.lstm = nn.LSTM(d, d, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        out, _ = self.lstm(self.embed(idx))
        return F.cross_entropy(self.head(out).flatten(0, 1), targets.flatten())


class GRUSeq2Seq(nn.Module):
    """An encoder of both directions, a decoder that starts from what it ends with."""

    def __init__(self, vocab: int = 32, d: int = 8) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.encoder = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * d, d)
        self.decoder = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, h = self.encoder(self.source(source))
        h = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1))).unsqueeze(0)
        out, _ = self.decoder(self.target(target[:, :-1]), h)
        return F.cross_entropy(self.head(out).transpose(1, 2), target[:, 1:])


class ElmanClassifier(nn.Module):
    """Time first, as nn.RNN has it by default; the loop of the cell by hand behind it."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.rnn, self.cell, self.head = nn.RNN(4, d, nonlinearity="relu"), nn.GRUCell(d, d), nn.Linear(d, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out, _ = self.rnn(x.transpose(0, 1))
        h = torch.zeros_like(out[0])
        for step in out:
            h = self.cell(step, h)
        return F.cross_entropy(self.head(h), target)


class Speech(nn.Module):
    """Convolutions over time, connectionist temporal classification. lengths: of inputs and targets."""

    def __init__(self, mels: int = 8, d: int = 16, letters: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv1d(mels, d, 3, padding=1)
        self.head = nn.Linear(d, letters)
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def forward(self, audio: Tensor, targets: Tensor, lengths: Any, target_lengths: Any) -> Tensor:
        x = torch.relu(self.conv(audio)).transpose(1, 2)
        return self.ctc(self.head(x).log_softmax(-1).transpose(0, 1), targets, lengths, target_lengths)


def _speech(**lengths: Any) -> dict[str, Any]:
    # The last sample's target cannot be said in its time: an infinite loss, which zero_infinity makes zero.
    made = {"lengths": (12, 11, 10, 9, 12, 12, 8, 3), "target_lengths": (4, 3, 2, 4, 1, 4, 2, 4), **lengths}
    return {"audio": _randn(BATCH, 8, 12), "targets": 1 + _randint(7, BATCH, 4, seed=2), **made}


def _speech_tensors() -> dict[str, Any]:
    given = _speech()
    return {**given, "lengths": torch.tensor(given["lengths"]), "target_lengths": torch.tensor(given["target_lengths"])}


def _speech_flat() -> dict[str, Any]:
    given = _speech()
    rows = [t[:n] for t, n in zip(given["targets"], given["target_lengths"], strict=True)]
    return {**given, "targets": torch.cat(rows), "lengths": given["lengths"]}


class Translation(nn.Module):
    """nn.Transformer with a causal mask and masks of padding."""

    def __init__(self, vocab: int = 32, d: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, d, padding_idx=0), nn.Embedding(16, d)
        self.transformer = nn.Transformer(d, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        def embedded(ids: Tensor) -> Tensor:
            return self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))

        given, wanted = target[:, :-1], target[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1], dtype=self.head.weight.dtype)
        out = self.transformer(
            embedded(source), embedded(given), tgt_mask=mask, src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0,
        )  # fmt: skip
        return F.cross_entropy(self.head(out).transpose(1, 2), wanted, ignore_index=0)


def _translation() -> dict[str, Any]:
    source, target = 1 + _randint(31, BATCH, 8), 1 + _randint(31, BATCH, 9, seed=2)
    for i in range(BATCH):
        source[i, 8 - i % 4 :] = 0
        target[i, 9 - i % 3 :] = 0
    return {"source": source, "target": target}


class Decoder(nn.Module):
    """A stack of nn.TransformerDecoderLayer by itself, masks made in forward."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(d, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(d))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        hidden = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
        return self.decoder(x, memory, tgt_mask=hidden).square().mean()


class LinearAttention(nn.Module):
    """Causal, by sums over what came before (Katharopoulos et al., 2020)."""

    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summed = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        top = torch.einsum("bhtd,bhtde->bhte", q, summed)
        bottom = torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)).unsqueeze(-1)
        return self.out((top / bottom).transpose(1, 2).reshape(b, t, d)).square().mean()


class Experts(nn.Module):
    """A mixture of experts by a loop over all of them: the two best of each token, as masks."""

    def __init__(self, d: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return (x + out).square().mean()


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self, d: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(1, d, 1), nn.Conv1d(d, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(d, 2 * d, 2, dilation=2**i) for i in range(layers))
        self.mix = nn.ModuleList(nn.Conv1d(d, 2 * d, 1) for _ in range(layers))

    def forward(self, wave: Tensor, target: Tensor) -> Tensor:
        x, skips = self.start(wave), torch.zeros(())
        for i, (conv, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            a, b = conv(F.pad(x, (2**i, 0))).chunk(2, 1)
            res, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, skips = x + res, skips + skip
        return F.cross_entropy(self.end(torch.relu(skips)), target)


class RelativeAttention(nn.Module):
    """Tokens and a table of relative positions go through one projection."""

    def __init__(self, d: int = 16, reach: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.table = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Embedding(2 * reach, d)
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.q(x), self.k(x), self.v(x)
        at = (torch.arange(t)[:, None] - torch.arange(t) + self.reach).clamp(0, 2 * self.reach - 1)
        positions = q @ self.k(self.table.weight).T
        score = q @ k.mT + positions.gather(-1, at.expand(x.shape[0], t, t))
        return (score.softmax(-1) @ v).square().mean()


# ---- images ----------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Without normalisation: down, up by a transposed convolution and by interpolation, skips concatenated."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.start, self.down = nn.Conv2d(3, d, 3, padding=1), nn.Conv2d(d, 2 * d, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(2 * d, 2 * d, 3, padding=1), nn.ConvTranspose2d(2 * d, d, 2, stride=2)
        self.more, self.end = nn.Conv2d(3 * d, d, 3, padding=1), nn.Conv2d(2 * d, 3, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        a = F.silu(self.start(x + noise))
        b = F.silu(self.middle(F.silu(self.down(a))))
        c = F.silu(self.more(torch.cat([F.interpolate(b, scale_factor=2.0, mode="nearest"), a], 1)))
        return F.mse_loss(self.end(torch.cat([self.up(b), c], 1)), noise)


class ResNet(nn.Module):
    """Basic blocks, one of which halves the image and has a projection."""

    class Block(nn.Module):
        def __init__(self, d: int, out: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(d, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
            self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
            short = nn.Sequential(nn.Conv2d(d, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            self.short = nn.Identity() if d == out else short

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(ResNet.Block(8, 8, 1), ResNet.Block(8, 16, 2))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 2)
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)), target)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def patches(image: Tensor) -> Tensor:
    """[B, C, H, W] as [B, patches of 2 x 2, C * 4]."""
    return image.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class DiT(nn.Module):
    """A diffusion transformer's block: patches, a time embedding of sines, modulated norms without parameters."""

    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.patch = heads, nn.Linear(12, d)
        self.time, self.ada = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)), nn.Linear(d, 6 * d)
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp, self.end = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d)), nn.Linear(d, 12)

    def forward(self, image: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        b, d = image.shape[0], self.out.out_features
        x = self.patch(patches(image + t.view(-1, 1, 1, 1) * noise))
        freqs = torch.exp(-math.log(100.0) * torch.arange(d // 2, dtype=t.dtype) / (d // 2))
        angle = t[:, None] * freqs
        c = F.silu(self.time(torch.cat([angle.cos(), angle.sin()], -1)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, -1)
        q, k, v = self.qkv(modulated(self.norm1(x), shift1, scale1)).view(b, -1, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + gate1.unsqueeze(1) * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, d))
        x = self.end(x + gate2.unsqueeze(1) * self.mlp(modulated(self.norm2(x), shift2, scale2)))
        return F.mse_loss(x, patches(noise))


class JointTransformer(nn.Module):
    """Stable Diffusion 3's block: text and image have weights of their own and attend to each other together."""

    class Stream(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.ada, self.qkv, self.out = nn.Linear(d, 6 * d), nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.norm_q, self.norm_k = nn.RMSNorm(d // 4), nn.RMSNorm(d // 4)
            self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(approximate="tanh"), nn.Linear(2 * d, d))

    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.image, self.text = heads, JointTransformer.Stream(d), JointTransformer.Stream(d)

    def forward(self, image: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        streams, xs = (self.text, self.image), (text, image)
        b, _, d = image.shape
        mods = [s.ada(F.silu(pooled)).chunk(6, -1) for s in streams]
        qs: list[Tensor] = []
        ks: list[Tensor] = []
        vs: list[Tensor] = []
        for s, x, m in zip(streams, xs, mods, strict=True):
            q, k, v = s.qkv(modulated(F.layer_norm(x, (d,)), m[0], m[1])).view(b, -1, 3, self.heads, d // self.heads).unbind(2)
            qs, ks, vs = [*qs, s.norm_q(q)], [*ks, s.norm_k(k)], [*vs, v]
        q, k, v = (torch.cat(y, 1).transpose(1, 2) for y in (qs, ks, vs))
        joined = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, d)
        loss = torch.zeros((), dtype=image.dtype)
        for s, x, m, a in zip(streams, xs, mods, joined.split([text.shape[1], image.shape[1]], 1), strict=True):
            x = x + m[2].unsqueeze(1) * s.out(a)
            loss = loss + (x + m[5].unsqueeze(1) * s.mlp(modulated(F.layer_norm(x, (d,)), m[3], m[4]))).square().mean()
        return loss


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn."""

    class Block(nn.Module):
        def __init__(self, patches: int, d: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
            self.channels = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(12, d), nn.Linear(d, 4)
        self.blocks = nn.Sequential(*(Mixer.Block(16, d) for _ in range(2)))

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.end(self.blocks(self.start(patches(image))).mean(1)), target)


class VAE(nn.Module):
    """A normal drawn in forward."""

    def __init__(self, d: int = 16, z: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 2 * z))
        self.decode = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, d))

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        kl = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        return F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid(), reduction="sum") + kl


# ---- other data ------------------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    """Bags of embeddings of equal size (summed), of any size (mean), their products with each other and with dense features."""

    def __init__(self, d: int = 8, rows: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, d, mode=m) for m in ("sum", "mean"))
        self.any = nn.EmbeddingBag(rows, d, mode="mean", padding_idx=0)
        self.bottom = nn.Sequential(nn.Linear(4, d), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(d + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, values: Tensor, offsets: Tensor, click: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags)), self.any(values, offsets)], 1)
        products = features @ features.mT
        i, j = torch.tril_indices(4, 4, offset=-1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products[:, i, j]], 1)).squeeze(1), click)


def _dlrm() -> dict[str, Any]:
    offsets = torch.tensor([0, 3, 3, 8, 10, 11, 17, 20])  # the second bag is empty
    return {
        "dense": _randn(BATCH, 4), "sparse": _randint(32, BATCH, 2, 3), "values": _randint(32, 24, seed=2), "offsets": offsets,
        "click": _randint(2, BATCH, seed=3).float(),
    }  # fmt: skip


class Bags(nn.Module):
    """What else an embedding bag can do: weights of samples, the largest, gradients scaled by how often a row is read, the last offset given."""

    def __init__(self, d: int = 8, rows: int = 16) -> None:
        super().__init__()
        self.weighted, self.largest = nn.EmbeddingBag(rows, d, mode="sum", padding_idx=3), nn.EmbeddingBag(rows, d, mode="max")
        self.often = nn.EmbeddingBag(rows, d, mode="sum", scale_grad_by_freq=True, include_last_offset=True)
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, ids: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        a = self.weighted(ids, per_sample_weights=self.weights.expand(ids.shape[0], -1))
        b = self.weighted(values, offsets, per_sample_weights=self.weights.repeat(values.shape[0] // 4))
        c = self.largest(ids) + self.largest(values, offsets)
        d = self.often(values, torch.cat([offsets, torch.full((1,), values.shape[0])]))
        return (a * b + c * d).square().mean()


class GraphNetwork(nn.Module):
    """Messages along edges, added where they go; means by scatter."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * d, d), nn.GRUCell(d, d)
        self.head = nn.Linear(d, 4)

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        source, sink = edges[:, 0], edges[:, 1]
        for _ in range(2):
            m = torch.relu(self.message(torch.cat([nodes[source], nodes[sink]], -1)))
            total = torch.zeros_like(nodes).index_add(0, sink, m)
            count = torch.zeros(nodes.shape[0], dtype=nodes.dtype).scatter_add(0, sink, torch.ones_like(sink, dtype=nodes.dtype))
            nodes = self.update(total / count.clamp(min=1).unsqueeze(-1), nodes)
        return F.cross_entropy(self.head(nodes), target)


class FourierOperator(nn.Module):
    """Products of the lowest frequencies (Li et al., 2021)."""

    def __init__(self, d: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.modes, self.start, self.local, self.end = modes, nn.Linear(1, d), nn.Conv1d(d, d, 1), nn.Linear(d, 1)
        self.weight = nn.Parameter(torch.view_as_real(torch.randn(d, d, modes, dtype=torch.cfloat, generator=_g())) / d)

    def forward(self, u: Tensor, target: Tensor) -> Tensor:
        x = self.start(u.unsqueeze(-1)).transpose(1, 2)
        low = torch.einsum("bik,iok->bok", torch.fft.rfft(x)[..., : self.modes], torch.view_as_complex(self.weight))
        low = F.pad(low, (0, x.shape[-1] // 2 + 1 - self.modes))
        x = F.gelu(torch.fft.irfft(low, n=x.shape[-1]) + self.local(x))
        return F.mse_loss(self.end(x.transpose(1, 2)).squeeze(-1), target)


class TwoTowers(nn.Module):
    """Every other sample of the batch is a negative."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, d)), nn.EmbeddingBag(32, d)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(words), dim=-1)
        logits = self.scale.exp() * a @ b.T
        labels = torch.arange(a.shape[0], device=a.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Siamese(nn.Module):
    """One network, two images, a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.Flatten(), nn.Linear(32, 8))

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        far = F.pairwise_distance(self.net(a), self.net(b))
        return torch.mean(same * far.square() + (1 - same) * (1.0 - far).clamp(min=0).square())


class Ensemble(nn.Module):
    """Members of a stack of weights, by vmap over a functional call."""

    def __init__(self, members: int = 4) -> None:
        super().__init__()
        self.one = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("meta")]  # no module of ours: a shape
        made = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(members)]
        stacked, _ = torch.func.stack_module_state(made)
        self.stacked = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(t.detach()) for n, t in stacked.items()})

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights = {n.replace("_", "."): t for n, t in self.stacked.items()}
        out = torch.vmap(lambda w: torch.func.functional_call(self.one[0], w, (x,)))(weights)
        return (out.squeeze(-1) - target).square().mean()


class Physics(nn.Module):
    """The heat equation's residual: derivatives with respect to inputs, by autograd inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
        u = self.net(torch.stack([x, t], -1)).squeeze(-1)
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return (u_t - u_xx).square().mean()


class PhysicsByTransforms(nn.Module):
    """The same, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points: Tensor) -> Tensor:
        def u(p: Tensor) -> Tensor:
            return self.net(p).squeeze(-1)

        slope = torch.vmap(torch.func.grad(u))(points)
        curve = torch.vmap(torch.func.jacfwd(torch.func.grad(u)))(points)
        return (slope[:, 1] - curve[:, 0, 0]).square().mean()


ORDINARY: dict[str, Ordinary] = {
    "nanogpt": Ordinary(NanoGPT, lambda: {"idx": _randint(32, BATCH, 8), "targets": _randint(32, BATCH, 8, seed=2)}),
    "lstm": Ordinary(LSTMLanguageModel, lambda: {"idx": _randint(32, BATCH, 4), "targets": _randint(32, BATCH, 4, seed=2)}),
    "gru": Ordinary(GRUSeq2Seq, lambda: {"source": _randint(32, BATCH, 4), "target": _randint(32, BATCH, 4, seed=2)}),
    "rnn": Ordinary(ElmanClassifier, lambda: {"x": _randn(BATCH, 3, 4), "target": _randint(4, BATCH)}),
    "ctc": Ordinary(Speech, _speech),
    "ctc-tensors": Ordinary(Speech, _speech_tensors),
    "ctc-flat": Ordinary(Speech, _speech_flat),
    "translation": Ordinary(Translation, _translation),
    "decoder": Ordinary(Decoder, lambda: {"x": _randn(BATCH, 8, 16), "memory": _randn(BATCH, 4, 16, seed=2)}),
    "linear-attention": Ordinary(LinearAttention, lambda: {"x": _randn(BATCH, 8, 16)}),
    "experts": Ordinary(Experts, lambda: {"x": _randn(BATCH, 4, 16)}),
    "wavenet": Ordinary(WaveNet, lambda: {"wave": _randn(BATCH, 1, 16), "target": _randint(16, BATCH, 16)}),
    "relative": Ordinary(RelativeAttention, lambda: {"x": _randn(BATCH, 8, 16)}),
    "unet": Ordinary(UNet, lambda: {"x": _randn(BATCH, 3, 8, 8), "noise": _randn(BATCH, 3, 8, 8, seed=2)}),
    "resnet": Ordinary(ResNet, lambda: {"x": _randn(BATCH, 3, 8, 8), "target": _randint(4, BATCH)}),
    "dit": Ordinary(DiT, lambda: {"image": _randn(BATCH, 3, 8, 8), "t": _randn(BATCH).abs(), "noise": _randn(BATCH, 3, 8, 8, seed=2)}),
    "sd3": Ordinary(
        JointTransformer, lambda: {"image": _randn(BATCH, 8, 16), "text": _randn(BATCH, 4, 16, seed=2), "pooled": _randn(BATCH, 16, seed=3)}
    ),
    "mixer": Ordinary(Mixer, lambda: {"image": _randn(BATCH, 3, 8, 8), "target": _randint(4, BATCH)}),
    "vae": Ordinary(VAE, lambda: {"x": _randn(BATCH, 16)}),
    "dlrm": Ordinary(DLRM, _dlrm),
    "bags": Ordinary(
        Bags,
        lambda: {"ids": _randint(16, BATCH, 4), "values": _randint(16, 24, seed=2), "offsets": torch.tensor([0, 3, 3, 8, 10, 11, 17, 20])},
    ),
    "graph": Ordinary(
        GraphNetwork, lambda: {"nodes": _randn(16, 8), "edges": _randint(16, 32, 2), "target": _randint(4, 16)}
    ),
    "fourier": Ordinary(FourierOperator, lambda: {"u": _randn(BATCH, 16), "target": _randn(BATCH, 16, seed=2)}),
    "two-towers": Ordinary(TwoTowers, lambda: {"image": _randn(BATCH, 12), "words": _randint(32, BATCH, 3)}),
    "siamese": Ordinary(
        Siamese, lambda: {"a": _randn(BATCH, 1, 8, 8), "b": _randn(BATCH, 1, 8, 8, seed=2), "same": _randint(2, BATCH).float()}
    ),
    "ensemble": Ordinary(Ensemble, lambda: {"x": _randn(BATCH, 8), "target": _randn(BATCH)}),
    "physics": Ordinary(Physics, lambda: {"x": _randn(BATCH), "t": _randn(BATCH, seed=2)}),
    "physics-func": Ordinary(PhysicsByTransforms, lambda: {"points": _randn(BATCH, 2)}),
}  # fmt: skip
