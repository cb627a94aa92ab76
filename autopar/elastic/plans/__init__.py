"""Plans ahead for every number of devices that may be left, without a cluster, and what failures cost by them.

In: a model, shapes, a cluster. Out: `templates` (templates.py), which prices groups of devices (groups.py), combines them (combine.py) and says what moves (moves.py); `simulate` (goodput.py), which
replays failures (failures.py) on what that predicts, beside checkpoints (checkpoints.py) and others. **Another way to live with failures is a policy in policies.py.**
"""

from __future__ import annotations

from autopar.elastic.plans.templates import Templates, templates

__all__ = ["Templates", "templates"]
