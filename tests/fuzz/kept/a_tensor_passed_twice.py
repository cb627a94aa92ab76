"""The same tensor twice, and a view of it: its gradient is the sum."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(3, 2)
        fill(self, D)

    def forward(self, a, b, c):
        return self.m(a) * 2 + self.m(torch.tanh(b)), c


def make_inputs():
    a = randn(1, 6, 3, dtype=D).requires_grad_()
    return (a, a, a[:1]), {}


SETTINGS = [{}, {'mesh': {'tp': 2}, 'layout': 'tp'}]
