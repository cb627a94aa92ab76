"""IndexError in redistribution.py:redistribute"""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x6):
        v7 = torch.prod(x6, 0)
        return v7


def make_inputs():
    x6 = randn(199, 0, dtype=D)
    x6.requires_grad_()
    return (x6, ), {}


SETTINGS = [{'mesh': {'a': 2}, 'layout': 'ddp', 'seed': 381}]
