"""What the supervisor and the workers of a run say to each other: keys of the supervisor's store, and variables of the environment.

autopar.elastic/latest              the number of the newest generation
autopar.elastic/generation/<g>      its members, as JSON: [worker, ...], a worker's place being its rank
autopar.elastic/stopped             why the run cannot go on
autopar.elastic/settings            silence_s and regroup_s, once the workers have said them
autopar.elastic/beat/<worker>       counts up while a worker lives
autopar.elastic/failed/<g>          how many members a collective of that generation failed on
autopar.elastic/here/<g>/<worker>   a member that is about to join the group
autopar.elastic/whole/<g>           members whose copies are whole again in that generation
autopar.elastic/finished/<worker>   how many passes through the data it has trained to the end, and whether it goes on: if not, it is not missed any more

Where processes may join (`autopar.elastic.growth`, `autopar.elastic.newcomer`):

autopar.elastic/program/<what>      what a process must have in common with the members: "model" when it compiles, "session", "steps"; and
                                    "plans": by number of ranks, where the planner made them
autopar.elastic/passes              passes through the data so far: [steps done before it, whether it went to the loader's end], ...
autopar.elastic/ready/<worker>      the pass in which it is ready to be let in, counted from 0
autopar.elastic/ready               by the supervisor: a generation, and the passes in which somebody is to be let in
autopar.elastic/between/<g>/<worker>  a member of that generation that waits between two steps, in this pass, for others to be let in
autopar.elastic/unfit/<worker>      why it can never join: another program

Where there are several nodes (`autopar.elastic.agent`):

autopar.elastic/nodes               by worker, the node it is on
autopar.elastic/came/<node>         how many workers a node has place for, and its agent's name: another one when it comes back
autopar.elastic/begin/<agent>       the environment of each worker that it is to start
autopar.elastic/agent/<agent>       counts up while it lives
autopar.elastic/not-let-in/<agent>  why an agent that has come is not wanted
autopar.elastic/ended/<worker>      its exit code
autopar.elastic/given-up            workers that their agents are to end
autopar.elastic/over                the run's exit status: agents end
autopar.elastic/left/<agent>        it has heard that
"""

from __future__ import annotations

import json
from typing import Any

STORE = "AUTOPAR_SUPERVISOR"  # host:port
WORKER = "AUTOPAR_WORKER"  # a number of this process, for all its life
FULL = "AUTOPAR_FULL"  # how many ranks there are at most, where processes may join
PLACE = "AUTOPAR_PLACE"  # of this process, from 0: ranks have the order of their places
JOINS = "AUTOPAR_JOINS"  # this process came later: it is to join
PREFIX = "autopar.elastic/"
ANSWER_S = 20.0  # the store's patience with one question
LATEST, STOPPED, SETTINGS = f"{PREFIX}latest", f"{PREFIX}stopped", f"{PREFIX}settings"
NODES, GIVEN_UP, OVER = f"{PREFIX}nodes", f"{PREFIX}given-up", f"{PREFIX}over"
PASSES, READY = f"{PREFIX}passes", f"{PREFIX}ready"


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


def program(what: str) -> str:
    return f"{PREFIX}program/{what}"


def ready(worker: int) -> str:
    return f"{PREFIX}ready/{worker}"


def between(g: int, worker: int) -> str:
    return f"{PREFIX}between/{g}/{worker}"


def unfit(worker: int) -> str:
    return f"{PREFIX}unfit/{worker}"


def not_let_in(agent: str) -> str:
    return f"{PREFIX}not-let-in/{agent}"


def came(node: int) -> str:
    return f"{PREFIX}came/{node}"


def begin(agent: str) -> str:
    return f"{PREFIX}begin/{agent}"


def agent(name: str) -> str:
    return f"{PREFIX}agent/{name}"


def ended(worker: int) -> str:
    return f"{PREFIX}ended/{worker}"


def left(agent: str) -> str:
    return f"{PREFIX}left/{agent}"


def read(store: Any, key: str) -> Any:
    """What is under `key`; None where nothing is."""
    return json.loads(store.get(key)) if store.check([key]) else None


def write(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))
