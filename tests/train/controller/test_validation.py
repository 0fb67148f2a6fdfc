"""Validation of checkpoints: metrics, scheduling, failures, and resume."""

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
    DataParallelTrainer,
    FailureConfig,
    InsufficientResourcesError,
    ReportedCheckpointStatus,
    Result,
    RunConfig,
    RunHandle,
    ScalingConfig,
    UserAbort,
    ValidationConfig,
    ValidationTaskConfig,
    WorkerGroupError,
)
from drawbar.train._config.validation_config import resolve_validation
from drawbar.train._history.events import CheckpointValidated
from drawbar.train._history.journal import replay
from drawbar.train._storage.manifest import Validation
from drawbar.train.testing import run_in_threads

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

COMMITTED = CheckpointConsistencyMode.COMMITTED
PENDING = "PENDING_VALIDATION"


def fit(
    function: Callable[[], Any],
    storage_path: Path,
    validation_config: ValidationConfig | None,
    num_workers: int = 0,
    **run_config: Any,
) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", storage_path=storage_path, **run_config),
        validation_config=validation_config,
    ).fit()


def save(number: int, validation: Any = True, **options: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "number").write_text(str(number))
        train.report({"number": number}, checkpoint=path, validation=validation, **options)


def save_with(*fn_kwargs: dict[str, Any]) -> Callable[[], list[str]]:
    """Return a function that saves once with each of these arguments and returns the statuses."""

    def function() -> list[str]:
        for number, kwargs in enumerate(fn_kwargs):
            save(number, ValidationTaskConfig(kwargs))
        return statuses()

    return function


def statuses(*arguments: Any) -> list[str]:
    checkpoints = train.get_all_reported_checkpoints(*arguments)
    return [checkpoint.status.name for checkpoint in checkpoints]


def number_in(checkpoint: Checkpoint) -> int:
    return int((Path(checkpoint) / "number").read_text())


def squared(checkpoint: Checkpoint, plus: float = 0) -> dict[str, Any]:
    return {"square": number_in(checkpoint) ** 2 + plus}


def wait_forever() -> NoReturn:
    while True:
        threading.Event().wait(0.01)


def manifests(storage_path: Path) -> list[train.Manifest]:
    best_checkpoints = Result.from_path(storage_path / "run").best_checkpoints
    optional = [checkpoint.manifest for checkpoint, _ in best_checkpoints]
    return [manifest for manifest in optional if manifest is not None]


