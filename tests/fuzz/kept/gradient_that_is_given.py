"""KeyError in memory.py:rows"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w10 = nn.Parameter(torch.zeros(8, 3))
        fill(self, D)

    def forward(self, x2, x9001):
        v4 = x2 + x9001.detach().clone()
        v4 += self.w10
        return v4


def make_inputs():
    x2 = randn(784, 8, 3, dtype=D)
    x9001 = randn(1, 3, dtype=D)
    return (x2, x9001, ), {}


SETTINGS = [{'mesh': {'tp': 4}, 'layout': 'plan', 'seed': 640}]
