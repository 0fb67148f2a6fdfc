"""Tests of Ray Tune sweeps over trainers on Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search.optuna import OptunaSearch
from ray.util import placement_group_table

from drawbar import train
from drawbar.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from drawbar.tune import TuneReportCallback, as_placement_group_factory
from tests._ray_compat import list_actors

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

HALF = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 4})
"""The cluster of the tests has eight CPUs: room for two trials."""


def count_up(config: dict[str, Any]) -> None:
    """Report the loss of the config in each step, with a checkpoint of the history."""
    path = train.get_checkpoint()
    lineage = Path(path, "lineage").read_text().split() if path else []
    trial = train.get_context().get_trial_id()
    for step in range(len(lineage), config["steps"]):
        lineage.append(f"{trial}:{config['lr']}")
        with train.checkpoint_dir() as folder:
            if train.get_context().get_world_rank() == 0:
                (folder / "lineage").write_text(" ".join(lineage))
            train.report({"loss": config["lr"], "step": step}, checkpoint=folder)


def lineage_of(result: Any) -> list[str]:
    return Path(result.checkpoint.path, "lineage").read_text().split()


def trainer(
    function: Callable[[dict[str, Any]], Any] = count_up,
    run_config: RunConfig | None = None,
    scaling_config: ScalingConfig = HALF,
    **config: Any,
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function, train_loop_config=config, scaling_config=scaling_config, run_config=run_config
    )


def sweep(
    trainable: Any,
    folder: Path,
    param_space: dict[str, Any],
    callbacks: list[tune.Callback] | None = None,
    **options: Any,
) -> list[Any]:
    """Run a sweep to its end; give the results in the order of the trials."""
    config = tune.TuneConfig(metric="loss", mode="min", **options)
    place = tune.RunConfig(name="sweep", storage_path=str(folder), verbose=0, callbacks=callbacks)
    grid: tune.ResultGrid = tune.Tuner(
        trainable, param_space=param_space, tune_config=config, run_config=place
    ).fit()
    return results_of(grid)


def results_of(grid: tune.ResultGrid) -> list[Any]:
    assert grid.num_errors == 0, grid.errors
    return [grid[number] for number in range(len(grid))]


@pytest.fixture
def list_orphans(ray_cluster: None) -> Callable[[], list[str]]:
    """Names the actors and placement groups of this Ray that have come since, and are there.

    Other tests' may be there too: Ray Data keeps some for as long as Ray runs.
    """
    before = {*list_actors(), *placement_group_table()}

    def find() -> list[str]:
        kinds = {
            key: each["ActorClassName"] for key, each in list_actors().items() if _is_there(each)
        }
        kinds |= {key: "group" for key, each in placement_group_table().items() if _is_there(each)}
        return [kind for key, kind in kinds.items() if key not in before]

    return find


def _is_there(row: Mapping[str, Any]) -> bool:
    return row.get("State", row.get("state")) not in ("DEAD", "REMOVED")


@pytest.mark.nightly
def test_halving_with_resources_for_half_of_trials_finishes(
    tmp_path: Path, list_orphans: Callable[[], list[str]]
) -> None:
    before = len(list_actors())
    grid = sweep(
        trainer(steps=4).as_trainable(),
        tmp_path,
        {"train_loop_config": {"lr": tune.grid_search([1, 2, 3, 4])}},
        scheduler=ASHAScheduler(max_t=4, grace_period=2, reduction_factor=2),
    )
    assert list_orphans() == []
    assert len(list_actors()) - before == 4 * (1 + 1)  # each trial, and its worker
    assert sorted(each.metrics["training_iteration"] for each in grid)[-1] == 4
    assert sum(each.metrics["training_iteration"] == 2 for each in grid) >= 2
    best = grid[0]
    assert Path(best.checkpoint.path) == Path(best.path, "run_0", "checkpoint_000003")
    assert best.metrics["checkpoint_path"] == best.checkpoint.path
    assert lineage_of(best) == [f"{best.metrics['trial_id']}:1"] * 4


class CopiesResultsAtTheStart(tune.Callback):
    """Leaves that copy of a trial's results which Tune makes if its ten seconds are over then."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        for name in ("result.json", "progress.csv"):
            Path(trial.path).mkdir(parents=True, exist_ok=True)
            Path(trial.path, name).touch()


