"""Hand layouts: how people arrange a training run. On a mesh that exists a layout gives its axes roles; for a cluster it says sizes.

Roles, for `autopar.compile` and `autopar.plan`: which mesh axes carry data, shard storage, or split tensors.

    ddp      batch over all axes, parameters replicated
    fsdp     batch over all axes, parameters, gradients and optimizer state sharded over all axes (ZeRO-3)
    tp       tensors split over all axes, batch replicated (Megatron-style column/row pairs, found from the graph)
    fsdp+tp  the axis named tp/tensor/model (else the last one) splits tensors, the others are fsdp
    fsdp+ep  fsdp, and the axis named ep/expert/experts (else the last one) splits routed experts, whose tokens are sent to them (GShard, section 3.2)

On a one-axis mesh `fsdp+tp` gives the axis's smallest prime factor to tensors, and `fsdp+ep` all of it to experts.

Sizes, for `autopar.predict`: how many ways each kind of parallelism goes, and all else that makes a hand-tuned run what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.graph.mesh import Mesh
from autopar.planner.expert_folding import DATA, ROLES, TOKENS, Part, together

NAMES = ("ddp", "fsdp", "tp", "fsdp+tp", "fsdp+ep")
_TENSOR_NAMES = ("tp", "tensor", "model")
_EXPERT_NAMES = ("ep", "expert", "experts")
RECOMPUTE = ("none", "selective", "balanced", "full")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Layout:
    """Roles of the axes of a mesh.

    data: axes the batch is split over; shard: axes parameters are stored split over (a subset of data: HSDP when proper);
    tensor: axes ops are split over by their parameters' dims; context: axes the sequence is split over; experts: data axes that split routed experts beside
    tokens (a subset of data; everything else of the model sees data axes like the others). expert_features: where routed experts are arranged otherwise than all else,
    the axes that split what an expert has inside (then experts= may name axes of any role, and the rest splits tokens of experts); None: the tensor axes. Axis names are
    the user's (or refined ones, such as "dp.1"). sequence_parallel: between tensor-parallel products, activations are split over the tensor axes (False: not
    along the sequence; None: as is fastest). reshard_after_forward: gather parameters again in backward (False keeps the gathered copy).

    Sizes, where there is no mesh yet, and all else that a hand-tuned run decides (`autopar.predict`):

    tp, cp, pp: ranks that split tensors, the sequence, the layers. dp: replicas or shards of data; None: as many as the devices allow.
    ep: of the dp ranks, neighbours that share the routed experts and send each other tokens; what an expert has inside is split over tp. expert_tp: it is split over
    so many ranks instead, and experts over the next ep of tp x cp x dp, whatever these do for all else (`autopar.planner.expert_folding`).
    virtual: stages a pipeline rank has (interleaved schedule). micro_batch: sequences of a replica at a time. zero: what is sharded over dp:
    0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too (FSDP). shard_ways: ranks that ZeRO shards over, the rest holding
    replicas (HSDP); None: all of dp. recompute: "none"; "selective", attention's core where no kernel does it without being asked;
    "balanced", what a kernel bound by memory makes (norms, activation products) where a product reads it in backward; "full", all of a layer.
    offload: fraction of the activations kept in host memory; or one for every pipeline rank, of which the first ones hold the most.
    """

    data: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    name: str = "custom"
    context: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int | None = None
    virtual: int = 1
    schedule: str = "1f1b"
    micro_batch: int = 1
    zero: int = 0
    shard_ways: int | None = None
    recompute: str = "none"
    offload: float | tuple[float, ...] = 0.0
    experts: tuple[str, ...] = ()
    ep: int = 1
    expert_tp: int | None = None
    expert_features: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for what in ("tp", "cp", "pp", "ep", "virtual", "micro_batch", "dp", "shard_ways", "expert_tp"):
            n = getattr(self, what)
            if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
                raise LayoutError(f"{what} is {n!r}", where="Layout", fix="give a whole number from 1")
        for what, known in (("recompute", RECOMPUTE), ("schedule", SCHEDULES), ("zero", (0, 1, 2, 3))):
            if getattr(self, what) not in known:
                raise LayoutError(f"{what} is {getattr(self, what)!r}", where="Layout", fix=f"use one of {', '.join(map(str, known))}")
        fractions = self.offload if isinstance(self.offload, tuple) else (self.offload,) * self.pp
        if len(fractions) != self.pp or not all(0 <= x <= 1 for x in fractions):
            raise LayoutError(
                f"offload is {self.offload!r}",
                where=f"Layout, pp={self.pp}",
                fix="give the fraction of activations, from 0 to 1, or one for each pipeline rank",
            )
        if len(self.together) > ROLES:
            raise LayoutError(
                f"a micro-batch's devices have {'three' if len(self.together) == 3 else len(self.together)} roles: "
                + ", ".join(f"{p.name} {p.size}" for p in self.together),
                where=f"Layout, tp={self.tp}, cp={self.cp}, ep={self.ep}"
                + ("" if self.expert_tp is None else f", expert_tp={self.expert_tp}"),
                fix="give two of tp, cp and ep; with expert_tp, 1 or tp for it, and no cp",
            )
        if self.virtual > 1 and self.pp == 1:
            raise LayoutError("virtual stages need a pipeline", where=f"Layout, virtual={self.virtual}", fix="give pp, or virtual=1")
        if self.virtual > 1 and self.schedule == "gpipe":
            raise LayoutError("gpipe has no virtual stages", where=f"Layout, virtual={self.virtual}", fix='use schedule="1f1b"')

    @staticmethod
    def of(layout: str | Layout, mesh: Mesh) -> Layout:
        """`layout` with all axes refined and checked against `mesh`."""
        if isinstance(layout, str):
            layout = _named(layout, mesh)
        if layout.pp > 1:
            raise LayoutError(
                "pipelines are no layout",
                where=f"Layout, pp={layout.pp}",
                fix='pass a mesh such as {"pp": 2, "dp": 4}; sizes are for autopar.predict',
            )
        sizes = [k for k in ("tp", "cp", "ep", "expert_tp") if (getattr(layout, k) or 1) > 1]
        if sizes:
            raise LayoutError(
                f"{', '.join(sizes)} are sizes, and a mesh that exists has axes",
                where=f"Layout, {', '.join(f'{k}={getattr(layout, k)}' for k in sizes)}",
                fix="name the axes of each role, such as Layout(data=('dp',), shard=('dp',), tensor=('tp',)); sizes are for autopar.predict",
            )
        refined = Layout(
            _refine(layout.data, mesh), _refine(layout.shard, mesh), _refine(layout.tensor, mesh), layout.reshard_after_forward, layout.name,
            _refine(layout.context, mesh), layout.sequence_parallel, experts=_refine(layout.experts, mesh),
            expert_features=None if layout.expert_features is None else _refine(layout.expert_features, mesh),
        )  # fmt: skip
        roles = {"data": refined.data, "tensor": refined.tensor, "context": refined.context}
        for a, b in (("data", "tensor"), ("data", "context"), ("tensor", "context")):
            both = set(roles[a]) & set(roles[b])
            if both:
                raise LayoutError(f"axes {sorted(both)} are both {a} and {b} axes", fix="give each mesh axis one role in Layout(...)")
        without = set(refined.experts) - set(refined.data)
        if without and refined.expert_features is None:
            raise LayoutError(
                f"axes {sorted(without)} split experts but no batch",
                where="Layout(experts=...)",
                fix="name them in data= too: a rank that has experts sends them the tokens of its own part of the batch",
            )
        return refined

    def replicas(self, devices: int) -> int:
        """dp on so many devices. Raises LayoutError where the sizes do not fill them."""
        model = self.tp * self.cp * self.pp
        dp = self.dp or max(1, devices // model)
        if model * dp != devices:
            raise LayoutError(
                f"{'dp x ' if self.dp else ''}tp x cp x pp makes {model * (self.dp or 1)}, which does not fill {devices} devices",
                where=f"Layout, tp={self.tp}, cp={self.cp}, pp={self.pp}" + (f", dp={self.dp}" if self.dp else ""),
                fix="let the product of all sizes be the number of devices",
            )
        if self.expert_tp is None and dp % self.ep:
            raise LayoutError(
                f"experts over {self.ep} ranks, of {dp} that have data",
                where=f"Layout, ep={self.ep}",
                fix=f"give a divisor of {dp}, or another tp, cp or pp",
            )
        if self.expert_tp is not None and dp * self.tp * self.cp % (self.ep * self.expert_tp):
            raise LayoutError(
                f"ep x expert_tp makes {self.ep * self.expert_tp}, which does not divide tp x cp x dp, {dp * self.tp * self.cp} ranks",
                where=f"Layout, ep={self.ep}, expert_tp={self.expert_tp}",
                fix="let ep x expert_tp x the ranks that have the same experts be the ranks of a pipeline stage",
            )
        return dp

    @property
    def together(self) -> tuple[Part, ...]:
        """What the ranks do whose micro-batches are computed together, the outermost first."""
        return together(self.tp, self.cp, self.ep, self.expert_tp)

    @property
    def sharing(self) -> int:
        """Ranks with data of their own whose micro-batches are computed together, since they share routed experts."""
        return math.prod(p.size for p in self.together if p.dense == DATA)

    def parts(self, dp: int) -> tuple[Part, ...]:
        """Of a pipeline stage with so many ranks that have data: `together`, and replicas of that."""
        return Part(DATA, TOKENS, dp // self.sharing), *self.together

    def expert_replicas(self, ranks: int) -> int:
        """Of so many ranks that have all else alike but for tp (dp x cp, or those that shards of it lie on), how many have the same routed experts."""
        return max(1, ranks * self.tp // (self.ep * (self.tp if self.expert_tp is None else self.expert_tp)))

    def offload_of(self, rank: int) -> float:
        """The fraction that a pipeline rank offloads."""
        return self.offload[rank] if isinstance(self.offload, tuple) else self.offload

    def __str__(self) -> str:
        said = [f"{k} {getattr(self, k)}" for k in ("dp", "tp", "cp", "pp", "ep") if (getattr(self, k) or 1) > 1]
        said += [] if self.expert_tp is None else [f"expert-tp {self.expert_tp}"]
        said += [f"{self.virtual} virtual stages"] if self.virtual > 1 else []
        said += [f"micro-batch {self.micro_batch}"]
        said += [f"ZeRO-{self.zero}"] if self.zero else []
        said += ["sequence parallel"] if self.sequence_parallel and self.tp > 1 else []
        said += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        first, last = (f"{self.offload_of(r):.0%}" for r in (0, -1))
        if self.offload and max(self.offload_of(r) for r in range(self.pp)) > 0:
            said += [f"offload {first}" + (f" to {last}" if first != last else "")]
        return ", ".join(said)


def _named(name: str, mesh: Mesh) -> Layout:
    axes = tuple(mesh.parents)
    if name == "ddp":
        return Layout(data=axes, name=name)
    if name == "fsdp":
        return Layout(data=axes, shard=axes, name=name)
    if name == "tp":
        return Layout(tensor=axes, name=name)
    if name == "fsdp+tp":
        if len(axes) == 1:
            refined = mesh.children(axes[0])
            return Layout(data=refined[:-1], shard=refined[:-1], tensor=refined[-1:], name=name)
        tensor = next((a for a in axes if a in _TENSOR_NAMES), axes[-1])
        data = tuple(a for a in axes if a != tensor)
        return Layout(data=data, shard=data, tensor=(tensor,), name=name)
    if name == "fsdp+ep":
        return Layout(data=axes, shard=axes, experts=(next((a for a in axes if a in _EXPERT_NAMES), axes[-1]),), name=name)
    raise LayoutError(f"unknown layout {name!r}", fix=f"use one of {', '.join(NAMES)}, or autopar.Layout(data=..., shard=..., tensor=...)")


def _refine(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    out: list[str] = []
    for a in axes:
        if a in mesh.parents:
            out += mesh.children(a)
        elif a in mesh.names:
            out.append(a)
        else:
            raise LayoutError(f"the mesh has no axis {a!r}", where=f"mesh axes {dict(mesh.parents)}", fix="name axes as in mesh_dim_names")
    return mesh.sort(tuple(a for a in out if mesh.axis_size(a) > 1))
