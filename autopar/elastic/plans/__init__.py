"""Plans ahead for every number of devices that may be left, without a cluster.

In: a model, shapes, a cluster. Out: `templates` (templates.py), which prices groups of devices (groups.py), combines them (combine.py) and says what moves (moves.py); table.py has what it says.
**Another way to combine groups goes into combine.py, beside its test against brute force.**
"""

from __future__ import annotations

from autopar.elastic.plans.table import Size, Templates
from autopar.elastic.plans.templates import templates

__all__ = ["Size", "Templates", "templates"]
