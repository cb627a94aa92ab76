"""A checkpoint makes again what its backward reads, so what it returns may be changed in place."""

from tests.fuzz.names import *

D = torch.float64


class M(nn.Module):
    def __init__(self):
        super().__init__()
        fill(self, D)

    def forward(self, x5, x15, x18, x9004):
        def r20(x9004):
            v14 = x9004[:, :, x5].sum(2)
            v17 = F.cross_entropy(x9004, x15)
            v19 = F.softmax(x9004.masked_fill(x18, -20.0), dim=-2)
            return v19
        v21 = checkpoint(r20, x9004, use_reentrant=False)
        v21.unsqueeze_(0)
        return v21


def make_inputs():
    x5 = ints(32, 3, 4)
    x15 = ints(796, 4, 6, 3, 3)
    x18 = bools(470, 6, 4, 3, 3)
    x9004 = randn(1, 6, 4, 3, 3, dtype=D)
    x9004.requires_grad_()
    return (x5, x15, x18, x9004, ), {}


SETTINGS = [{}]
