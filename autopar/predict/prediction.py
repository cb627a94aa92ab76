"""What `autopar.predict` answers: time by part, memory by pipeline rank, MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.layout import Layout
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

# What counts as the model's work, as shares of which utilisation is given. Recomputation never counts.
CONVENTIONS = ("causal", "square")


@dataclass(frozen=True)
class Prediction:
    """A step of a layout on a cluster, as `predict` prices it.

    step_time_s: the sum of parts_s ("compute", "tensor and context parallel", or with experts split "tensor, context and expert parallel", "pipeline bubble and hops", "data parallel", "optimizer"; "offload", where the host's link is too slow for it).
    memory_bytes: of every pipeline rank, by part; peak_bytes: of the fullest; usable_bytes: what a device has. layers: by stage, in order. imbalance: that is assumed where ep
    ranks share routed experts.
    """

    model: str
    cluster: str
    devices: int
    layout: Layout
    runtime: str
    global_batch: int
    micro_batches: int
    tokens: int
    step_time_s: float
    parts_s: Mapping[str, float]
    memory_bytes: tuple[Mapping[str, float], ...]
    usable_bytes: float
    layers: tuple[int, ...]
    peak_flops: float
    model_flops: float
    square_flops: float
    imbalance: float = 1.0

    @property
    def peak_bytes(self) -> float:
        return max(sum(r.values()) for r in self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    @property
    def exposed_s(self) -> float:
        """What communication adds: of tensor, context and data parallelism. Hops of a pipeline are in its bubble."""
        return sum(s for part, s in self.parts_s.items() if part.endswith("parallel"))

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.tokens / self.step_time_s

    def mfu(self, convention: str = "causal") -> float:
        """Model FLOPs utilisation (Chowdhery et al., "PaLM", appendix B), of the dense peak of the dtype computed in.

        convention: "causal" counts what attention computes (half of a square, if it is causal), "square" all of it, as PaLM and Megatron-LM do.
        """
        assert convention in CONVENTIONS, convention
        flops = self.model_flops if convention == "causal" else self.square_flops
        return flops / (self.step_time_s * self.devices * self.peak_flops)

    def text(self) -> str:
        fullest = max(range(len(self.memory_bytes)), key=lambda r: sum(self.memory_bytes[r].values()))
        lines = [
            f"{self.model} on {self.cluster} ({self.devices} devices), global batch {self.global_batch}: {self.layout}; runtime {self.runtime}"
            + (f"; imbalance {self.imbalance:g}" if self.layout.ep > 1 else ""),
            f"step {format_time(self.step_time_s)}, {self.tokens_per_s:,.0f} tokens/s ({self.tokens_per_s / self.devices:,.0f} a device), "
            f"MFU {self.mfu('causal'):.1%} (causal attention counted), {self.mfu('square'):.1%} (all of its square)",
            *(f"  {name:<30} {format_time(s):>11}  {s / self.step_time_s:6.1%}" for name, s in self.parts_s.items()),
            f"memory {format_bytes(self.peak_bytes)} of {format_bytes(self.usable_bytes)}"
            + ("" if self.fits else ": does not fit")
            + (f", on pipeline rank {fullest} of {len(self.memory_bytes)}" if len(self.memory_bytes) > 1 else ""),
            *(f"  {name:<30} {format_bytes(b):>11}" for name, b in self.memory_bytes[fullest].items()),
        ]
        if len(self.layers) > 1:
            lines.append(f"layers by stage: {', '.join(map(str, self.layers))}")
        return "\n".join(lines)

    __str__ = text
