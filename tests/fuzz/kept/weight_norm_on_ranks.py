"""Weight normalisation split over ranks: its backward wants operands without gaps."""

from tests.fuzz.names import *

D = torch.float32


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m2 = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        fill(self, D)

    def forward(self, batch):
        x1 = batch["x1"]
        v3 = self.m2(x1)
        return v3


def make_inputs():
    x1 = randn(951, 3, dtype=D)
    return ({"x1": x1, "rest": []},), {}


SETTINGS = [{'mesh': {'a': 3}, 'layout': 'random', 'seed': 111}]
