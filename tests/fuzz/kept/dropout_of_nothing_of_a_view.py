"""The same of a result that several outputs come from."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m7 = nn.Dropout(0.0)
        fill(self, D)

    def forward(self, x1, x9003, x9002):
        v5, v6 = (x1 @ x9002).softmax(-1).topk(1, -1)
        v8 = self.m7(v5)
        v5.view(-1)[1:].add_(0.3)
        v30 = x9003.square().mean() + v8.square().mean()
        return v30


def make_inputs():
    x1 = randn(1, 12, 1, dtype=D)
    x9003 = randn(1, 12, 4, 4, dtype=D)
    x9002 = randn(1, 1, 3, dtype=D)
    return (x1, x9003, x9002, ), {}


SETTINGS = [{}]
