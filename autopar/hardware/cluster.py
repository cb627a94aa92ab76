"""Hardware: what a device computes and holds, and what links carry. Torch-free; JSON in and out.

    Cluster.of("h100:32x8")     32 nodes of 8 devices
    Cluster.of("h100:8")        8 devices: one node, or as many full nodes as they fill
    Cluster.of("mine.json")     a description of one's own, of the same form as those in `clusters/`, or what `autopar calibrate` measured
    Cluster.detect()            this machine

`parts.py` describes the parts. Peaks and sizes are the vendor's, the fractions of them that are reached (efficiencies) are fitted to published
training runs, or guesses: `sources` says which.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field, ValidationError, model_validator

from autopar.errors import AutoparError
from autopar.hardware.parts import Amount, CollectiveCurve, Count, Device, Link, Model, Network, Nvme, Rows, Source, Uncertainty, shared

R = TypeVar("R")  # what ran a measured step: `autopar.predict.Runtime`
R_co = TypeVar("R_co", covariant=True)
FOLDER = Path(__file__).parent / "clusters"
MAX_FILE_BYTES = 1 << 20  # a description is a few kilobytes: anything larger is no description


class ClusterError(AutoparError):
    """A cluster's name is unknown, or its description is not valid."""


class Cluster(Model):
    """`nodes` times `devices_per_node` equal devices; ranks are laid out node by node.

    intra: inside a node (NVLink, NVSwitch); inter: a device's share of the network cards; host: between device and host memory (PCIe), each way;
    host_memory_bytes: of a whole node. contention: what compute loses while a collective runs beside it, as a share of the collective's time: 0 where
    links work by themselves, 1 where the cores that compute also copy. scatters_whole: a reduce-scatter is an all-reduce of which a rank keeps its part, as in gloo,
    so that it takes as long. curves: measured collectives, which replace what the links say of
    their kinds. sources, or `source` in one text: where the figures are from; uncertainties: of those that were fitted here.
    """

    name: str
    device: Device
    devices_per_node: Count
    nodes: Count
    intra: Link
    inter: Network
    host: Link
    host_memory_bytes: Amount
    nvme: Nvme | None = None
    contention: Annotated[float, Field(ge=0, le=1)] = 0.0
    scatters_whole: bool = False
    curves: Rows[CollectiveCurve] = ()
    source: str = ""
    sources: Rows[Source] = ()
    uncertainties: Rows[Uncertainty] = ()

    @model_validator(mode="before")
    @classmethod
    def _cards(cls, data: Any) -> Any:
        return (
            {**data, "inter": shared(data["inter"], data.get("devices_per_node"))} if isinstance(data, dict) and "inter" in data else data
        )

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.devices_per_node * self.nodes

    @property
    def host_bytes_per_device(self) -> float:
        return self.host_memory_bytes / self.devices_per_node

    def part(self, nodes: int, per_node: int) -> Cluster:
        """So many nodes, with so many devices of each; a part of a node has its part of the host's memory: the rest belongs to whoever has the others."""
        host = self.host_memory_bytes * per_node / self.devices_per_node
        name = f"{self.name.partition(':')[0]}:{nodes}x{per_node}"
        return self.model_copy(update={"name": name, "nodes": nodes, "devices_per_node": per_node, "host_memory_bytes": host})

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    @staticmethod
    def detect() -> Cluster:
        """This machine: its device, as many as torch.distributed or its environment variables say there are processes."""
        found = import_module(_DETECTOR).detect()
        assert isinstance(found, Cluster)
        return found

    @staticmethod
    def of(x: Cluster | str | Path) -> Cluster:
        """A cluster as it is, by name (see the module's head), or from a JSON file."""
        if isinstance(x, Cluster):
            return x
        if isinstance(x, Path):
            return _load(x)
        if not isinstance(x, str):
            raise ClusterError(f"A cluster is a name, a path or a Cluster, not {type(x).__name__}", fix=_HOW)
        text = x.strip()
        base = text.partition(":")[0].lower()
        # A name of ours wins over a file that happens to be called the same.
        if base not in names() and (text.lower().endswith(".json") or "/" in text or "\\" in text or _is_file(text)):
            return _load(Path(text))
        return _named(text)

    @staticmethod
    def fit(runs: Sequence[MeasuredRun[R]]) -> FittedConstants[R]:
        """An `autopar.predict.fit.Fit`: global constants that measured runs are best predicted with; `.cluster(description)` has them in it.

        runs: `autopar.predict.fit.Run`s, each the pieces of a micro-batch, a layout, what ran it, and seconds. Raises AutoparError without any.
        """
        found: FittedConstants[R] = import_module(_FITTER).fit(runs)
        return found


