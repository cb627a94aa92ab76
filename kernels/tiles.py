"""Tiles of a product that is not made whole: how many rows of each operand there are in one. Torch-free."""

from __future__ import annotations

import math

# Results of a tile: 64 MiB in float32, and products that are still as fast as larger ones.
TILE = 2**24


def sides(tokens: int, words: int, tile: int) -> tuple[int, int]:
    """Tokens and words of a tile of so many results: at most twice as many tokens as words, of which more is read and written for every tile; all of what is fewer."""
    most = max(1, min(tokens, math.isqrt(2 * tile)))
    chunk = -(-tokens // -(-tokens // most)) if tokens else 1  # even ones
    return chunk, max(1, min(words, tile // chunk))
