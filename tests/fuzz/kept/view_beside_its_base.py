"""A result that is a view of another one: what came in at the view was dropped."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(12, 4))
        fill(self, D)

    def forward(self, x):
        v = x * self.w
        v[0] = 0.5
        u = v.std(0)
        return u, v, u, u.view_as(u), v[1:]


def make_inputs():
    x = randn(699, 12, 4, dtype=D)
    return (x,), {}


SETTINGS = [{}, {'mesh': {'a': 2}, 'layout': 'ddp'}]
