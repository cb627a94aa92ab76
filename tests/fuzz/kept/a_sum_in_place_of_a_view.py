"""A cumulative sum in place of a transposed view: no gradient could be traced."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x2, x9001):
        v7 = (x2 @ x9001).view(8, 6, 2, 4).transpose(1, 2)
        v7.cumsum_(0)
        return v7


def make_inputs():
    x2 = randn(827, 8, 6, 8, dtype=D)
    x9001 = randn(1, 8, 8, dtype=D)
    return (x2, x9001, ), {}


SETTINGS = [{}]