@pytest.mark.nightly
def test_population_based_training_keeps_all_results(
    tmp_path: Path, list_orphans: Callable[[], list[str]]
) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"train_loop_config": {"lr": [1, 100]}},
        quantile_fraction=0.5,
        resample_probability=0,
        synch=True,
    )
    grid = sweep(
        trainer(steps=3).as_trainable(),
        tmp_path,
        {"train_loop_config": {"lr": tune.grid_search([1, 100])}},
        callbacks=[CopiesResultsAtTheStart()],
        scheduler=scheduler,
        reuse_actors=True,
    )
    assert list_orphans() == []
    for each in grid:
        assert list(each.metrics_dataframe["training_iteration"]) == [1, 2, 3]
    good, bad = grid
    donor = good.metrics["trial_id"]
    assert lineage_of(bad)[:2] == [f"{donor}:1"] * 2
    assert len(lineage_of(bad)) == 3
    assert bad.checkpoint.path.startswith(f"{bad.path}/run_")
    assert "run_0" not in bad.checkpoint.path


@pytest.mark.usefixtures("ray_cluster")
def test_killed_worker_restarts_within_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that environment variables set in the Tuner's process after Ray's start are there."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--fast"])
    monkeypatch.setenv("HF_SET_LATE", "1")

    def function(config: dict[str, Any]) -> None:
        context = train.get_context()
        found = {"argv": " ".join(sys.argv), "set": os.environ.get("HF_SET_LATE")}
        train.report({"loss": context.get_attempt(), "name": context.get_trial_name(), **found})
        if context.get_attempt() == 0 and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train.collective.barrier()

    config = RunConfig(failure_config=FailureConfig(max_failures=1))
    (result,) = sweep(
        trainer(function, config, ScalingConfig(num_workers=2)).as_trainable(), tmp_path, {}
    )
    assert result.metrics["loss"] == 1
    assert result.metrics["name"].startswith("DataParallelTrainer_")
    assert (result.metrics["argv"], result.metrics["set"]) == ("sweep.py --fast", "1")
    first, second = train.Result.from_path(f"{result.path}/run_0").timeline.attempts
    assert "rank 1: worker process died: killed by SIGKILL" in first.outcome
    assert second.outcome == "finished"


def test_tune_function_with_report_callback_reports_metrics(
    tmp_path: Path, list_orphans: Callable[[], list[str]]
) -> None:
    def trial(config: dict[str, Any]) -> None:
        context = tune.get_context()
        run = RunConfig(
            name=context.get_trial_id(), storage_path=tmp_path, callbacks=[TuneReportCallback()]
        )
        trainer(run_config=run, steps=2, **config).fit()

    trainable = tune.with_resources(trial, as_placement_group_factory(HALF))
    (result,) = sweep(trainable, tmp_path, {"lr": 1})
    assert list_orphans() == []
    assert result.metrics["training_iteration"] == 2
    (run, checkpoint) = Path(result.metrics["checkpoint_path"]).parts[-2:]
    assert (run, checkpoint) == (result.metrics["trial_id"], "checkpoint_000001")


