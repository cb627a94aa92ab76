"""The parts of a cluster's description: devices, links, cards, disks, measured curves, and where each figure is from.

All numbers are SI units: FLOP/s, bytes, bytes/s one way, seconds. Torch-free.

A curve is a few measured (amount, seconds) points: FLOPs of a product, bytes that an op moves, bytes that a rank sends. Between them seconds are
linear, as latency and bandwidth would have them; below the first nothing gets cheaper (what is left is the latency), above the last the slope is that of
the last stretch or of the whole, whichever is more. Points ascend in both, so a curve never falls.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autopar.kernels.triton_takes import DTYPES

# The ranges refuse units gone wrong (GB for bytes, per cent for a fraction) and keep every derived time finite.
Amount = Annotated[float, Field(ge=1, le=1e21)]
Fraction = Annotated[float, Field(ge=1e-3, le=1)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Ratio = Annotated[float, Field(ge=1e-3, le=1e3)]
Path = Annotated[str, Field(min_length=1, max_length=200)]  # of a figure: "device.peak_flops"
Taken = Annotated[float, Field(ge=1e-12, le=1e6)]  # seconds of one point of a curve

T = TypeVar("T")
# JSON's arrays are lists by the time a validator has looked at the whole: the outer type alone is lax.
Rows = Annotated[tuple[T, ...], Field(strict=False, max_length=4096)]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Source(Model):
    """Where figures are from. of: their paths, "device.peak_flops"; a path stands for everything below it."""

    of: Rows[Path]
    text: str


class Uncertainty(Model):
    """One standard deviation of a fitted figure, as a share of it. of: its path."""

    of: Path
    relative: Annotated[float, Field(ge=0, le=1e6)]


class Curve(Model):
    """Measured seconds by amount. relative_sd: of every point, one standard deviation as a share of its seconds."""

    amounts: Annotated[Rows[Amount], Field(min_length=1)]
    seconds: Annotated[Rows[Taken], Field(min_length=1)]
    relative_sd: Rows[Annotated[float, Field(ge=0, le=1e6)]] = ()

    @model_validator(mode="after")
    def _ascends(self) -> Curve:
        if len(self.amounts) != len(self.seconds) or (self.relative_sd and len(self.relative_sd) != len(self.seconds)):
            raise ValueError("a curve has as many seconds as amounts")
        if any(a >= b for a, b in pairwise(self.amounts)):
            raise ValueError("amounts must ascend")
        if any(a > b for a, b in pairwise(self.seconds)):
            raise ValueError("seconds must not fall")
        return self

    def at(self, amount: float) -> float:
        x, t = self.amounts, self.seconds
        i = bisect_right(x, amount)
        if i == 0:
            return t[0]
        if i == len(x):
            return t[-1] + (amount - x[-1]) * self._slope
        return t[i - 1] + (amount - x[i - 1]) * (t[i] - t[i - 1]) / (x[i] - x[i - 1])

    @property
    def _slope(self) -> float:
        """Above the last point. Of one point all is bandwidth."""
        x, t = self.amounts, self.seconds
        return t[0] / x[0] if len(x) == 1 else max((t[-1] - t[i]) / (x[-1] - x[i]) for i in (0, -2))


class WorkCurve(Curve):
    """Of one whole call on one device, its launch too, while all devices of a node work. of: "matmul" or one of `compute.ATTENTION` (amounts: FLOPs; of products
    without what `Device.matmul_memory_overlap` adds), or a rule's kind such as "cheap" or "norm", or "optimizer" (amounts: bytes moved). dtype: of products."""

    of: str
    dtype: str = ""


class CollectiveCurve(Curve):
    """Of a collective over `ranks` members on `nodes` nodes. kind: as in `autopar.cost.links`; amounts: bytes that a rank sends."""

    kind: str
    ranks: Annotated[int, Field(ge=2, le=10_000_000)]
    nodes: Count = 1


class PeakFlops(Model):
    """Dense peak FLOP/s of a matrix product, by dtype. float32 is true float32: torch leaves TF32 off."""

    bfloat16: Amount
    float16: Amount
    float32: Amount
    float64: Amount


