"""`offload=`: what it may be, and what is said of what it may not."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.offload import Offload

H100, CPU = Cluster.of("h100:8"), Cluster.of("cpu:2")


@pytest.mark.parametrize(
    ("said", "media"),
    [
        (None, ()),
        (False, ()),
        (True, ("host",)),
        ("host", ("host",)),
        ("nvme", ("nvme",)),
        ("host,nvme", ("host", "nvme")),
        (Offload(nvme="/x"), ("host", "nvme")),
    ],
)
def test_media(said: Offload | str | bool | None, media: tuple[str, ...]) -> None:
    training = Offload.of(said, CPU).within(TrainingConfig(frozenset()), CPU)
    assert training.media == media
    assert training.host_bytes == 0.9 * CPU.host_bytes_per_device and training.nvme_bytes == float("inf")


def test_limits_of_ones_own() -> None:
    training = Offload.of(Offload(host_bytes=1e9, nvme="/x", nvme_bytes=2e9), CPU).within(TrainingConfig(frozenset()), CPU)
    assert (training.host_bytes, training.nvme_bytes) == (1e9, 2e9)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("disk", "offload='disk' is not known"),
        (Offload(host_bytes=-1.0), "Offload(host_bytes=-1.0) is no number of bytes"),
        (3, "offload=3 is not known"),
    ],
)
def test_what_is_not_known(said: object, what: str) -> None:
    with pytest.raises(AutoparError) as error:
        Offload.of(said, H100)  # type: ignore[arg-type]
    assert error.value.what == what and error.value.fix


def test_a_cluster_without_disks() -> None:
    with pytest.raises(AutoparError, match="local disks, and the cluster has none"):
        Offload.of("nvme", H100)
