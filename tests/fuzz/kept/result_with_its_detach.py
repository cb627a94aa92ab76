"""requires_grad"""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x1):
        v4 = x1 @ x1.transpose(-1, -2)
        v18 = v4.unflatten(-1, (2, 1)).transpose(-1, -2)
        return (v18, v18.detach(), )


def make_inputs():
    x1 = randn(80, 8, 2, 1, dtype=D)
    x1.requires_grad_()
    return (x1, ), {}


SETTINGS = [{}]
