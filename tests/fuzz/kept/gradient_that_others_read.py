"""KeyError in overlap.py:reorder"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w11 = nn.Parameter(torch.zeros(1, 4))
        self.w12 = nn.Parameter(torch.zeros(8, 8, 4))
        self.w17 = nn.Parameter(torch.zeros(4))
        fill(self, D)

    def forward(self, x1, x2, x9002):
        def r15(x1, x2):
            v6 = x2 * torch.rsqrt(x2.pow(2).mean(-1, keepdim=True) + 1e-3) * x9002
            v7 = torch.cosh(x1)
            v14 = torch.addbmm(self.w11, x2, self.w12)
            return v14
        v16 = checkpoint(r15, x1, x2, use_reentrant=False)
        v18 = v16 * self.w17
        v19 = v16.clone()
        v19.lerp_(v19, 0.3)
        return (v19, v18, )


def make_inputs():
    x1 = randn(236, 8, 8, 6, 1, 6, dtype=D)
    x2 = randn(553, 8, 1, 8, dtype=D)
    x9002 = randn(1, 8, dtype=D)
    return (x1, x2, x9002, ), {}


SETTINGS = [{'mesh': {'a': 2, 'tp': 2}, 'layout': 'random', 'seed': 235}]
