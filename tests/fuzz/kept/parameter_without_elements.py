"""RuntimeError in shards.py:cut"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w5 = nn.Parameter(torch.zeros(6))
        self.w10 = nn.Parameter(torch.zeros(0))
        fill(self, D)

    def forward(self, x1, x11):
        v6 = x1 * self.w5
        v12 = torch.linalg.vecdot(self.w10, x11, dim=0)
        return v6.sum() + v12


def make_inputs():
    x1 = randn(663, 8, 6, dtype=D)
    x11 = randn(196, 0, dtype=D)
    x11.requires_grad_()
    return (x1, x11, ), {}


SETTINGS = [{'mesh': {'a': 2}, 'layout': 'random', 'seed': 227}, {'mesh': {'a': 2, 'tp': 2}, 'layout': 'fsdp+tp'}, {'mesh': {'a': 2}, 'layout': 'plan'}]
