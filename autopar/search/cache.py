"""What was solved, in a file: one JSON object a line, written as soon as it is known, so that a search that was interrupted goes on where it was.

A key is a hash of all that the answer depends on: the captured program, how it is shared, the cluster's description, what the plan is for, and the
code that plans and prices (its text, and the solver's version). So a file may be used for any searches; what does not fit is not found.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.planner.kept_plans import code
from autopar.planner.task import Task
from autopar.predict.pieces import Piece
from autopar.predict.work import Task as Kernel
from autopar.predict.work import Transfer, Workload
from autopar.search.lower_bound import Pieces
from autopar.text.strict_json import JsonError, parse, read_bytes, short

FORM = 3


class Cache:
    """Key -> pieces; None: the model cannot be shared so. path: None for this process alone."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.known: dict[str, Pieces | None] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def __getitem__(self, key: str) -> Pieces | None:
        return self.known[key]

    def __setitem__(self, key: str, found: Pieces | None) -> None:
        self.known[key] = found
        if self.path is not None:
            line = json.dumps({"key": key, "pieces": None if found is None else [_written(p) for p in found]})
            try:
                with self.path.open("a", encoding="utf-8") as f:
                    f.write(line + "\n")
            except OSError as e:
                raise _unusable(self.path, e.strerror or "unknown") from None

    def _read(self, path: Path) -> None:
        try:
            data = read_bytes(path)
            whole, _, rest = data.rpartition(b"\n")
            for line in whole.split(b"\n") if whole else ():
                row = parse(line)
                self.known[row["key"]] = None if row["pieces"] is None else tuple(_piece(p) for p in row["pieces"])
            if rest:  # a line that was being written when the process ended
                path.write_bytes(whole + b"\n" if whole else b"")
        except OSError as e:
            raise _unusable(path, e.strerror or "unknown") from None
        except (JsonError, KeyError, TypeError, ValueError) as e:
            raise _unusable(path, short(str(e), 120)) from None


def key_of(task: Task, share: tuple[int | bool | None, ...], fusion: str) -> str:
    """share: sizes of the layout, how a micro-batch is split."""
    graph = task.folded.graph
    training = {f.name: v if not isinstance(v := getattr(task.training, f.name), frozenset) else sorted(v) for f in fields(task.training)}
    text = repr(
        {
            "form": FORM,
            "code": code(),
            "graph": task.folded.fingerprint(),
            "modules": [op.module for op in graph.ops],
            "setting": training,
            "cluster": task.cluster.model_dump_json(),
            "share": (*share, fusion),
        }
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _written(p: Piece) -> dict[str, Any]:
    halves = ("forward", "backward", "recompute")
    plain = {f.name: getattr(p, f.name) for f in fields(Piece) if f.name not in halves}
    return plain | {h: _workload_written(getattr(p, h)) for h in halves}


def _workload_written(s: Workload) -> dict[str, Any]:
    return {"tasks": [[asdict(t), n] for t, n in s.tasks.items()], "transfers": [[asdict(t), n] for t, n in s.transfers.items()]}


def _piece(row: dict[str, Any]) -> Piece:
    quantities: dict[str, Any] = {k: _workload(v) if isinstance(v, dict) else v for k, v in row.items()}
    return Piece(
        **{**quantities, "tensors": tuple((size, n) for size, n in row["tensors"]), "exchanges": tuple(tuple(x) for x in row["exchanges"])}
    )


def _workload(row: dict[str, Any]) -> Workload:
    transfers = {Transfer(**{**t, "axes": tuple(t["axes"]), "routed": t["routed"] and tuple(t["routed"])}): n for t, n in row["transfers"]}
    return Workload({Kernel(**t): n for t, n in row["tasks"]}, transfers)


def _unusable(path: Path, why: str) -> AutoparError:
    return AutoparError(f"The cache cannot be used: {why}", where=short(str(path), 200), fix="name another file, or delete this one")
