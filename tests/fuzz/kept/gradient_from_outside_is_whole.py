"""AssertionError in solve.py: what is added to a Partial was whole, and had to be Partial"""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m4 = nn.Linear(8, 3)
        fill(self, D)

    def forward(self, x9001):
        v5 = self.m4(x9001)
        return (
            v5,
            x9001,
        )


def make_inputs():
    x9001 = randn(1, 4, 8, dtype=D)
    x9001.requires_grad_()
    return (x9001,), {}


SETTINGS = [{"mesh": {"a": 3}, "layout": "plan", "seed": 705, "memory": "least"}]
