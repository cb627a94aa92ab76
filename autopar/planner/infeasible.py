"""The error of a budget that no plan keeps to."""

from __future__ import annotations

from autopar.errors import AutoparError
from autopar.text.sizes import format_bytes


class InfeasibleError(AutoparError):
    """No plan fits. constraint: what cannot be met, for people; shortfall_bytes: by how much the best plan misses it; remedy: what would lift it;
    may_be_parted: whether more micro-batches may help, which they do not where the batch is one sample, or does not divide over the mesh.

    A kind of its own, because a script that plans for many clusters wants to tell "does not fit" from "was called wrongly".
    """

    def __init__(self, constraint: str, shortfall_bytes: float, remedy: str, *, where: str = "", may_be_parted: bool = False) -> None:
        self.constraint, self.shortfall_bytes, self.remedy, self.may_be_parted = constraint, shortfall_bytes, remedy, may_be_parted
        super().__init__(f"No plan fits: {constraint}; {format_bytes(shortfall_bytes)} too much", where=where, fix=remedy)

    def of_one_micro_batch(self) -> InfeasibleError:
        """The same, where nobody has tried more of them."""
        if not self.may_be_parted:
            return self
        return InfeasibleError(self.constraint, self.shortfall_bytes, f'{self.remedy}; or several micro-batches: micro_batches="auto"')
