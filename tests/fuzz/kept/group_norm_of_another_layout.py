"""ValueError in norm.py:_group_norm_backward"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w6 = nn.Parameter(torch.zeros(4))
        self.m14 = nn.Linear(2, 2)
        fill(self, D)

    def forward(self, x1, x2, x9002):
        v7 = F.group_norm(x1, 4, x9002, self.w6)
        v17 = self.m14(v7)
        v18 = v17.square().mean() + x2.square().mean()
        return v18


def make_inputs():
    x1 = randn(517, 6, 4, 2, 4, 2, dtype=D)
    x2 = randn(245, 6, 2, dtype=D)
    x9002 = randn(1, 4, dtype=D)
    return (x1, x2, x9002, ), {}


SETTINGS = [{'mesh': {'tp': 2}, 'layout': 'tp'}]
