"""Sizes that Python reads after an in-place view are those after it."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(8))
        fill(self, D)

    def forward(self, x):
        v = x * self.w
        v.transpose_(0, 1)
        u = v.clone().unsqueeze_(0)
        return v.reshape(v.shape[0], -1), u.sum(-1) * len(v), v.shape[0], u.dim()


def make_inputs():
    return (randn(1, 8, 4, 8, dtype=D),), {}


SETTINGS = [{}, {'mesh': {'a': 2}, 'layout': 'fsdp'}]
