"""`Cost`: seconds of ops, collectives, copies and the optimizer on one rank of a cluster.

    products              launch + FLOPs / (g P) + rho bytes / (eta B)     P peak, B memory bandwidth, both of the device
    attention             launch + max( FLOPs / (g P), bytes / (eta B) )
    everything else       launch + bytes / (eta B)                          bytes: what is left of it after fusion
    random numbers        as these; drawn call by call, all that the operators of a draw move besides
    keeping a value       bytes / (eta B), written and read, if forward would not have written it (`kept.py`)
    views                 0

g, eta and rho are the cluster's fitted constants. Where it has curves, measured seconds of whole calls, those are the price instead:

    products              curve( FLOPs ) + rho ( curve of cheap ops( bytes ), less its least )
    attention             curve( FLOPs ), another one where causality halves them: kernels skip whole blocks, so of short sequences less
    everything else       curve( bytes ), of its rule's kind or else of cheap ops; what runs in another op's kernel, without the least that a call takes

What is priced is LOCAL work: collectives are priced by `collective`, those inside a local
lowering too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost import compute, experts, links, loss_head, memory, ring
from autopar.cost.fusion import Fused, Share, fused
from autopar.cost.links import CollectiveCost
from autopar.cost.op_collectives import inside
from autopar.cost.recompute import LEAST, Halves, halves
from autopar.cost.ring import Within
from autopar.errors import MeshError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware.cluster import Cluster
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy

# Mixed-precision AdamW, one fused pass: reads gradient, parameter and two moments (16 bytes), writes three of them (12), and the
# parameter in half precision (2). Fitted form: psi (30 / D + 6) bytes for psi parameters whose state is split over D ranks.
ADAMW_BYTES = 30.0
# Per element that a rank holds whole, whoever updates it: clearing its gradient (4) and reading it in half precision (2).
WHOLE_BYTES = 6.0
# A draw of random numbers call by call: a counter goes through 37 integer operators (`autopar.kernels.random.bits`), which read and write so many bytes an element
# (counted: tests/unit/test_cost.py).
DRAW_BYTES, DRAW_CALLS = 660.0, 37


@dataclass(frozen=True)
class OpCost:
    """seconds on one rank; flops of products (zero for other ops); bytes to and from device memory; launches: kernels, as a share where others are in them."""

    seconds: float
    flops: float
    bytes: float
    launches: float = 0.0


FREE = OpCost(0.0, 0.0, 0.0)


class Beside(NamedTuple):
    """What the kernel of an op of forward (half 0) or backward (1) does besides, because a value is kept."""

    op: str
    half: int
    seconds: float
    bytes: float
    launches: float


@dataclass(frozen=True)
class Cost:
    """Prices on `cluster`, whose devices `mesh` arranges. fused: what memory-bound ops read and write in company (`fusion.fused`);
    ops that it does not name are taken by themselves. halves: what they do where backward makes some of it again.
    imbalance: of routed experts that are split over ranks, rows of the fullest rank over the mean."""

    cluster: Cluster
    mesh: Mesh
    fused: Fused | None = None
    halves: Halves = field(default_factory=Halves)
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if self.mesh.size > self.cluster.size:
            have, want = self.cluster.size, self.mesh.size
            raise MeshError(
                f"The mesh has {want} devices, the cluster {have}", where=self.cluster.name, fix="name a larger cluster or a smaller mesh"
            )

    @staticmethod
    def compiled(cluster: Cluster, mesh: Mesh, graph: Graph, rules: Mapping[str, Rule]) -> Cost:
        """Prices where memory-bound neighbours of `graph` are compiled into one kernel."""
        together = fused(graph, rules)
        return Cost(cluster, mesh, together, halves(graph, rules, together))

    def op(
        self,
        op: Op,
        rule: Rule,
        strategy: Strategy,
        ins: tuple[Placement, ...],
        outs: tuple[Placement | None, ...],
        recompute: bool = False,
    ) -> OpCost:
        """One run of `op` under `strategy` with its operands and outputs so placed (one placement for each of `op.inputs`), without what it writes, or reads, only where it is
        kept for backward (`kept`). recompute: in backward, an op of forward."""
        if memory.is_view(op, rule):
            return FREE
        flops = compute.flops(op, rule, strategy, self.mesh)
        share = self.share(op, rule)
        launches: float = share.launches
        if recompute and rule.kind not in compute.HEAVY:
            moved, launches = self._moved_again(op, ins, outs, launches)
        else:
            moved = memory.moved_bytes(op, ins, outs, self.mesh, share.reads, share.writes)
        moved += memory.again_bytes(op, ins, self.mesh)
        if experts.is_experts(op):
            load = experts.load_of(rule, strategy, self.mesh, self.imbalance)
            flops *= load
            triton = experts.combined_in_triton(op, self.cluster.device)
            moved += load * experts.moved_bytes(op, compute.local_sizes(rule, strategy, self.mesh), triton)
        if rule.kind == "random" and self.fused is None and outs[0] is not None:
            moved += DRAW_BYTES * math.prod(outs[0].local_shape(self.mesh))
            launches += DRAW_CALLS
        kind = compute.attention_kind(op, rule, strategy, self.mesh) if rule.kind == "attention" else rule.kind
        seconds = self.kernel_s(kind, compute.compute_dtype(op), flops, moved, launches)
        if loss_head.is_loss_head(op):
            n, triton = compute.local_sizes(rule, strategy, self.mesh), loss_head.in_triton(op, self.cluster.device)
            passes, kernels = loss_head.passes_bytes(op, n, triton), loss_head.launches(op, n, triton)
            return OpCost(seconds + self.kernel_s("cheap", "", 0.0, passes, kernels), flops, moved + passes, launches + kernels)
        if rule.alongside:
            triton = not self.cluster.device.why_no_triton(op.inputs[0].dtype)
            merge = ring.merging(op, rule, strategy, compute.local_sizes(rule, strategy, self.mesh), self.mesh, triton)
            if merge[0]:
                return OpCost(seconds + self.kernel_s("cheap", "", 0.0, *merge), flops, moved + merge[0], launches + merge[1])
        return OpCost(seconds, flops, moved, launches)

    def inside(self, op: Op, rule: Rule, strategy: Strategy, ins: tuple[Placement, ...]) -> tuple[Within, ...]:
        """The collectives that one run of `op` has inside."""
        return inside(op, rule, strategy, ins, self.mesh, self.imbalance)

    def waits_s(self, seconds: float, beside_s: float) -> float:
        """Of a collective of `seconds`, beside what the device computes in `beside_s`: how long the device waits, and what it loses meanwhile."""
        hidden_s = min(seconds, beside_s)
        return seconds - hidden_s + self.cluster.contention * hidden_s

    def least_s(self, op: Op, rule: Rule) -> float:
        """What one run of `op` takes at least, however it is split: all its work and all its bytes evenly over all devices. Nothing is said where rates are measured,
        which may be anything."""
        if memory.is_view(op, rule) or self.cluster.device.curves:
            return 0.0
        read, written, launches = self.share(op, rule)
        ins = tuple(Placement.of(t.shape) for t in op.inputs)
        outs = tuple(None if t is None else Placement.of(t.shape) for t in op.outputs)
        moved = memory.moved_bytes(op, ins, outs, self.mesh, read, written) + memory.again_bytes(op, ins, self.mesh)
        moved /= self.mesh.size
        kind = compute.attention_kind(op, rule, {}, self.mesh) if rule.kind == "attention" else rule.kind
        return self.kernel_s(kind, compute.compute_dtype(op), compute.flops(op, rule, {}, self.mesh) / self.mesh.size, moved, launches)

    def kept(self, tensor: str, nbytes: float) -> tuple[Beside, ...]:
        """What keeping a result of forward takes, `nbytes` of it: nothing where forward writes it anyway."""
        aside = self.halves.kept.asides.get(tensor)
        if aside is None:
            return ()
        moved = [(tensor.split(".")[0], 0, (1 + aside.made_of) * nbytes, aside.launches)]
        moved += [(op, 1, part * nbytes, 0.0) for op, part in aside.read.items()]
        return tuple(Beside(op, half, self.kernel_s("cheap", "", 0.0, b, n), b, n) for op, half, b, n in moved)

    def stored(self, op: Op, recompute: bool = False) -> frozenset[str]:
        """Of a memory-bound op's results, those that are in memory though none of them is kept for backward. again: where it runs again there."""
        assert self.fused is not None
        if recompute:
            return self.halves.recompute[op.name].stored if op.name in self.halves.recompute else self.fused[op.name].writes
        return self.halves.kept.ahead[op.name].writes if op.name in self.halves.kept.ahead else self.fused[op.name].writes

    def kernel_s(self, kind: str, dtype: str, flops: float, moved_bytes: float, launches: float) -> float:
        """One kernel, or several alike. kind: "attention", "causal_attention", either with "_backward", a kind of product (`compute.HEAVY`), or anything else, which is bound by memory."""
        d = self.cluster.device
        if d.curves and (measured_s := self._measured_s(kind, dtype, flops, moved_bytes, launches)) is not None:
            return measured_s
        memory_s = self._memory_s(moved_bytes)
        if kind in compute.ATTENTION:
            reached = d.attention_backward_efficiency if kind.endswith("_backward") else d.attention_forward_efficiency
            busy_s = max(flops / (reached * d.peak(dtype)), memory_s)
        elif flops:
            busy_s = flops / (d.matmul_efficiency * d.peak(dtype)) + d.matmul_memory_overlap * memory_s
        else:
            busy_s = memory_s
        return d.launch_s * launches + busy_s

    def collective(self, kind: str, axes: tuple[str, ...], wire_bytes: float) -> CollectiveCost:
        """kind: "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all" | "slice" | "ring" | "jump"; wire_bytes: what a rank sends."""
        return links.collective(self.cluster, self.mesh, kind, axes, wire_bytes)

    def optimizer_s(self, elements: float, bytes_per_element: float = ADAMW_BYTES, whole_elements: float = 0.0) -> float:
        """One step of the optimizer, memory-bound.

        elements: parameters this rank updates (psi / D); whole_elements: those whose gradient it holds whole (psi).
        torch's foreach AdamW goes through memory once for every formula: about 80 bytes an element.
        """
        moved = bytes_per_element * elements + WHOLE_BYTES * whole_elements
        measured = self.cluster.device.curve("optimizer")
        return measured.at(moved) if measured is not None and moved else self._memory_s(moved)

    def host_s(self, nbytes: float) -> float:
        """A copy of `nbytes` between device and pinned host memory, either way."""
        link = self.cluster.host
        return link.latency_s + nbytes / link.reached_Bps if nbytes else 0.0

    def transfer_s(self, resource: str, nbytes: float) -> float:
        """A copy of `nbytes` over one link. resource: "d2h" | "h2d" | "nvme_write" | "nvme_read"."""
        if resource in ("d2h", "h2d") or not nbytes:
            return self.host_s(nbytes)
        disk = self.cluster.nvme
        assert disk is not None, "a cluster without disks"
        link = disk.write if resource == "nvme_write" else disk.read
        return link.latency_s + nbytes / link.reached_Bps

    def _measured_s(self, kind: str, dtype: str, flops: float, moved_bytes: float, launches: float) -> float | None:
        """By the device's curves; None without one for such work."""
        d = self.cluster.device
        cheap = d.curve("cheap")
        n = max(launches, 1.0)
        if kind in compute.ATTENTION:
            found = d.curve(kind, dtype) or d.curve(kind.removeprefix("causal_"), dtype)
            return None if found is None else n * found.at(flops / n)
        if cheap is None:
            return None
        if flops:
            found = d.curve("matmul", dtype)
            traffic_s = cheap.at(moved_bytes / n) - cheap.at(0.0)
            return None if found is None else n * (found.at(flops / n) + d.matmul_memory_overlap * traffic_s)
        found = d.curve(kind) or cheap
        if not moved_bytes:
            return 0.0
        return n * found.at(moved_bytes / n) - (0.0 if launches else found.at(0.0))

    def share(self, op: Op, rule: Rule) -> Share:
        """What one run in its own half reads and writes, whatever is kept."""
        if rule.kind in compute.HEAVY or self.fused is None or op.name not in self.fused:
            written = frozenset(t.name for t in memory.writes(op))
            return Share(frozenset(t.name for t in memory.reads(op)), written, bool(written))
        kept = self.halves.kept
        if op.name in kept.ahead:
            return kept.ahead[op.name]
        share = self.fused[op.name]
        return share._replace(reads=share.reads - kept.reads.get(op.name, frozenset()))

    def _moved_again(self, op: Op, ins: tuple[Placement, ...], outs: tuple[Placement | None, ...], launches: float) -> tuple[float, float]:
        """Bytes and launches of a memory-bound op that runs again in backward."""
        read, written = frozenset(t.name for t in memory.reads(op)), frozenset(t.name for t in memory.writes(op))
        if op.name in self.halves.recompute:
            times, fresh, _ = self.halves.recompute[op.name]
            least = LEAST * memory.moved_bytes(op, ins, outs, self.mesh, read, written)
            return max(least, times * memory.moved_bytes(op, ins, outs, self.mesh, frozenset(), written)), float(fresh)
        if self.fused is not None and op.name in self.fused:
            read, written, launches = self.fused[op.name]
        moved = memory.moved_bytes(op, ins, outs, self.mesh, read, written)
        for t, p in zip(op.outputs, outs, strict=True):
            if t is not None and p is not None and (aside := self.halves.kept.asides.get(t.name)) is not None:
                moved += sum(aside.read.values()) * memory.local_bytes(t, p, self.mesh)
        return moved, launches

    def _memory_s(self, nbytes: float) -> float:
        d = self.cluster.device
        return nbytes / (d.memory_efficiency * d.memory_bandwidth_Bps)
