"""KeyError in overlap.py:reorder"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m5 = nn.GroupNorm(4, 4, eps=1e-2, affine=False)
        self.m7 = nn.ParameterList([nn.Parameter(torch.zeros(10, 10)) for _ in range(2)])
        fill(self, D)

    def forward(self, x2):
        v4 = F.pad(x2, (1, 1))
        v6 = self.m5(v4)
        v8 = (v6 @ self.m7[0]) @ self.m7[1]
        v21 = v8.square().mean()
        return v21


def make_inputs():
    x2 = randn(119, 8, 4, 8, dtype=D)
    x2.requires_grad_()
    return (x2, ), {}


SETTINGS = [{'mesh': {'a': 2, 'tp': 2}, 'layout': 'random', 'seed': 504}]
