"""A result that is a view of an input wants a gradient."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x):
        return x.view_as(x), x


def make_inputs():
    x = randn(1, 4, 3, dtype=D).requires_grad_()
    return (x,), {}


SETTINGS = [{}, {'mesh': {'a': 2}}]
