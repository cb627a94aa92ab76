"""input gradient value"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x1, x9001):
        v2 = x1.permute(1, 0, 2, 3).clone()
        v5, v6 = torch.split(v2, [1, 5], dim=1)
        v8 = v2 * x9001
        v9 = F.instance_norm(v8)
        return (v9, v5, )


def make_inputs():
    x1 = randn(657, 6, 1, 2, 1, dtype=D)
    x1.requires_grad_()
    x9001 = randn(1, 1, dtype=D)
    return (x1, x9001, ), {}


SETTINGS = [{'mesh': {'tp': 2}, 'layout': 'random', 'seed': 573}]
