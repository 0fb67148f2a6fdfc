"""A cluster that has no place for a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.util.placement_group import placement_group, remove_placement_group


@pytest.fixture
def occupied_cluster(ray_cluster: None) -> Iterator[None]:
    """All CPUs are taken, so that workers wait for theirs."""
    group = placement_group([{"CPU": 8}])
    assert group.wait(30)
    yield
    remove_placement_group(group)
