"""ZeroDivisionError in propagate.py:strides"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x7, x8):
        v9 = torch.mm(x7, x8)
        return v9


def make_inputs():
    x7 = randn(368, 5, 0, dtype=D)
    x8 = randn(652, 0, 10, dtype=D)
    return (x7, x8, ), {}


SETTINGS = [{'mesh': {'tp': 4}, 'layout': 'ddp'}, {'mesh': {'a': 2, 'tp': 2}, 'layout': 'plan'}]
