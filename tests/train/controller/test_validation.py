"""Validation of checkpoints: metrics, scheduling, and failures."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    FailureConfig,
    ReportedCheckpointStatus,
    Result,
    RunConfig,
    ValidationConfig,
    ValidationTaskConfig,
    WorkerGroupError,
    runs,
)
from drawbar.train.testing import run_in_threads
from tests.train.controller.validated_runs import (
    COMMITTED,
    PENDING,
    Gate,
    fit,
    manifests,
    number_in,
    save,
    save_with,
    squared,
    statuses,
    wait_forever,
)

if TYPE_CHECKING:
    from tests.train.conftest import Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


# -- arguments and metrics


def test_validation_metrics_are_added_to_checkpoint_metrics(tmp_path: Path) -> None:
    def function() -> list[Any]:
        save(2, validation=False)
        save(3)
        save(4, ValidationTaskConfig({"plus": math.pi}))
        return [checkpoint[1:] for checkpoint in train.get_all_reported_checkpoints()]

    config = ValidationConfig(squared, ValidationTaskConfig({"plus": 1}, timeout_s=60))
    result = fit(function, tmp_path, config)
    metrics = [{"number": 2}, {"number": 3, "square": 10}, {"number": 4, "square": 16 + math.pi}]
    status = ReportedCheckpointStatus
    assert result.return_value == [
        (metrics[0], status.COMMITTED),
        (metrics[1], status.VALIDATED),
        (metrics[2], status.VALIDATED),
    ]
    for loaded in (result, Result.from_path(tmp_path / "run")):
        assert [checkpoint_metrics for _, checkpoint_metrics in loaded.best_checkpoints] == metrics
        assert loaded.metrics == metrics[-1]
        assert list(loaded.metrics_dataframe["square"].dropna()) == [10, 16 + math.pi]
    events = runs.find_run(tmp_path / "run").list_events()
    validated = [event["index"] for event in events if event["event"] == "checkpoint_validated"]
    assert validated in ([1, 2], [2, 1])
    validations = [manifest.validation for manifest in manifests(tmp_path)]
    assert [validation and validation.timeout_s for validation in validations] == [None, 60, 60]
    assert result.checkpoint is not None
    result.checkpoint.verify()


def test_validation_metrics_keep_nan_and_infinity(tmp_path: Path) -> None:
    metrics = {"a": {"nan": float("nan"), "b": [float("-inf")]}}
    fit(lambda: save(1), tmp_path, ValidationConfig(lambda checkpoint: metrics))
    (manifest,) = manifests(tmp_path)
    assert math.isnan(manifest.metrics["a"]["nan"])
    assert manifest.metrics["a"]["b"] == [float("-inf")]
    assert manifest.validation is not None
    assert manifest.validation.metrics["a"]["b"] == [float("-inf")]


def test_validation_metric_that_replaces_a_reported_one_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = ValidationConfig(lambda checkpoint: {"number": 7, "square": 49})
    result = fit(save_with({}, {}), tmp_path, validation)
    assert [metrics for _, metrics in result.best_checkpoints] == [{"number": 7, "square": 49}] * 2
    warning = "The validation replaces reported metrics of the same name: 'number'."
    assert capsys.readouterr().err.count(warning) == 1


def test_validation_requests_of_several_ranks_use_the_lowest_rank(tmp_path: Path) -> None:
    def function() -> list[str]:
        rank = train.get_context().get_world_rank()
        save(rank, ValidationTaskConfig({"plus": rank}) if rank else False)
        return statuses()

    config = RunConfig(name="run", storage_path=tmp_path)
    result = run_in_threads(
        function, num_workers=3, run_config=config, validation_config=ValidationConfig(squared)
    )
    assert result.return_values == [["VALIDATED"]] * 3
    assert result.best_checkpoints[0][1]["square"] == 1


def test_report_with_copied_validation_record_raises(tmp_path: Path) -> None:
    def function() -> None:
        save(3)
        train.get_all_reported_checkpoints()
        latest = train.get_checkpoint()
        assert latest is not None
        copy = Path(latest).with_name("copy")
        shutil.copytree(latest, copy, ignore=shutil.ignore_patterns(".drawbar.json"))
        (copy / "number").write_text("4")
        mode = CheckpointUploadMode.NO_UPLOAD
        train.report({}, copy, checkpoint_upload_mode=mode, validation=True)

    with pytest.raises(WorkerGroupError, match=r"/copy/\.drawbar-.*reserves this name"):
        fit(function, tmp_path, ValidationConfig(squared))


def test_retention_ranks_by_validation_metric(tmp_path: Path) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="square")

    def function() -> list[str]:
        for number in (1, 3, 2):
            save(number)
            train.get_all_reported_checkpoints()
        checkpoints = train.get_all_reported_checkpoints()
        return [Path(checkpoint.checkpoint).name for checkpoint in checkpoints]

    result = fit(function, tmp_path, ValidationConfig(squared), checkpoint_config=config)
    assert result.return_value == ["checkpoint_000001", "checkpoint_000002"]
    assert result.best_checkpoints[-1][1] == {"number": 3, "square": 9}


# -- concurrency with training


@pytest.mark.usefixtures("ray_cluster")
def test_validations_run_during_training_two_at_a_time(tmp_path: Path, pipe: Pipe) -> None:
    """They run in separate processes, and their checkpoints are not deleted meanwhile."""
    gates = [Gate(tmp_path / f"gate_{number}") for number in range(4)]

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        number = number_in(checkpoint)
        pipe.send("begins", number)
        (tmp_path / f"begun_{number}").touch()
        gates[number].wait()
        pipe.send("ends", number)
        return {"accuracy": [0.1, 0.9, 0.5, 0.2][number], "pid": os.getpid()}

    def function() -> tuple[list[str], list[str], int]:
        for number in range(4):
            save(number)
        before = statuses(COMMITTED)
        while not all((tmp_path / f"begun_{number}").exists() for number in (0, 1)):
            threading.Event().wait(0.01)
        for number in (1, 0, 2, 3):  # the second one runs before the first one has ended
            gates[number].open()
        return before, statuses(), os.getpid()

    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")
    result = fit(function, tmp_path, ValidationConfig(validate), 1, checkpoint_config=config)
    before, after, worker = result.return_value
    assert (before, after) == ([PENDING] * 4, ["VALIDATED"] * 2)  # the best and the latest
    assert [metrics["number"] for _, metrics in result.best_checkpoints] == [3, 1]
    pids = {metrics["pid"] for _, metrics in result.best_checkpoints}
    assert not pids & {os.getpid(), worker}
    messages = [pipe.receive() for _ in range(8)]
    running = [
        sum((word == "begins") - (word == "ends") for word, _ in messages[: i + 1])
        for i in range(8)
    ]
    assert max(running) == 2


def test_validations_start_in_report_order(tmp_path: Path, pipe: Pipe) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        pipe.send(number_in(checkpoint))
        return {}

    fit(save_with(*[{}] * 5), tmp_path, ValidationConfig(validate, max_concurrent=1))
    assert [pipe.receive() for _ in range(5)] == [list(number) for number in "01234"]


def test_checkpoint_list_without_waiting_shows_pending_validation(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        gate.wait()
        return {}

    def function() -> list[list[str]]:
        save(1, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        before = [statuses(COMMITTED), statuses(CheckpointConsistencyMode.VALIDATED, 0.01)]
        gate.open()
        return [*before, statuses()]

    result = fit(function, tmp_path, ValidationConfig(validate))
    assert result.return_value == [[PENDING], [PENDING], ["VALIDATED"]]


def test_hang_timeout_ignores_rank_waiting_for_validation(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        threading.Event().wait(1.5)  # longer than the hang timeout
        return {}

    failures = FailureConfig(hang_timeout=1)
    config = ValidationConfig(validate)
    result = fit(save_with({}), tmp_path, config, failure_config=failures)
    assert result.return_value == ["VALIDATED"]


# -- failures


@pytest.fixture(scope="module")
def failed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, str]:
    """Result and console output of a run whose validations fail in all possible ways."""
    directory = tmp_path_factory.mktemp("failed")

    def validate(checkpoint: Checkpoint, mode: str) -> Any:
        match mode:
            case "raises":
                raise ValueError("unknown label")
            case "exits":
                sys.exit(3)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies once" if not (directory / "died").exists():
                (directory / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "never ends":
                (directory / "pid").write_text(str(os.getpid()))
                wait_forever()
            case "returns a list":
                return [1]
        return {"right": True}

    modes = ["raises", "exits", "dies", "dies once", "never ends", "returns a list"]
    all_kwargs: list[dict[str, Any]] = [*({"mode": mode} for mode in modes), {"unknown": 1}]

    def function() -> list[str]:
        for number, kwargs in enumerate(all_kwargs):
            timeout = 1 if kwargs == {"mode": "never ends"} else None
            save(number, ValidationTaskConfig(kwargs, timeout))
        return statuses()

    config = ValidationConfig(validate, ray_remote_kwargs={"max_retries": 1}, max_concurrent=2)
    with pytest.MonkeyPatch.context() as patch, open(directory / "console", "w+") as console:
        patch.setattr(sys, "stderr", console)
        result = fit(function, directory, config, 1)
        console.seek(0)
        return result, console.read()


def test_failed_validations_do_not_fail_the_run(failed: tuple[Result, str]) -> None:
    error = "VALIDATION_FAILED"
    assert failed[0].return_value == [
        *(error, error, error, "VALIDATED", "VALIDATION_TIMEOUT", error, error)
    ]


def test_validation_error_is_saved_and_printed(failed: tuple[Result, str]) -> None:
    result, console = failed
    saved = manifests(Path(result.path).parent)
    errors = [manifest.validation.error for manifest in saved if manifest.validation]
    assert errors[0].startswith(f"ValueError: unknown label ({__file__}:")
    assert errors[1].startswith(f"SystemExit: 3 ({__file__}:")
    assert errors[2].startswith("the process of its task died, 2 times: by SIGKILL")
    assert errors[4] == "it took longer than timeout_s=1"
    message = f"TypeError: the validation function must return a dict, found [1] ({__file__}:"
    assert errors[5].startswith(message)
    assert errors[5].endswith(", validate)")
    assert errors[6].startswith("TypeError: ")
    assert "unexpected keyword argument 'unknown'" in errors[6]
    for manifest, error in zip(saved, errors, strict=True):
        line = f"The validation of {manifest.name} failed, training continues: {error}"
        assert (line in console) == bool(error)


def test_validation_timeout_kills_the_process(
    failed: tuple[Result, str], wait_until_gone: Callable[..., None]
) -> None:
    wait_until_gone([int(Path(failed[0].path).with_name("pid").read_text())])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("retries", "status"), [(1, "VALIDATED"), (0, "VALIDATION_FAILED")])
def test_validation_exception_is_retried_with_retry_exceptions(
    tmp_path: Path, retries: int, status: str
) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise OSError("the disk is asleep")
        return {}

    options = {"retry_exceptions": [OSError], "max_retries": retries}
    config = ValidationConfig(validate, ray_remote_kwargs=options)
    assert fit(save_with({}), tmp_path, config, 1).return_value == [status]
    (manifest,) = manifests(tmp_path)
    assert manifest.validation is not None
    assert manifest.validation.error == ("" if retries else "OSError: the disk is asleep")


def test_validation_thread_after_timeout_is_abandoned(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> NoReturn:
        wait_forever()

    config = ValidationConfig(validate, ValidationTaskConfig(timeout_s=0.1))
    assert fit(save_with({}), tmp_path, config).return_value == ["VALIDATION_TIMEOUT"]


def test_validation_result_with_missing_directory_prints_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        # Immediately, while its checksums are being written.
        Path(checkpoint).rename(tmp_path / "moved")
        return {"square": 1}

    assert fit(save_with({}), tmp_path, ValidationConfig(validate)).return_value == ["VALIDATED"]
    assert "The validation result of checkpoint_000000 was not saved: " in capsys.readouterr().err
