"""A process whose groups are broken gets new ones, of those that are left; and groups that stand for ones that do not exist yet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from autopar._torch import sockets
from autopar._torch.distributed import alias_process_group, unalias_process_groups


def leave_groups() -> None:
    """Gives up all groups, broken or not. Their connections are shut first, since destroying a group that anybody holds closes nothing."""
    import torch.distributed as dist

    sockets.shut_sockets()
    if dist.is_initialized():
        unalias_process_groups()
        dist.destroy_process_group()
        _forget_meshes()
    sockets.forget_sockets()


def _forget_meshes() -> None:
    """DTensor keeps what its operators return by operands, whose meshes are equal where ranks and names are: a new mesh would get results on an old one, whose groups are gone."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def join_group(backend: str, store: Any, prefix: str, rank: int, size: int, join_s: float, timeout_s: float) -> None:
    """The default group of a new generation. prefix: in no key of the store before; join_s: how long the others are waited for; timeout_s: of collectives. Collective."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    with sockets.noted():
        dist.init_process_group(
            backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timedelta(seconds=min(join_s, timeout_s))
        )
    _set_pg_timeout(timedelta(seconds=timeout_s))


def imagined_world(rank: int, size: int) -> None:
    """A default group of `size` ranks of which this process is one and the others do not exist: collectives return at once, with what this one has in place of what others would."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def placeholder_group(name: str, size: int) -> Any:
    """A group of `size` ranks under `name` that carries nothing: a compiler asks it for its size, and for that it has to be held. Another takes the name later."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup

    group: Any = ProcessGroup(dist.HashStore(), 0, size)
    fake: Any = FakeProcessGroup._create_internal(0, size) if hasattr(FakeProcessGroup, "_create_internal") else FakeProcessGroup(0, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, fake)
    group._set_group_name(name)
    alias_process_group(name, group)
    return group
