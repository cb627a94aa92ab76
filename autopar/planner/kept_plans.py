"""Plans on disk, so that the second start of a program does not plan again.

A file's name is the hash of everything that its plan depends on: the captured graph, the mesh, the cluster, what is trained and within which memory, the
solver's limits, and the code that plans (its text, and the versions of what it stands on). So nothing is ever out of date: what has changed has another name.
A file says the hash of its content as well; one that is damaged is not believed, but written anew.

`AUTOPAR_CACHE=directory` names the folder; `0` or `off` keeps nothing.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path

import autopar
from autopar import solver
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.fold import Folded
from autopar.solver.solve import Limits
from autopar.text.log import log
from autopar.text.progress import told

VARIABLE = "AUTOPAR_CACHE"
FORM = 1
MAX_FILE_BYTES = 2**28


def folder() -> Path | None:
    """Where plans are kept, None for nowhere: what AUTOPAR_CACHE says, else `autopar` in the user's folder for such things."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() in ("0", "off"):
        return None
    if said:
        return Path(said).expanduser()
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
            base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "autopar"


def key_of(folded: Folded, axes: Mapping[str, int], cluster: Cluster, training: TrainingConfig, limits: Limits, least: bool) -> str:
    """Of everything that `plan_graph` is asked with."""
    setting = {f.name: sorted(v) if isinstance(v := getattr(training, f.name), frozenset) else v for f in fields(training)}
    asked = {
        "form": FORM, "code": code(), "graph": folded.graph, "mesh": list(axes.items()), "cluster": cluster.model_dump_json(),
        "training": setting, "limits": limits, "least": least,
    }  # fmt: skip
    return hashlib.sha256(repr(asked).encode()).hexdigest()


@cache
def code() -> str:
    """Of everything that plans and prices."""
    found = hashlib.sha256()
    for package in ("torch", "ortools"):
        found.update(f"{package} {metadata.version(package)}\n".encode())
    for home in (*autopar.__path__, *solver.__path__):
        for path in sorted(Path(home).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def kept(key: Callable[[], str], folded: Folded, axes: Mapping[str, int], make: Callable[[], Plan], besides: Path | None = None) -> Plan:
    """The plan that is kept as `key()`, else what `make` returns, which is kept from then on. besides: a second folder, asked first.

    A file that does not hold such a plan is warned of and written anew. Where the folder cannot be written, that is warned of.
    """
    homes = [home for home in (besides, folder()) if home is not None]
    if not homes:
        with told("planned"):
            return make()
    name = f"{key()}.json"
    paths = [home / "plans" / name for home in homes]
    with told("plans looked up"):
        plan, lacks = None, list[Path]()
        for path in paths:
            plan = _read(path, folded, axes)
            if plan is not None:
                log.info("the plan of an earlier start: %s", path)
                break
            lacks.append(path)
    if plan is None:
        with told("planned"):
            plan = make()
    for path in lacks:
        _write(path, dumps(plan))
    return plan


def _read(path: Path, folded: Folded, axes: Mapping[str, int]) -> Plan | None:
    try:
        with path.open("rb") as f:
            return _checked(f.read(MAX_FILE_BYTES + 1), path, folded, axes)
    except FileNotFoundError:
        return None
    except OSError as e:
        why = e.strerror or type(e).__name__
    except AutoparError as e:
        why = str(e).partition("\n")[0]
    warnings.warn(f"the kept plan {path} is ignored, and made again: {why}", stacklevel=2)
    return None


def _checked(data: bytes, path: Path, folded: Folded, axes: Mapping[str, int]) -> Plan:
    said, _, text = data.partition(b"\n")
    if said != _sum(text):
        raise AutoparError("its content is not what was written")
    plan = Plan.loads(text, str(path))
    if plan.fingerprint != folded.fingerprint() or list(plan.mesh_axes.items()) != list(axes.items()):
        raise AutoparError("it holds the plan of another program or mesh")
    return plan


def _write(path: Path, text: str) -> None:
    """Whole or not at all: starts beside this one may read and write the same file."""
    data = text.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(_sum(data) + b"\n" + data)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as e:
        warnings.warn(
            f"the plan cannot be kept in {path.parent} ({e.strerror or type(e).__name__}), so the next start plans again: "
            f"name another folder in {VARIABLE}, or switch this off with {VARIABLE}=0",
            stacklevel=2,
        )


def _sum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
