"""Results of collectives: large ones are shared on Ray, and too large ones are an error."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest

from drawbar.train import (
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    collective,
    get_context,
)
from drawbar.train.testing import run_in_threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

LARGE = 3_000_000


@pytest.mark.usefixtures("ray_cluster")
def test_collectives_large_values_reach_all_ranks(tmp_path: Path) -> None:
    def function() -> list[tuple[int, int]]:
        rank = get_context().get_world_rank()
        first = collective.broadcast_from_rank_zero(b"0" * LARGE if rank == 0 else b"")
        collective.barrier()
        gathered = collective.all_gather(bytes([rank]) * (LARGE + rank))
        return [(value[0], len(value)) for value in [first, *gathered]]

    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path),
    ).fit()
    assert result.return_values == [[(48, LARGE), (0, LARGE), (1, LARGE + 1)]] * 2


def test_all_gather_above_limit_names_line_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar.train._controller.rank_progress.MAX_RESULT_BYTES", 1000)

    def function() -> None:
        collective.all_gather(b"0" * 400)
        collective.all_gather(b"0" * 600)

    with pytest.raises(TrainingFailedError) as raised:
        run_in_threads(function, num_workers=2, run_config=RunConfig(storage_path=tmp_path))
    text = str(raised.value)
    assert "all_gather()" in text
    assert f"{Path(__file__).name}:" in text
    assert "at most 1 kB (1000 bytes)" in text