class MeasuredRun(Protocol[R_co]):
    """What `Cluster.fit` asks of a run, as it looks from here (`autopar.predict.fit.Run`). runtime: what ran it."""

    @property
    def runtime(self) -> R_co: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def step_s(self) -> float: ...


class FittedConstants(Protocol[R]):
    """What `Cluster.fit` gives (`autopar.predict.fit.Fit`): constants by name, and descriptions that have them."""

    @property
    def values(self) -> Mapping[str, float]: ...
    @property
    def relative_sd(self) -> Mapping[str, float]: ...
    def cluster(self, cluster: Cluster, /) -> Cluster: ...
    def runtime(self, runtime: R, cluster: Cluster, /) -> R: ...


# By name: descriptions need no torch, only a look at the machine and prices of models do.
_DETECTOR, _FITTER = "autopar.hardware.detect", "autopar.predict.fit"
_HOW = 'write e.g. "h100:32x8" (nodes x devices per node), "h100:8", or the path of a JSON file'
_OWN = "for another device copy the most similar of clusters/*.json and change it, or measure a machine that has it: `autopar calibrate --out mine.json`"
_NAME = re.compile(r"([a-z0-9_.-]+)(?::(?:([0-9]{1,7})x)?([0-9]{1,7}))?")


def names() -> tuple[str, ...]:
    """The clusters that are shipped."""
    return tuple(sorted(f.stem for f in FOLDER.glob("*.json")))


def _named(text: str) -> Cluster:
    m = _NAME.fullmatch(text.lower())
    base = m[1] if m else text.partition(":")[0].lower()
    if base not in names():
        close = difflib.get_close_matches(base, names(), n=3, cutoff=0.4) or names()
        raise ClusterError(
            f"No cluster is called {_short(base)!r}", where=_short(text), fix=f"did you mean {' or '.join(close)}? Else {_HOW}; {_OWN}"
        )
    if m is None:
        raise ClusterError(f"{_short(text)!r} is not how sizes are written", fix=_HOW)
    found = _load(FOLDER / f"{base}.json")
    if m[3] is None:
        return found
    per_node, nodes = int(m[3]), int(m[2]) if m[2] else 1
    whole = found.devices_per_node
    if m[2] is None and per_node > whole:
        nodes, rest = divmod(per_node, whole)
        if rest:
            fix = f'give a multiple of {whole}, or nodes x devices per node such as "{base}:{nodes + 1}x{whole}"'
            raise ClusterError(f"{per_node} devices do not fill nodes of {whole}", where=text, fix=fix)
        per_node = whole
    if not per_node or not nodes:
        raise ClusterError("A cluster has at least one device", where=text, fix=_HOW)
    if per_node > whole:
        fix = f"give at most {whole}, or describe your nodes in a JSON file: copy clusters/{base}.json"
        raise ClusterError(f"A node of {base} has {whole} devices, not {per_node}", where=text, fix=fix)
    return found.part(nodes, per_node)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long a name, a zero byte
        return False


def _load(path: Path) -> Cluster:
    where, fix = _short(str(path)), f"start from one of clusters/*.json ({', '.join(names())})"
    try:
        if not _is_file(str(path)):
            raise ClusterError("There is no such cluster file", where=where, fix=_HOW)
        with path.open("rb") as f:
            text = f.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ClusterError(f"The cluster file cannot be read: {e.strerror}", where=where, fix=_HOW) from None
    if len(text) > MAX_FILE_BYTES:
        raise ClusterError(f"The cluster file has more than {MAX_FILE_BYTES} bytes", where=where, fix=fix)
    try:
        return Cluster.model_validate_json(text)
    except ValidationError as e:
        faults = [f"{_short('.'.join(map(str, f['loc'])) or 'file')}: {_short(f['msg'])}" for f in e.errors(include_url=False)]
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ClusterError(f"The cluster description is not valid: {'; '.join(faults[:5])}{more}", where=where, fix=fix) from None


def _short(text: str) -> str:
    """Not all of what a stranger wrote is repeated."""
    return text if len(text) <= 120 else text[:117] + "..."
