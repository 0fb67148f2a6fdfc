"""Simulated ranks send real messages and answer the controller's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._simulated_rank import SimulatedRank
from benchmarks._simulated_ranks import run_simulated_ranks
from drawbar.train import DivergenceError, FailureConfig, RunConfig, WorkerGroupError
from drawbar.train.testing import check_run

NUM_RANKS = 16


def make_config(storage: Path, max_failures: int = 0) -> RunConfig:
    return RunConfig(
        name="run",
        storage_path=storage,
        failure_config=FailureConfig(max_failures=max_failures),
    )


async def _report_and_save(rank: SimulatedRank) -> None:
    rank.report({"step": 0})
    await rank.barrier()
    await rank.report_checkpoint({"step": 1}, f"{rank.world_rank}".encode())
    await rank.report_checkpoint({"step": 2}, f"{rank.world_rank}".encode(), is_staged=False)


def test_simulated_ranks_reports_and_checkpoints_are_stored(tmp_path: Path) -> None:
    result = run_simulated_ranks(
        _report_and_save, num_workers=NUM_RANKS, run_config=make_config(tmp_path)
    )
    assert len(result.metrics_dataframe) == 3 * NUM_RANKS
    assert result.metrics == {"step": 2}
    for checkpoint, _ in result.best_checkpoints:
        files = {path.name: path.read_text() for path in Path(checkpoint).glob("*.bin")}
        assert files == {f"rank_{rank}.bin": f"{rank}" for rank in range(NUM_RANKS)}
    check_run(tmp_path / "run")


def test_simulated_ranks_after_death_resume_from_checkpoint(tmp_path: Path) -> None:
    async def die_once(rank: SimulatedRank) -> None:
        await rank.report_checkpoint({"attempt": rank.attempt})
        if rank.attempt == 0 and rank.world_rank == 3:
            rank.die()
        await rank.barrier()

    result = run_simulated_ranks(
        die_once, num_workers=NUM_RANKS, run_config=make_config(tmp_path, max_failures=1)
    )
    assert [attempt.num_checkpoints for attempt in result.timeline.attempts] == [1, 1]
    assert set(result.metrics_dataframe["attempt"]) == {0, 1}


def test_simulated_ranks_exception_ends_run(tmp_path: Path) -> None:
    async def fail_on_rank_2(rank: SimulatedRank) -> None:
        if rank.world_rank == 2:
            raise ZeroDivisionError
        await rank.barrier()

    with pytest.raises(WorkerGroupError) as raised:
        run_simulated_ranks(fail_on_rank_2, num_workers=NUM_RANKS, run_config=make_config(tmp_path))
    assert [failure.rank for failure in raised.value.failures] == [2]


def test_simulated_ranks_different_calls_are_a_divergence(tmp_path: Path) -> None:
    async def skip_barrier_on_rank_0(rank: SimulatedRank) -> None:
        if rank.world_rank:
            await rank.barrier()

    with pytest.raises(DivergenceError, match="barrier"):
        run_simulated_ranks(
            skip_barrier_on_rank_0, num_workers=NUM_RANKS, run_config=make_config(tmp_path)
        )
