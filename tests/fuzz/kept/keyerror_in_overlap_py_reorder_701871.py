"""KeyError in overlap.py:reorder"""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w3 = nn.Parameter(torch.zeros(16, 4))
        self.w5 = nn.Parameter(torch.zeros(4, 3, 6))
        self.w15 = nn.Parameter(torch.zeros(6))
        fill(self, D)

    def forward(self, x2):
        v4 = F.embedding(x2, self.w3)
        v6 = torch.einsum("abc,cab->bc", v4, self.w5)
        v14 = v4[torch.arange(3)[:, None], :, torch.arange(4)]
        v16 = torch.einsum("abc,c->ab", v14, self.w15)
        v17 = v16.square().mean() + v14.square().mean() + v6.square().mean()
        return v17


def make_inputs():
    x2 = ints(363, 12, 3, 6)
    return (x2, ), {}


SETTINGS = [{'mesh': {'a': 2, 'tp': 2}, 'layout': 'fsdp+tp', 'recompute': 330}]
