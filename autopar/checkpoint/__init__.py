"""Checkpoints of a run: what `autopar.checkpoint.save` and `load` write and read, and models as safetensors.

In: a module and an optimizer, on any mesh. Out: files that another mesh, or one process, reads. `dcp.py` has the order in which a save makes itself whole,
`background.py` what is written beside training,
`place.py` what it needs of a file system: **add one there**; `ranks.py` what ranks do together; `safetensors.py` reads and writes Hugging Face's format; `whole.py` takes and gives whole tensors on one rank.
"""

from autopar.checkpoint.background import Saving
from autopar.checkpoint.dcp import load, save
from autopar.checkpoint.whole import load_state_dict, state_dict

__all__ = ["Saving", "load", "load_state_dict", "save", "state_dict"]
