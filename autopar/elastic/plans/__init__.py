"""Plans ahead for every number of devices that may be left, without a cluster, and what failures cost by them.

In: a model, shapes, a cluster. Out: `templates` (templates.py), which prices groups of devices (groups.py), combines them (combine.py) and says what moves (moves.py); table.py has what it says.
`simulate` (goodput.py) replays failures (failures.py) on that: policies.py has the ways to live with them, ledger.py where their seconds go, checkpoints.py how often to write one, chart.py the picture.
**Another way to combine groups goes into combine.py, beside its test against brute force; another way to live with failures is a policy.**
"""

from __future__ import annotations

from autopar.elastic.plans.failures import Failure
from autopar.elastic.plans.goodput import Outcome, Setting, Simulation, simulate
from autopar.elastic.plans.table import Size, Templates
from autopar.elastic.plans.templates import templates

__all__ = ["Failure", "Outcome", "Setting", "Simulation", "Size", "Templates", "simulate", "templates"]
