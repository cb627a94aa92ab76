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

Where there are several nodes (`autopar.elastic.agent`):

autopar.elastic/nodes               by worker, the node it is on
autopar.elastic/came/<node>         how many workers a node has place for
autopar.elastic/begin/<node>        the environment of each worker that its agent is to start
autopar.elastic/agent/<node>        counts up while an agent lives
autopar.elastic/ended/<worker>      its exit code
autopar.elastic/given-up            workers that their agents are to end
autopar.elastic/over                the run's exit status: agents end
autopar.elastic/left/<node>         its agent has heard that
"""

from __future__ import annotations

import json
from typing import Any

STORE = "AUTOPAR_SUPERVISOR"  # host:port
WORKER = "AUTOPAR_WORKER"  # a number of this process, for all its life
PREFIX = "autopar.elastic/"
ANSWER_S = 20.0  # the store's patience with one question
LATEST, STOPPED, SETTINGS = f"{PREFIX}latest", f"{PREFIX}stopped", f"{PREFIX}settings"
NODES, GIVEN_UP, OVER = f"{PREFIX}nodes", f"{PREFIX}given-up", f"{PREFIX}over"


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


def came(node: int) -> str:
    return f"{PREFIX}came/{node}"


def begin(node: int) -> str:
    return f"{PREFIX}begin/{node}"


def agent(node: int) -> str:
    return f"{PREFIX}agent/{node}"


def ended(worker: int) -> str:
    return f"{PREFIX}ended/{worker}"


def left(node: int) -> str:
    return f"{PREFIX}left/{node}"


def read(store: Any, key: str) -> Any:
    """What is under `key`; None where nothing is."""
    return json.loads(store.get(key)) if store.check([key]) else None


def write(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))
