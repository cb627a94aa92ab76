"""KeyError in versions.py: a parameter that forward returns as it is, which no operator reads"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w14 = nn.Parameter(torch.zeros(20, 20), requires_grad=False)
        fill(self, D)

    def forward(self):
        v15 = torch.conj_physical(self.w14)
        return v15


def make_inputs():
    return (), {}


SETTINGS = [{}, {"mesh": {"a": 2}, "layout": "fsdp"}]
