"""Process groups under names, collectives, DTensors, stores and timeouts."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree

from autopar._torch.sockets import noted
from autopar.tensors.memory_format import order_of, strides_of
from autopar.text.log import VARIABLE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

collectives = torch.ops._c10d_functional  # issued and awaited by separate ops, which a graph can hold


def _is_news(record: logging.LogRecord) -> bool:
    """DTensor warns that it has no all-to-all on a CPU whenever a parameter or a gradient goes from one dim's shards to another's. That is slow there, not wrong."""
    return "does not support alltoall" not in record.getMessage() or bool(os.environ.get(VARIABLE))


logging.getLogger("torch.distributed.tensor._collective_utils").addFilter(_is_news)


def _registry() -> Any:
    """torch's groups by name. Newer versions want names of a type of their own, a str at run time, that older ones do not have."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def alias_process_group(name: str, group: Any) -> None:
    """Makes `group` known to functional collectives under `name` too, so that graphs have the same text on every rank; a group that had the name loses it."""
    registry = _registry()
    with contextlib.suppress(RuntimeError):  # nobody has the name, or one that is gone
        if registry._resolve_process_group(name) is group:
            return
    registry._unregister_process_group(name)
    registry._register_process_group(name, group)


def is_open(group: Any) -> bool:
    """Whether `group` of torch's was not destroyed yet."""
    from torch.distributed.distributed_c10d import _world

    return group in _world.pg_map


def has_host(group: Any) -> bool:
    """Whether `group` has a backend for tensors in host memory."""
    return torch.device("cpu") in group._device_types


def new_group(ranks: list[int], name: str, timeout: Any, backend: str | None = None) -> Any:
    """A group of `ranks`, this process among them, under a name that no other group of the job has; collective over `ranks` alone. backend: default: the job's.

    torch.distributed.new_group wants all processes of the job, and takes names from counters of each process: those of two halves of a job
    that make groups by themselves would be the same names in one store.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_timeout, _new_process_group_helper, _world

    world = dist.group.WORLD
    assert world is not None
    ours, store = _world.pg_map[world]
    kind = dist.Backend(ours if backend is None else backend)
    timeout = _get_default_timeout(kind) if timeout is None else timeout
    device = world.bound_device_id if backend is None else None
    make: Any = _new_process_group_helper  # see `_registry`
    with noted():
        made, _ = make(len(ranks), ranks.index(dist.get_rank()), ranks, kind, store, name, timeout=timeout, device_id=device)
    _world.pg_group_ranks[made] = {r: i for i, r in enumerate(ranks)}
    return made


def process_group(name: str) -> Any:
    """The group that functional collectives know under `name`."""
    return _registry()._resolve_process_group(name)


def exchanged(rows: torch.Tensor, send: list[int], receive: list[int], group: str) -> Callable[[], torch.Tensor]:
    """rows [sum(send), ...], for the ranks of `group` one after another -> [sum(receive), ...], from them, once they are waited for."""
    import torch.distributed as dist

    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(out, rows, receive, send, group=process_group(group), async_op=True)

    def waited() -> torch.Tensor:
        work.wait()
        del rows_kept[:]
        return out

    rows_kept = [rows]  # until they are sent
    return waited


_orderly: dict[str, tuple[Any, Any]] = {}  # by name: the default group it was made under, and the group


def orderly(name: str, group: Any, fresh: str) -> Any:
    """`group`, or, where gloo carries it, a group of the same ranks whose collectives run one after another; collective over the ranks on first use of `name`.

    fresh: a text that the ranks agreed on and that was in no key of the store before.

    gloo runs two collectives of a group at a time, and both of its threads note what they ended in one string, without a lock
    (ProcessGroupGloo::runLoop; torch 2.13): after long enough with several all-gathers on their way the heap is damaged ("malloc(): unaligned tcache chunk
    detected"; address sanitizer: double free of that string). torch.distributed.new_group has no argument for the number of threads.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup

    gloo = getattr(dist, "ProcessGroupGloo", None)
    cpu = torch.device("cpu")
    if gloo is None or not has_host(group) or not isinstance(theirs := group._get_backend(cpu), gloo):
        return group
    under, made = _orderly.get(name, (None, None))
    if under is dist.group.WORLD:
        return made
    for old in [n for n, (world, _) in _orderly.items() if world is not dist.group.WORLD]:
        del _orderly[old]
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [gloo.create_default_device()], 1, theirs.options._timeout
    ranks = dist.get_process_group_ranks(group)
    # A name may come again after the default group was destroyed and made anew, perhaps in the same store.
    store = PrefixStore(f"{name}/{'.'.join(map(str, ranks))}/{fresh}", default_store())
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    mine: Any = ProcessGroup(store, rank, size)
    with noted():
        backend = gloo(store, rank, size, options)
    backend.options.global_ranks_in_group, backend.options.group_name = ranks, name
    backend._set_sequence_number_for_group()
    mine._set_default_backend(ProcessGroup.BackendType.GLOO)
    mine._register_backend(cpu, ProcessGroup.BackendType.GLOO, backend)
    mine._set_group_name(name)
    _orderly[name] = (dist.group.WORLD, mine)
    return mine


def let_go_of_groups(mesh: Any) -> None:
    """At the end of the process: drops the orderly groups, and destroyed ones that the mesh (from torch 2.13 on) and default arguments hold."""
    from torch.distributed import ProcessGroup

    _orderly.clear()
    for f in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():  # the default group there was at its import
        if any(isinstance(d, ProcessGroup) and not is_open(d) for d in getattr(f, "__defaults__", None) or ()):
            f.__defaults__ = tuple(None if isinstance(d, ProcessGroup) else d for d in f.__defaults__)
    held: dict[str, Any] = getattr(mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh, "_pg_registry", {})
    for name in [n for n, group in held.items() if not is_open(group)]:
        del held[name]


def unalias_process_groups() -> None:
    """Forgets all aliases (before destroy_process_group, which the registry's references would outlive)."""
    from torch._C._distributed_c10d import _unregister_all_process_groups

    _unregister_all_process_groups()


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor itself (not a view that autograd tracks)."""
    of: Any = t
    local: torch.Tensor = of._local_tensor
    return local


def dtensor(local: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> DTensor:
    """A DTensor of global `shape` from a local shard, without communication. order: its format, by default the shard's."""
    from torch.distributed.tensor import DTensor

    stride = strides_of(shape, order or order_of(local))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def dtensor_spec(like: DTensor) -> Any:
    """What a DTensor knows besides its local tensor; DTensors may share one."""
    return like._spec


@functools.cache
def _maker() -> Any:
    from torch.distributed.tensor import DTensor

    return functools.partial(DTensor.__new__, DTensor)


def wrapped(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor of this spec around a local shard that no gradient flows to and nobody else has. It costs a tenth of `dtensor`, which is an operator of autograd and finds out the spec anew.
    `DTensor.__init__` does nothing, by way of dynamo."""
    found: DTensor = _maker()(local, spec, requires_grad=False)
    return found


def default_timeout(device_type: str) -> Any:
    """How long collectives of the default process group wait; None where its backend does not say."""
    import torch.distributed as dist

    try:
        world: Any = dist.group.WORLD
        return world._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """The key-value store that the process group was initialised with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
