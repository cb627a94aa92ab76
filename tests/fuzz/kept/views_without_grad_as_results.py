"""Views made under no_grad, returned."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x1):
        with torch.no_grad():
            v8, v9 = torch.split(x1, [2, 6], dim=0)
            v10 = (x1 * 2).view(2, 4)
        return v8, v10, x1 + v9.sum()


def make_inputs():
    x1 = randn(201, 8, dtype=D)
    x1.requires_grad_()
    return (x1,), {}


SETTINGS = [{}, {'mesh': {'a': 2}}]
