"""KeyError in problem.py:run"""
from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w21 = nn.Parameter(torch.zeros(20, 20))
        fill(self, D)

    def forward(self):
        v22 = torch.sign(self.w21)
        return v22


def make_inputs():
    return (), {}

SETTINGS = [{'mesh': {'a': 1}, 'layout': 'plan', 'seed': 990}, {'mesh': {'a': 2}, 'layout': 'plan'}]
