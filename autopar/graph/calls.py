"""What the calls of a rewritten graph are: collectives, waits, views; and how many bytes they make and send. Torch-free: told by names and schemas."""

from __future__ import annotations

from typing import Any

OFFLOADED = "offloaded"  # meta of a node whose saved result is kept elsewhere: the medium
MOVES = "moves"  # meta of a node that brings a tensor to another placement
_C10D = "_c10d_functional."
_SENDS, _BRINGS = ("autopar.offload.default",), ("autopar.reload.default",)
_ENDS = ("autopar.offloaded.default", "autopar.reloaded.default")
_KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
# Ops that share their operand's memory though their schema does not say so.
_UNDECLARED_VIEWS = ("aten._unsafe_view", _C10D + "wait_tensor")


def is_wait(n: Any) -> bool:
    """The end of a collective, or of a transfer to or from where a tensor is kept; its first operand is the issue."""
    return n.op == "call_function" and (_C10D + "wait_tensor" in str(n.target) or str(n.target) in _ENDS)


def is_collective(n: Any) -> bool:
    """A collective's issue; its wait is a call of its own."""
    return n.op == "call_function" and _C10D in str(n.target) and not is_wait(n)


def is_transfer(n: Any) -> bool:
    """The issue of a transfer to or from where a tensor is kept."""
    return n.op == "call_function" and str(n.target) in (*_SENDS, *_BRINGS)


def is_issue(n: Any) -> bool:
    """What is issued now and awaited later."""
    return is_collective(n) or is_transfer(n)


def transferred(n: Any) -> tuple[str, tuple[str, ...], int]:
    """(medium, resources, bytes) of a transfer's issue."""
    if str(n.target) in _SENDS:
        medium = n.args[1]
        return medium, ("d2h", "nvme_write") if medium == "nvme" else ("d2h",), nbytes(n.args[0])
    medium = n.meta[OFFLOADED]
    return medium, ("nvme_read", "h2d") if medium == "nvme" else ("h2d",), nbytes(n)


def shares_storage(n: Any) -> Any:
    """The operand whose storage the call's result is a part of; None where it makes its own."""
    if n.op != "call_function":
        return None
    if getattr(n.target, "__name__", "") == "getitem" or any(v in str(n.target) for v in _UNDECLARED_VIEWS):
        return n.args[0]
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    for given, declared in zip(n.args, schema.arguments, strict=False):
        if declared.alias_info is not None and hasattr(given, "all_input_nodes"):
            return given
    return None


def storage_of(n: Any) -> Any:
    """The call that made the memory of a result; a part of a tuple stays one."""
    while (base := shares_storage(n)) is not None and not isinstance(base.meta["val"], (list, tuple)):
        n = base
    return n


def part_bytes(n: Any) -> list[int]:
    """Bytes of every part of a node's result: one, or those of a tuple. A transfer that brings a tensor has that from its issue on; its ticket
    is nothing."""
    if is_transfer(n) or str(n.target) in _ENDS:
        return [n.meta.get("held_bytes", 0)]
    val = n.meta.get("val")
    parts = val if isinstance(val, (list, tuple)) else [val]
    return [v.numel() * v.element_size() if hasattr(v, "element_size") else 0 for v in parts]


def nbytes(n: Any) -> int:
    """Bytes of a node's result, all of a tuple's."""
    return sum(part_bytes(n))


def collective_of(n: Any, prefix: str) -> tuple[str, tuple[str, ...]]:
    """(kind, axes) of a collective's node; a group is named by prefix, dot, axes joined by plus."""
    name = str(n.target).split(_C10D)[1].split(".")[0]
    group = next(a for a in reversed(n.args) if isinstance(a, str))
    return _KINDS.get(name, name), tuple(group[len(prefix) + 1 :].split("+"))


def wire_bytes(n: Any, width: int) -> float:
    """Bytes a rank sends, ring algorithms: (W-1)/W of the whole for gather and scatter, twice that for all-reduce."""
    whole = max(nbytes(n), nbytes(n.all_input_nodes[0]))
    return whole * (width - 1) / width * (2 if "all_reduce" in str(n.target) else 1)
