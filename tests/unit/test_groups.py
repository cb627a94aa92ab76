"""Names of groups: what graphs mean by one is the live group of the model that runs."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar import _torch
from autopar.distributed.groups import Groups
from autopar.errors import MeshError
from autopar.offload import OffloadSettings, close_store, next_number, numbered, open_store
from tests.spmd.simulate import fake_world


def test_a_name_never_keeps_another_group() -> None:
    with fake_world(4):
        a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (a, a, b, a):
            _torch.alias_process_group("name", group)
            assert _torch.process_group("name") is group
        dist.destroy_process_group(a)
        del a, group
        _torch.alias_process_group("name", b)
        assert _torch.process_group("name") is b


def test_two_models_on_meshes_of_the_same_axes() -> None:
    with fake_world(4):
        first, second = (Groups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))) for _ in range(2))
        for g in (first, second):
            g._id = "agreed"  # no ranks are here to agree
        names = {g.ensure(("a",)) for g in (first, second)}
        (name,) = names
        mine, theirs = (g.made[("a",)] for g in (first, second))
        for g, group in ((first, mine), (second, theirs), (first, mine)):
            g.bind()
            assert _torch.process_group(name) is group
        assert mine is not theirs
        dist.destroy_process_group(theirs)
        first.bind()
        assert _torch.process_group(name) is mine
        with pytest.raises(MeshError, match="are destroyed"):
            second.bind()


def test_a_number_is_free_on_all_ranks_that_take_the_highest() -> None:
    """One rank has closed a store that another one still has."""
    settings = OffloadSettings(1 << 20, None, 0)
    assert next_number("a.b") == 0
    for i in (0, 2):
        open_store(numbered("a.b", i), settings)
    assert next_number("a.b") == 3 and next_number("a") == 0
    for i in (0, 2):
        close_store(numbered("a.b", i))
    assert next_number("a.b") == 0
