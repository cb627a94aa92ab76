"""RuntimeError in attention.py:_backward"""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w29 = nn.Parameter(torch.zeros(4, 4))
        fill(self, D)

    def forward(self, x9001, x9002, x9003):
        v1 = x9003 * 2
        v27 = F.scaled_dot_product_attention(v1, x9002, x9001, attn_mask=self.w29).sum(1)
        v1[..., 0].mul_(0.5)
        v33 = F.pad(v27, (1, 1))
        return v33, v1


def make_inputs():
    x9001 = randn(1, 8, 1, 4, 4, dtype=D)
    x9002 = randn(1, 8, 1, 4, 4, dtype=D)
    x9003 = randn(1, 8, 1, 4, 4, dtype=D)
    return (x9001, x9002, x9003, ), {}


SETTINGS = [{}, {'mesh': {'a': 2}, 'layout': 'ddp'}]
