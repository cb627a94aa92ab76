"""A view made in place of what is a view, then written to: no gradient could be traced."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(2, 6)
        fill(self, D)

    def forward(self, x, mask, y):
        v = self.m(x)
        before = v.sum(-1)
        alias = torch.neg_(v.mul_(1.5))
        v.transpose_(0, 1)
        v.masked_fill_(mask, 0.1)
        y = y * 2
        y.unsqueeze_(0).squeeze_(1)
        y.t_()
        y.add_(before.mean())
        return v + alias, y


def make_inputs():
    return (randn(570, 8, 1, 4, 2, dtype=D), bools(519, 1, 8, 4, 6), randn(571, 1, 4, dtype=D)), {}


SETTINGS = [{}]
