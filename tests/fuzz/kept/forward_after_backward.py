"""What backward makes stood before operators of forward, which took it for theirs."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w3 = nn.Parameter(torch.zeros(2, 2))
        self.w4 = nn.Parameter(torch.zeros(2, 2))
        self.w5 = nn.Parameter(torch.zeros(2, 2))
        fill(self, D)

    def forward(self, x):
        q = (x @ self.w3).view(8, 4, 1, 2).transpose(1, 2)
        k = (x @ self.w4).view(8, 4, 1, 2).transpose(1, 2)
        v = (x @ self.w5).view(8, 4, 1, 2).transpose(1, 2)
        h = ((q @ k.transpose(-1, -2) * 0.7071).softmax(-1) @ v).transpose(1, 2).reshape(8, 4, 2)
        return (h @ self.w3).view(8, 4, 2, 1).transpose(1, 2)


def make_inputs():
    x = randn(609, 8, 4, 2, dtype=D).requires_grad_()
    return (x,), {}


SETTINGS = [{'mesh': {'tp': 4}, 'layout': 'tp'}]
