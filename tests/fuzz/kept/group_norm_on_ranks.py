"""Group normalisation whose gradient comes with other strides than it was captured with."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w6 = nn.Parameter(torch.zeros(1))
        self.m10 = nn.LayerNorm([8], eps=1e-2)
        self.w12 = nn.Parameter(torch.zeros(8))
        self.m14 = nn.GroupNorm(1, 1, eps=1e-2)
        fill(self, D)

    def forward(self, x2):
        v7 = F.group_norm(x2, 1, self.w6, self.w6)
        v8 = v7 @ v7.transpose(-1, -2)
        v11 = self.m10(v8)
        v13 = v11 * torch.rsqrt(v11.pow(2).mean(-1, keepdim=True) + 1e-3) * self.w12
        v15 = self.m14(v11)
        return [v15, v8, v13]


def make_inputs():
    x2 = randn(558, 3, 1, 8, 4, dtype=D)
    return (), {"x2": x2}


SETTINGS = [{'mesh': {'a': 2, 'tp': 2}, 'layout': 'random', 'seed': 95}]
