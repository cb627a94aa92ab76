"""What ops, collectives and transfers cost. `Cost` is the one interface: the program, the independent price of a plan and the simulator use it.

To price a new kind of op: its FLOPs in `compute.py`, or what it moves in `memory.py`. A new collective: `links.py`.
"""

from autopar.cost.links import CollectiveCost
from autopar.cost.model import Beside, Cost, OpCost

__all__ = ["Beside", "CollectiveCost", "Cost", "OpCost"]
