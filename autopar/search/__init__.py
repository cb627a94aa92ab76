"""The best layouts of a training run on a cluster. `space.py` says what is tried, `bounds.py` what need not be, `best_first.py` in which order; prices are
those of `autopar.predict`."""

from autopar.search.api import search
from autopar.search.result import Progress, Ranked, table
from autopar.search.space import Space

__all__ = ["Progress", "Ranked", "Space", "search", "table"]
