"""Which parts of a file are taken. Freed neighbours become one; the smallest free part that fits is used; the file grows when none does."""

from __future__ import annotations

from bisect import bisect_left


class Regions:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.end = 0  # the file has never needed to be longer
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset, never two that touch

    def allocate(self, size: int) -> int | None:
        """The offset; None if the limit does not allow it."""
        fits = [(n, i) for i, (_, n) in enumerate(self._free) if n >= size]
        if fits:
            n, i = min(fits)
            offset = self._free[i][0]
            self._free[i : i + 1] = [(offset + size, n - size)] if n > size else []
            return offset
        offset = self.end
        if self._free and sum(self._free[-1]) == self.end:
            offset = self._free[-1][0]
        if offset + size > self.limit_bytes:
            return None
        if offset < self.end:
            self._free.pop()
        self.end = offset + size
        return offset

    def free(self, offset: int, size: int) -> None:
        i = bisect_left(self._free, (offset, size))
        if i < len(self._free) and offset + size == self._free[i][0]:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            i -= 1
            offset, before = self._free.pop(i)
            size += before
        self._free.insert(i, (offset, size))
