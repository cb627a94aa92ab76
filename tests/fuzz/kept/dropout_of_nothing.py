"""A dropout of 0 gives its input itself: what is written to that shows in its result."""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m5 = nn.Dropout(0.0)
        fill(self, D)

    def forward(self, x1, x7):
        v2 = x1.mean(1)
        v6 = self.m5(v2)
        v2.masked_fill_(x7, 0.1)
        return v6


def make_inputs():
    x1 = randn(339, 6, 1, 4, dtype=D)
    x7 = bools(637, 6, 4)
    return (x1, x7, ), {}


SETTINGS = [{}]
