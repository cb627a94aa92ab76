"""AssertionError in solve.py:_explain"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x16, x9001, x9002):
        v17, v18, v19, v20, v21 = torch.chunk(x16, 5, -1)
        v36 = torch.baddbmm(x9001, v18, x9002, alpha=0.5)
        return v36


def make_inputs():
    x16 = randn(324, 5, 5, 5, dtype=D)
    x16.requires_grad_()
    x9001 = randn(1, 5, 4, dtype=D)
    x9002 = randn(1, 5, 1, 4, dtype=D)
    return (x16, x9001, x9002, ), {}


SETTINGS = [{'mesh': {'tp': 4}, 'layout': 'plan', 'seed': 883}]