class Device(Model):
    """One device.

    memory_bytes: what the driver reports; reserve_bytes: of that for the context, the communicators' buffers and fragmentation.
    matmul_efficiency, attention_*_efficiency: share of the peak that is reached. memory_efficiency (eta): share of the memory bandwidth.
    matmul_memory_overlap (rho): share of a matrix product's memory traffic that is NOT hidden behind its arithmetic.
    reads_ahead: whether a product that is added to what is there reads that while it computes (copies without threads, from Hopper on), not after.
    launch_s: what any kernel takes, however little it does. curves: measured work, which replaces what the constants say of it.
    without_triton: why operators' own passes run in torch there, not in Triton kernels (`autopar.kernels.triton`), as a clause; "" where kernels run.
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
    reads_ahead: bool = False
    launch_s: Seconds
    curves: Rows[WorkCurve] = ()
    without_triton: Annotated[str, Field(max_length=500)] = "the description of the device does not say that it runs them"

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
        return float(getattr(self.peak_flops, _peak_name(dtype)))

    def why_no_triton(self, *dtypes: str) -> str:
        """Why a pass over operands of these dtypes is torch's, not a Triton kernel's; "" where it is."""
        return self.without_triton or next((f"no kernel takes {d}" for d in dtypes if d not in DTYPES), "")

    def curve(self, of: str, dtype: str = "") -> WorkCurve | None:
        """What was measured of such work in such a dtype."""
        name = _peak_name(dtype) if dtype else ""
        return next((c for c in self.curves if c.of == of and c.dtype == name), None) if self.curves else None


def _peak_name(dtype: str) -> str:
    known = {"bfloat16": "bfloat16", "float16": "float16", "float64": "float64", "complex128": "float64"}
    return "bfloat16" if dtype.startswith("float8") else known.get(dtype, "float32")


class Link(Model):
    """A device's share of a connection: bandwidth one way, the fraction of it that is reached, latency of one collective or copy, and of each
    step of a collective's algorithm besides (`autopar.cost.links`)."""

    bandwidth_Bps: Amount
    efficiency: Fraction
    latency_s: Seconds
    step_s: Seconds = 0.0

    @property
    def reached_Bps(self) -> float:
        return self.bandwidth_Bps * self.efficiency


class Tree(Model):
    """A fat tree whose leaf switches connect `leaf_nodes` nodes each. oversubscription: what the cards below a leaf bring by what its uplinks carry."""

    leaf_nodes: Count
    oversubscription: Annotated[float, Field(ge=1, le=1e3)]


class Network(Link):
    """Links between nodes: a device's share of its node's cards while all its devices use them.

    In a file either `bandwidth_Bps`, that share, or the node's cards, `nics_per_node` and `nic_bandwidth_Bps` of each. nics_per_device: below 1 devices
    share cards, and a device reaches more than its share while others are silent. tree: where links above the nodes are the narrower ones.
    """

    nics_per_device: Ratio = 1.0
    tree: Tree | None = None

    @property
    def nic_Bps(self) -> float:
        """What is reached of one card."""
        return self.reached_Bps / self.nics_per_device

    def share_Bps(self, devices: int, senders: int) -> float:
        """What each of `senders` of a node's `devices` reaches while the others are silent: no more than the cards next to it bring."""
        return min(self.nic_Bps * max(1.0, self.nics_per_device), self.reached_Bps * devices / min(senders, devices))


def shared(inter: Any, devices_per_node: Any) -> Any:
    """`inter` of a file with a node's cards written as a device's share of them. What is not well formed stays, for the schema to refuse."""
    if not isinstance(inter, dict) or "nics_per_node" not in inter or "bandwidth_Bps" in inter or "nics_per_device" in inter:
        return inter
    cards, rate = inter["nics_per_node"], inter.get("nic_bandwidth_Bps")
    if type(devices_per_node) is not int or type(cards) is not int or devices_per_node < 1 or cards < 1:
        return inter
    if rate is None or type(rate) not in (int, float):
        return inter
    rest = {k: v for k, v in inter.items() if k not in ("nics_per_node", "nic_bandwidth_Bps")}
    return {**rest, "bandwidth_Bps": float(rate) * cards / devices_per_node, "nics_per_device": cards / devices_per_node}


class Nvme(Model):
    """Local disks, as one device's share of them. capacity_bytes: that may be used; None: as much as is wanted."""

    read: Link
    write: Link
    capacity_bytes: Amount | None = None
