"""Curves of `drawbar ui` for long and validated runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from drawbar import train, ui
from tests.ui.conftest import Client


@pytest.fixture(scope="module")
def curves_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    def train_func() -> None:
        for step in range(1_000):
            train.report({"loss": 100.0 if step == 567 else math.sin(step)})
        with train.checkpoint_dir() as path:
            train.report({"loss": 0.0}, checkpoint=path, validation=True)

    storage = tmp_path_factory.mktemp("curves")
    train.DataParallelTrainer(
        train_func,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="spike", storage_path=storage),
        validation_config=train.ValidationConfig(lambda checkpoint: {"eval": {"acc": 0.75}}),
    ).fit()
    with ui.start_server([storage], port=0) as server:
        yield Client(server.url)


def test_curves_keep_lowest_and_highest_value_of_each_pixel_column(curves_client: Client) -> None:
    base = f"api/runs/{curves_client.find_id('spike')}/curves"
    curve = curves_client.get(base, points=10, metric="loss")["curves"]["loss"]
    assert len(curve["x"]) <= 20
    assert curve["y"][curve["x"].index(567)] == 100.0
    assert curve["x"] == sorted(curve["x"])


def test_curves_of_validation_metrics_exist_for_all_queries(curves_client: Client) -> None:
    base = f"api/runs/{curves_client.find_id('spike')}/curves"
    curve = {"x": [1_000], "y": [0.75]}
    for query in ({}, {"exact": 1}, {"metric": "eval/acc", "exact": 1}):
        assert curves_client.get(base, **query)["curves"]["eval/acc"] == curve, query
    band = curves_client.get(base, ranks="band")["curves"]["eval/acc"]
    assert (band["x"], band["median"], band["ranks"]) == ([1_000], [0.75], 1)
    each = curves_client.get(base, ranks="each")["curves"]["eval/acc"]
    assert each == {"ranks": {"0": curve}}
