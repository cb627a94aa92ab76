"""What can go wrong on the way out of the device and back."""

from __future__ import annotations

from autopar.errors import AutoparError


class OffloadError(AutoparError):
    """An activation could not be moved away from the device, or not be brought back."""

    def again(self) -> OffloadError:
        """The same error to raise once more: a raised one keeps the frames that it passed, and with them the tensors in them."""
        return OffloadError(self.what, where=self.where, fix=self.fix)
