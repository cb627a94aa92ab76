"""Hardware: what a device computes and holds, and what links carry. Torch-free; JSON in and out.

    Cluster.of("h100:32x8")     32 nodes of 8 devices
    Cluster.of("h100:8")        8 devices: one node, or as many full nodes as they fill
    Cluster.of("mine.json")     a description of one's own, of the same form as those in `clusters/`

All numbers are SI units of one device: FLOP/s, bytes, bytes/s one way, seconds. Peaks and sizes are the vendor's (each file names its
source); the fractions of them that are reached (efficiencies) are fitted to published training runs, or guesses where a file says so.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import AutoparError

FOLDER = Path(__file__).parent / "clusters"
MAX_FILE_BYTES = 1 << 20  # a description is a few kilobytes: anything larger is no description

# The ranges refuse units gone wrong (GB for bytes, per cent for a fraction) and keep every derived time finite.
Amount = Annotated[float, Field(ge=1, le=1e21)]
Fraction = Annotated[float, Field(ge=1e-3, le=1)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]


class ClusterError(AutoparError):
    """A cluster's name is unknown, or its description is not valid."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PeakFlops(_Model):
    """Dense peak FLOP/s of a matrix product, by dtype. float32 is true float32: torch leaves TF32 off."""

    bfloat16: Amount
    float16: Amount
    float32: Amount
    float64: Amount


class Device(_Model):
    """One device.

    memory_bytes: what the driver reports; reserve_bytes: of that for the context, the communicators' buffers and fragmentation.
    matmul_efficiency, attention_*_efficiency: share of the peak that is reached. memory_efficiency (eta): share of the memory bandwidth.
    matmul_memory_overlap (rho): share of a matrix product's memory traffic that is NOT hidden behind its arithmetic.
    launch_s: what any kernel takes, however little it does.
    """

    name: str
    peak_flops: PeakFlops
    memory_bytes: Amount
    memory_bandwidth_Bps: Amount
    reserve_bytes: Annotated[float, Field(ge=0, le=1e21)]
    matmul_efficiency: Fraction
    attention_forward_efficiency: Fraction
    attention_backward_efficiency: Fraction
    memory_efficiency: Fraction
    matmul_memory_overlap: Annotated[float, Field(ge=0, le=1)]
    launch_s: Seconds

    @model_validator(mode="after")
    def _reserve_fits(self) -> Device:
        if self.reserve_bytes >= self.memory_bytes:
            raise ValueError("reserve_bytes leaves nothing of memory_bytes")
        return self

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes - self.reserve_bytes

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`. Eight-bit floats count as bfloat16, complex ones as their parts; all else as float32."""
        known = {"bfloat16": "bfloat16", "float16": "float16", "float64": "float64", "complex128": "float64"}
        key = "bfloat16" if dtype.startswith("float8") else known.get(dtype, "float32")
        return float(getattr(self.peak_flops, key))


class Link(_Model):
    """A device's share of a connection: bandwidth one way, the fraction of it that is reached, latency of one collective or copy."""

    bandwidth_Bps: Amount
    efficiency: Fraction
    latency_s: Seconds

    @property
    def reached_Bps(self) -> float:
        return self.bandwidth_Bps * self.efficiency


class Nvme(_Model):
    """Local disks, as one device's share of them. capacity_bytes: that may be used; None: as much as is wanted."""

    read: Link
    write: Link
    capacity_bytes: Amount | None = None


class Cluster(_Model):
    """`nodes` times `devices_per_node` equal devices; ranks are laid out node by node.

    intra: inside a node; inter: a device's share of the network cards; host: between device and host memory (each way);
    host_memory_bytes: of a whole node. source: where the figures are from.
    """

    name: str
    device: Device
    devices_per_node: Count
    nodes: Count
    intra: Link
    inter: Link
    host: Link
    host_memory_bytes: Amount
    nvme: Nvme | None = None
    source: str = ""

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.devices_per_node * self.nodes

    @property
    def host_bytes_per_device(self) -> float:
        return self.host_memory_bytes / self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

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


_HOW = 'write e.g. "h100:32x8" (nodes x devices per node), "h100:8", or the path of a JSON file'
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
            f"No cluster is called {_short(base)!r}", where=_short(text), fix=f"did you mean {' or '.join(close)}? Else {_HOW}"
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
    # A part of a node has its part of the host's memory: the rest belongs to whoever has the other devices.
    host = found.host_memory_bytes * per_node / whole
    return found.model_copy(
        update={"name": f"{base}:{nodes}x{per_node}", "nodes": nodes, "devices_per_node": per_node, "host_memory_bytes": host}
    )


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
