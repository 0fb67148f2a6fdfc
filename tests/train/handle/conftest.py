"""A cluster without free resources."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.util.placement_group import placement_group, remove_placement_group


@pytest.fixture
def occupied_cluster(ray_cluster: None) -> Iterator[None]:
    """Reserve all CPUs, so that workers wait for theirs."""
    group = placement_group([{"CPU": 8}])
    assert group.wait(300)
    yield
    remove_placement_group(group)
