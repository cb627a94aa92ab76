"""What the supervisor and the workers of a run say to each other: keys of the supervisor's store, and variables of the environment.

autopar.elastic/latest              the number of the newest generation
autopar.elastic/generation/<g>      its members, as JSON: [worker, ...], a worker's place being its rank
autopar.elastic/stopped             why the run cannot go on
autopar.elastic/settings            silence_s and regroup_s, once the workers have said them
autopar.elastic/beat/<worker>       counts up while a worker lives
autopar.elastic/failed/<g>          how many members a collective of that generation failed on
autopar.elastic/here/<g>/<worker>   a member that is about to join the group
autopar.elastic/whole/<g>           members whose copies are whole again in that generation
autopar.elastic/finished/<worker>   has trained to the end: it is not missed any more
"""

from __future__ import annotations

import json
from typing import Any

STORE = "AUTOPAR_SUPERVISOR"  # host:port
WORKER = "AUTOPAR_WORKER"  # a number of this process, for all its life
PREFIX = "autopar.elastic/"
LATEST, STOPPED, SETTINGS = f"{PREFIX}latest", f"{PREFIX}stopped", f"{PREFIX}settings"


def generation(g: int) -> str:
    return f"{PREFIX}generation/{g}"


def beat(worker: int) -> str:
    return f"{PREFIX}beat/{worker}"


def failed(g: int) -> str:
    return f"{PREFIX}failed/{g}"


def here(g: int, worker: int) -> str:
    return f"{PREFIX}here/{g}/{worker}"


def whole(g: int) -> str:
    return f"{PREFIX}whole/{g}"


def finished(worker: int) -> str:
    return f"{PREFIX}finished/{worker}"


def read(store: Any, key: str) -> Any:
    """What is under `key`; None where nothing is."""
    return json.loads(store.get(key)) if store.check([key]) else None


def write(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))
