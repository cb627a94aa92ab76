"""A model without parameters: gradients of its inputs."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x):
        v, i = F.softmin(x, dim=-1).max(0)
        return {'v': v, 'i': i, 'none': None, 'three': 3}


def make_inputs():
    x = randn(931, 6, dtype=D).requires_grad_()
    return (x,), {}


SETTINGS = [{}]