class KillsTheTrial(tune.Callback):
    """Kills a trial's own process when Tune has its first checkpoint."""

    def on_trial_save(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not trial.num_failures:
            os.kill(trial.last_result["pid"], signal.SIGKILL)


@pytest.mark.nightly
def test_killed_optuna_trial_resumes_its_run(
    tmp_path: Path, list_orphans: Callable[[], list[str]]
) -> None:
    def function(config: dict[str, Any]) -> None:
        start = train.get_checkpoint()
        with train.checkpoint_dir() as folder:
            metrics = {"loss": config["lr"], "restored": start is not None}
            train.report(metrics, checkpoint=folder)
        if start is None:
            signal.pause()

    tuner = tune.Tuner(
        trainer(function).as_trainable(),
        param_space={"train_loop_config": {"lr": tune.choice([1, 2])}},
        tune_config=tune.TuneConfig(
            search_alg=OptunaSearch(seed=0), metric="loss", mode="min", num_samples=1
        ),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            verbose=0,
            callbacks=[KillsTheTrial()],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    (result,) = results_of(tuner.fit())
    assert result.metrics["restored"]
    assert Path(result.checkpoint.path) == Path(result.path, "run_0", "checkpoint_000001")
    assert len(train.Result.from_path(f"{result.path}/run_0").timeline.attempts) == 2
    assert list_orphans() == []


class Dies(tune.Callback):
    """Kills the driver when a trial of lr=3 has its first result, which Tune has not saved then.

    It waits with that until Tune, which saves now and then, has saved a loss of 4. Tune restores
    this with the sweep: it dies once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._go = folder / "go"

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for state in self._folder.glob("sweep/experiment_state-*.json"):
            with contextlib.suppress(ValueError):  # it is being written
                saved = json.loads(state.read_text())["trial_data"]
                results = [json.loads(metadata)["last_result"] for _, metadata in saved]
                if self._go.exists() and 4 in [result.get("loss") for result in results]:
                    with open(self._go, "r+b", buffering=0) as go:  # does not block
                        go.write(b"go\n")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        if self._go.exists() and trial.config["train_loop_config"]["lr"] == 3:
            self._go.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def test_sweep_after_driver_kill_resumes_from_tune_state(
    tmp_path: Path,
    drivers: Drivers,
    wait_until_gone: Callable[..., None],
    list_orphans: Callable[[], list[str]],
) -> None:
    """One of lr=2, whose checkpoint Tune has saved, and one of lr=3, of which it knows nothing."""

    def function(config: dict[str, Any]) -> None:
        start, dies = train.get_checkpoint(), (tmp_path / "go").exists()
        if start is None:
            if dies and config["lr"] == 3:
                (tmp_path / "go").open().readline()
            with train.checkpoint_dir() as folder:
                (folder / "pid").write_text(str(os.getpid()))
                train.report({"loss": 5}, checkpoint=folder)
            if dies:
                train.report({"loss": 4})
                signal.pause()
        train.report({"loss": config["lr"], "restored": start is not None})

    def main() -> None:
        sweep(
            DataParallelTrainer(function).as_trainable(),
            tmp_path,
            {"train_loop_config": {"lr": tune.grid_search([2, 3])}},
            callbacks=[Dies(tmp_path)],
        )

    os.mkfifo(tmp_path / "go")
    with drivers(main, TUNE_GLOBAL_CHECKPOINT_S="1") as driver:
        assert driver.wait(300) == -signal.SIGKILL
    left = list(tmp_path.glob("sweep/*/run_0/checkpoint_000000/pid"))
    wait_until_gone([int(pid.read_text()) for pid in left])
    trainable = DataParallelTrainer(function).as_trainable()
    restored = tune.Tuner.restore(str(tmp_path / "sweep"), trainable).fit()
    found = sorted(results_of(restored), key=lambda each: each.metrics["loss"])
    assert [each.metrics["loss"] for each in found] == [2, 3]
    assert [each.metrics["restored"] for each in found] == [True, False]
    assert [Path(each.checkpoint.path).parent.name for each in found] == ["run_0", "run_1"]
    for each in found:
        assert list(each.metrics_dataframe["training_iteration"]) == [1, 2]
    assert list_orphans() == []


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_trials_are_forked(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        train.report({"loss": config["lr"], "is_forked": "_fork_server/server.py" in parent})

    run_config = RunConfig(forkserver_preload=["http.server"])
    trainable = trainer(function, run_config).as_trainable()
    grid = sweep(trainable, tmp_path, {"train_loop_config": {"lr": tune.grid_search([1, 2])}})
    assert [each.metrics["is_forked"] for each in grid] == [True, True]
