"""one_hot asserts of its classes, which has no result."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(5, 4)
        fill(self, D)

    def forward(self, i):
        return self.m(F.one_hot(i, 5).to(D))


def make_inputs():
    i = ints(295, 5, 6)
    return (i,), {}


SETTINGS = [{}, {'mesh': {'a': 2}}]
