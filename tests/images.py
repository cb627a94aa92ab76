"""Image models at tiny sizes, for tests of memory formats: diffusers' and some written by hand. `IMAGES[name]` makes one; `batch_of(name, n, last)` its inputs.

Each returns its loss, a mean over all that it makes. channels_last models have their weights and images in that format, as PyTorch's tutorial does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loss(nn.Module):
    """A diffusers model and the mean square of what it is off by."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        return F.mse_loss(self.call(self.model, **inputs), target)


def _sample(m: nn.Module, **kw: Tensor) -> Tensor:
    return m(**kw, return_dict=False)[0]


def unet2d() -> nn.Module:
    from diffusers import UNet2DModel

    return Loss(
        UNet2DModel(
            sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
        ),
        _sample,
    )  # fmt: skip


def unet2d_condition() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return Loss(
        UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16, attention_head_dim=8,
        ),
        _sample,
    )  # fmt: skip


def autoencoder_kl() -> nn.Module:
    from diffusers import AutoencoderKL

    def call(m: Any, sample: Tensor) -> Tensor:
        return m.decode(m.encode(sample).latent_dist.mode()).sample

    return Loss(
        AutoencoderKL(
            in_channels=4, out_channels=4, latent_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=8,
        ),
        call,
    )  # fmt: skip


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return Loss(
        SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
        ),
        _sample,
    )  # fmt: skip


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return Loss(
        DiTTransformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
        ).eval(),  # its labels are dropped at random in training
        _sample,
    )  # fmt: skip


class Net(nn.Module):
    """A network by hand, against a target or a class."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, sample: Tensor, target: Tensor) -> Tensor:
        out = self.body(sample)
        return F.mse_loss(out, target) if target.is_floating_point() else F.cross_entropy(out, target)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return Net(
        nn.Sequential(
            nn.Conv2d(4, 16, 2, stride=2), LayerNorm2d(16), ConvNeXtBlock(16), LayerNorm2d(16), nn.Conv2d(16, 32, 2, stride=2),
            ConvNeXtBlock(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 12),
        )
    )  # fmt: skip


class MBConv(nn.Module):
    """Inverted bottleneck with squeeze and excitation (EfficientNet)."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )  # fmt: skip
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.SiLU(), nn.Conv2d(8, wide, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))
        self.residual = stride == 1 and width == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y))
        return x + y if self.residual else y


def efficientnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(4, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 12))
    return Net(nn.Sequential(stem, MBConv(16, 16, 1), MBConv(16, 32, 2), MBConv(32, 32, 1), head))


class Residual(nn.Module):
    """The block of ResNets: two convolutions with batch norm."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        same = stride == 1 and width == out
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.skip(x))


def resnet(width: int = 16, depth: int = 1) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(4, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stages = [Residual(width, width) for _ in range(depth)] + [Residual(width, 2 * width, 2)]
    stages += [Residual(2 * width, 2 * width) for _ in range(depth - 1)]
    return Net(nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 12)))


class UNet(nn.Module):
    """Group norm, average pooling, nearest and transposed upsampling, skips joined by cat."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())

        self.inside, self.down, self.bottom = block(4, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.a, self.b = block(4 * width, width), block(2 * width, width)
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.inside(x)
        two = self.down(F.avg_pool2d(one, 2))
        three = self.bottom(F.max_pool2d(two, 2))
        y = self.a(torch.cat([self.up(three), two], 1))
        return self.out(self.b(torch.cat([F.interpolate(y, scale_factor=2, mode="nearest"), one], 1)))


def unet() -> nn.Module:
    return Net(UNet())


IMAGES: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (unet2d, unet2d_condition, autoencoder_kl, sd3, dit, convnext, efficientnet, resnet, unet)
}
CLASSES = ("convnext", "efficientnet", "resnet")


def model_of(name: str, last: bool, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    model = IMAGES[name](**sizes)
    return model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload] # which torch's annotations leave out


def batch_of(name: str, n: int, last: bool, seed: int = 1, size: int = 8) -> dict[str, Tensor]:
    """Keyword arguments of a call."""
    g = torch.Generator().manual_seed(seed)

    def image() -> Tensor:
        x = torch.randn(n, 4, size, size, generator=g)
        return x.contiguous(memory_format=torch.channels_last) if last else x

    steps = torch.randint(0, 100, (n,), generator=g)
    if name in CLASSES:
        return {"sample": image(), "target": torch.randint(0, 12, (n,), generator=g)}
    if name in ("autoencoder_kl", "unet"):
        return {"sample": image(), "target": image()}
    out = {"target": image(), "timestep": steps}
    if name == "unet2d":
        return {**out, "sample": image()}
    if name == "dit":
        double = torch.randn(n, 4, size, size, generator=g)
        return {**out, "target": double, "hidden_states": image(), "class_labels": torch.randint(0, 10, (n,), generator=g)}
    words = torch.randn(n, 6, 16, generator=g)
    if name == "unet2d_condition":
        return {**out, "sample": image(), "encoder_hidden_states": words}
    return {**out, "hidden_states": image(), "encoder_hidden_states": words, "pooled_projections": torch.randn(n, 16, generator=g)}
