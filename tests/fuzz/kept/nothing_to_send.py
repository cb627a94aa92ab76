"""RuntimeError in redistribute.py:run_step"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x2):
        v3 = x2.expand(2, 8, 6, 4)
        v5 = torch.block_diag(x2[0], x2[0])
        v24 = torch.linalg.vector_norm(v3)
        return (v24, v5, )


def make_inputs():
    x2 = randn(96, 8, 6, 4, dtype=D)
    return (x2, ), {}


SETTINGS = [{'mesh': {'a': 2}, 'layout': 'random', 'seed': 262}]
