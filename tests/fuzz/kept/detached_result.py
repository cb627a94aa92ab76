"""A detached result asks for no gradient."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(4, 4)
        fill(self, D)

    def forward(self, x):
        v = self.m(x)
        return v, v.detach()


def make_inputs():
    x = randn(1, 8, 4, dtype=D)
    return (x,), {}


SETTINGS = [{}]
