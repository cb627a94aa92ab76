"""Two gradients that one operator makes, each with a reduction: the first was awaited before it was issued."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.BatchNorm1d(4, momentum=0.3)
        self.w5 = nn.Parameter(torch.zeros(1))
        fill(self, D)

    def forward(self, x1):
        v4 = self.m3(x1)
        v6 = F.prelu(v4, self.w5)
        v7 = v6.square().mean()
        return [v7, v4]


def make_inputs():
    x1 = randn(66, 4, 3, dtype=D).transpose(0, 1)
    x1.requires_grad_()
    return (x1, ), {}


SETTINGS = [{'mesh': {'a': 2, 'tp': 2}, 'layout': 'random', 'seed': 81}]
