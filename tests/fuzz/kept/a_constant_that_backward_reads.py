"""An integer that follows from a buffer alone, read in backward: its reader was placed as if it read what is made further on."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b4", torch.zeros((), dtype=torch.long))
        self.m7 = nn.Linear(6, 6)
        fill(self, D)

    def forward(self, x1):
        v5 = x1 / (self.b4 + 1)
        v8 = self.m7(x1)
        return (v8, v5, )


def make_inputs():
    x1 = randn(193, 6, dtype=D)
    x1.requires_grad_()
    return (x1, ), {}


SETTINGS = [{'mesh': {'tp': 4}, 'layout': 'plan', 'seed': 582}]
