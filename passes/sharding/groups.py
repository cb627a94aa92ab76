"""Names of process groups in graphs, the same on every rank."""

from __future__ import annotations

from torch import fx


def group_name(prefix: str, axes: tuple[str, ...]) -> str:
    """The rank-neutral name of the process group over `axes`."""
    return f"{prefix}.{'+'.join(axes)}"


def group_names(gm: fx.GraphModule, prefix: str) -> list[tuple[str, ...]]:
    """The axes of every group that the graph's collectives name, sorted."""
    names = {a for n in gm.graph.nodes for a in n.args if isinstance(a, str) and a.startswith(prefix + ".")}
    return sorted(tuple(n[len(prefix) + 1 :].split("+")) for n in names)