class Gate:
    """Block any process that waits for it until another process opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path

    def wait(self) -> None:
        self._path.read_text()

    def open(self) -> None:
        self._path.write_text("")  # blocks until a process waits


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
    events = replay(tmp_path / "run" / "journal.jsonl")
    validated = [event for event in events if isinstance(event, CheckpointValidated)]
    assert sorted(event.index for event in validated) == [1, 2]
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
        gates[number].wait()
        pipe.send("ends", number)
        return {"accuracy": [0.1, 0.9, 0.5, 0.2][number], "pid": os.getpid()}

    def function() -> tuple[list[str], list[str], int]:
        for number in range(4):
            save(number)
        before = statuses(COMMITTED)
        train.collective.barrier()
        if train.get_context().get_world_rank() == 0:
            for number in (1, 0, 2, 3):  # the second one runs before the first one has ended
                gates[number].open()
        return before, statuses(), os.getpid()

    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")
    result = fit(function, tmp_path, ValidationConfig(validate), 2, checkpoint_config=config)
    assert [value[:2] for value in result.return_values] == [
        ([PENDING] * 4, ["VALIDATED"] * 2)  # the best and the latest
    ] * 2
    assert [metrics["number"] for _, metrics in result.best_checkpoints] == [3, 1]
    pids = {metrics["pid"] for _, metrics in result.best_checkpoints}
    assert not pids & {os.getpid(), *(value[2] for value in result.return_values)}
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

    config = ValidationConfig(validate, ray_remote_kwargs={"max_retries": 1}, max_concurrent=7)
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


# -- the end of a run, and the next one


def statuses_and_squares(storage_path: Path) -> list[tuple[str, int | None]]:
    return [
        (manifest.status.name, manifest.metrics.get("square"))
        for manifest in manifests(storage_path)
    ]


def assert_resumes(storage_path: Path) -> None:
    """Check that the validation is pending, and that a run without reports resumes it."""
    assert statuses_and_squares(storage_path) == [(PENDING, None)]
    result = fit(lambda: None, storage_path, ValidationConfig(squared), resume="must")
    assert statuses_and_squares(storage_path) == [("VALIDATED", 9)]
    assert result.metrics == {"number": 3, "square": 9}


@pytest.mark.usefixtures("ray_cluster")
def test_validation_of_failed_run_is_cancelled_and_rerun_on_resume(
    tmp_path: Path,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = Gate(tmp_path / "gate")

    def validate(checkpoint: Checkpoint) -> NoReturn:
        pipe.send(os.getpid())
        gate.open()
        wait_forever()

    def function() -> None:
        save(3)
        gate.wait()
        raise ValueError("boom")

    with pytest.raises(WorkerGroupError, match="boom"):
        fit(function, tmp_path, ValidationConfig(validate), num_workers=1)
    wait_until_gone([int(*pipe.receive())])
    unfinished = "The validation of checkpoint_000000 has not finished. It restarts when the run is"
    assert unfinished in capsys.readouterr().err
    assert_resumes(tmp_path)


def test_validation_continues_during_worker_restart(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        gate.wait()
        return squared(checkpoint)

    def function() -> list[str]:
        if train.get_context().get_attempt() == 0:
            save(3)
            raise ValueError("boom")
        before = statuses(COMMITTED)
        gate.open()
        return [*before, *statuses()]

    failures = FailureConfig(max_failures=1)
    result = fit(function, tmp_path, ValidationConfig(validate), failure_config=failures)
    assert result.return_value == [PENDING, "VALIDATED"]


def make_waiting_program(
    storage_path: Path, pipe: Pipe, num_workers: int = 0
) -> Callable[[], None]:
    """Return a program that waits for a validation after its training function has returned."""

    def validate(checkpoint: Checkpoint) -> NoReturn:
        pipe.send(os.getpid())
        wait_forever()

    def main() -> None:
        try:
            fit(lambda: save(3), storage_path, ValidationConfig(validate), num_workers)
        except UserAbort:
            sys.exit(3)

    return main


def test_run_end_waits_for_validation_and_prints_its_status(
    tmp_path: Path, drivers: Drivers, pipe: Pipe
) -> None:
    with drivers(make_waiting_program(tmp_path, pipe)) as driver:
        assert driver.stderr is not None
        for line in driver.stderr:
            if "waiting for validations: checkpoint_000000 (running)" in line:
                break
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 3, err
    assert "Traceback" not in err
    assert_resumes(tmp_path)


def start(
    function: Callable[[], Any], validate: Any, storage_path: Path, num_workers: int
) -> RunHandle:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", storage_path=storage_path),
        validation_config=ValidationConfig(validate),
    ).start()


@pytest.mark.usefixtures("ray_cluster")
def test_stop_while_waiting_for_validations_ends_the_run(
    tmp_path: Path, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    def function() -> None:
        save(3)
        pipe.send(os.getpid())

    def validate(checkpoint: Checkpoint) -> NoReturn:
        wait_forever()

    run = start(function, validate, tmp_path, num_workers=1)
    wait_until_gone([int(*pipe.receive())], seconds=60)  # the validation gets its resources
    run.stop()
    run.wait(timeout=60)
    assert run.status == "stopped"
    assert_resumes(tmp_path)


def test_stop_with_function_returning_without_checkpoint_ends_the_run(
    tmp_path: Path, pipe: Pipe
) -> None:
    gate = Gate(tmp_path / "gate")

    def function() -> None:
        save(3)
        gate.wait()

    def validate(checkpoint: Checkpoint) -> NoReturn:
        pipe.send("validates")
        wait_forever()

    run = start(function, validate, tmp_path, num_workers=0)
    pipe.receive()
    run.stop()
    gate.open()
    run.wait(timeout=60)
    assert run.status == "stopped"
    assert_resumes(tmp_path)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_validation_of_killed_driver_is_rerun_on_resume(
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    num_workers: int,
) -> None:
    with drivers(make_waiting_program(tmp_path, pipe, num_workers)) as driver:
        pid = int(*pipe.receive())
        driver.kill()
        driver.wait()
        wait_until_gone([pid])
    assert_resumes(tmp_path)


def test_resume_without_validation_config_keeps_validation_pending(
    tmp_path: Path, drivers: Drivers, pipe: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    with drivers(make_waiting_program(tmp_path, pipe)) as driver:
        pipe.receive()
        driver.kill()
        driver.wait()
    assert fit(lambda: statuses(), tmp_path, None).return_value == [PENDING]
    assert "validation of checkpoint_000000 stays pending, because" in capsys.readouterr().err
    assert_resumes(tmp_path)


# -- invalid arguments


def no_argument() -> dict[str, Any]:
    return {}


async def coroutine(checkpoint: Checkpoint) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ValidationConfig(None), "the validation function must be callable, found None"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(coroutine), "coroutine is an async or a generator function"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(no_argument), "takes () -> 'dict[str, Any]' and would be called"),  # type: ignore[arg-type]
        (
            lambda: ValidationConfig(squared, ValidationTaskConfig({"minus": 1})),
            "takes (checkpoint: 'Checkpoint', plus: 'float' = 0) -> 'dict[str, Any]' and would be "
            "called with checkpoint, minus: got an unexpected keyword argument 'minus'",
        ),
        (
            lambda: ValidationConfig(squared, {"plus": 1}),  # type: ignore[arg-type]
            "ValidationConfig.task_config must be a ValidationTaskConfig or None, found {'plus'",
        ),
        (
            lambda: ValidationConfig(squared, ray_remote_kwargs={"num_gpu": 1}),
            "ValidationConfig.ray_remote_kwargs={'num_gpu': 1}: Invalid option keyword num_gpu",
        ),
        (
            lambda: ValidationConfig(squared, ray_remote_kwargs={"num_returns": 2}),
            "ValidationConfig.ray_remote_kwargs must not contain num_returns",
        ),
        (
            lambda: ValidationConfig(squared, max_concurrent=0),
            "ValidationConfig.max_concurrent must be at least 1, found 0",
        ),
        (
            lambda: ValidationTaskConfig({"a": object()}),
            "ValidationTaskConfig.fn_kwargs must be JSON-serializable",
        ),
        (
            lambda: ValidationTaskConfig({"a": float("nan")}),
            "ValidationTaskConfig.fn_kwargs must be JSON-serializable",
        ),
        (
            lambda: ValidationTaskConfig([1]),  # type: ignore[arg-type]
            "ValidationTaskConfig.fn_kwargs must be a Mapping or None, found [1]",
        ),
        (
            lambda: ValidationTaskConfig({1: 1}),  # type: ignore[dict-item]
            "ValidationTaskConfig.fn_kwargs: a key must be a str, found 1",
        ),
        (lambda: ValidationTaskConfig(timeout_s=0), "timeout_s must be positive and finite"),
        (lambda: ValidationTaskConfig(timeout_s=math.inf), "timeout_s must be positive and finite"),
        (
            lambda: ValidationTaskConfig(timeout_s="1"),  # type: ignore[arg-type]
            "ValidationTaskConfig.timeout_s must be seconds, a timedelta or None, found '1' (str)",
        ),
        (
            lambda: DataParallelTrainer(save_with(), validation_config=squared),  # type: ignore[arg-type]
            "validation_config must be a ValidationConfig, found <function squared",
        ),
    ],
)
def test_validation_config_with_invalid_setting_raises(make: Callable[[], Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert error in str(raised.value)


def test_validation_fn_kwargs_are_converted_to_json_types() -> None:
    assert ValidationTaskConfig({"size": (2, 3)}).fn_kwargs == {"size": [2, 3]}
    assert ValidationTaskConfig().fn_kwargs == {}


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        (False, None),
        (True, ({"a": 1, "b": 2}, 60)),
        (ValidationTaskConfig(), ({"a": 1, "b": 2}, 60)),
        (ValidationTaskConfig({"b": 3}), ({"a": 1, "b": 3}, 60)),
        (ValidationTaskConfig({"c": 4}, timeout_s=5), ({"a": 1, "b": 2, "c": 4}, 5)),
    ],
)
def test_resolve_validation_merges_arguments_with_defaults(validation: Any, expected: Any) -> None:
    defaults = Validation(fn_kwargs={"a": 1, "b": 2}, timeout_s=60)
    resolved = resolve_validation(validation, defaults, has_checkpoint=True)
    assert (resolved and (resolved.fn_kwargs, resolved.timeout_s)) == expected


@pytest.mark.parametrize(
    ("arguments", "config", "error"),
    [
        (
            {"validation": True},
            ValidationConfig(squared),
            "ValueError: report(validation=...) needs a",
        ),
        (
            {"validation": True, "checkpoint": "."},
            None,
            "ValueError: report(validation=...) needs a validation function",
        ),
        (
            {"validation": "yes", "checkpoint": "."},
            ValidationConfig(squared),
            "TypeError: report(validation=...) takes True, False or a Validation",
        ),
    ],
)
def test_report_with_invalid_validation_names_the_user_line(
    tmp_path: Path, arguments: dict[str, Any], config: ValidationConfig | None, error: str
) -> None:
    def function() -> None:
        train.report({}, **arguments)

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path, config)
    assert str(raised.value).startswith(f"rank 0: {error}")
    assert f"{__file__}:" in raised.value.failures[0].location


def test_checkpoint_list_with_invalid_consistency_mode_raises(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="consistency_mode must be a CheckpointConsistency"):
        fit(lambda: statuses("VALIDATED"), tmp_path, None)


def test_validation_function_that_cannot_be_serialized_raises(tmp_path: Path) -> None:
    lock = threading.Lock()

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"lock": lock}

    with pytest.raises(TypeError, match=r"validation_config.fn cannot be sent(.|\n)*\.lock"):
        fit(save_with({}), tmp_path, ValidationConfig(validate))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("ray_cluster")
def test_validation_with_unavailable_resources_raises(tmp_path: Path) -> None:
    config = ValidationConfig(squared, ray_remote_kwargs={"num_gpus": 99, "resources": {"X": 1}})
    with pytest.raises(
        InsufficientResourcesError, match="one validation needs GPU=99, X=1, which no"
    ):
        fit(save_with({}), tmp_path, config, num_workers=1)
    assert not (tmp_path / "run").exists()


def test_restored_trainer_runs_validations(tmp_path: Path) -> None:
    fit(lambda: save(3), tmp_path, ValidationConfig(squared))
    trainer = DataParallelTrainer.restore(
        tmp_path / "run",
        train_loop_per_worker=save_with({}),
        run_config=RunConfig(name="run", storage_path=tmp_path, resume="must"),
    )
    assert trainer.fit().return_value == ["VALIDATED", "VALIDATED"]
