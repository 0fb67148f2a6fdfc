"""Validations at the end of a run, and in the run that resumes it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    RunHandle,
    ScalingConfig,
    UserAbort,
    ValidationConfig,
    WorkerGroupError,
)
from drawbar.train.backend import register_data_position
from tests.train.controller.validated_runs import (
    COMMITTED,
    PENDING,
    Gate,
    fit,
    manifests,
    number_in,
    save,
    squared,
    statuses,
    wait_forever,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


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


@pytest.mark.usefixtures("ray_cluster")
def test_rollback_cancels_validation_of_discarded_checkpoint(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        if number_in(checkpoint) == 2:
            gate.open()
            wait_forever()
        return squared(checkpoint)

    def function() -> list[str]:
        register_data_position("batches", lambda: 0, skip_batches=lambda num_batches: num_batches)
        if train.get_context().get_attempt() == 0:
            save(1)
            save(2)
            gate.wait()
            train.rollback("nan", to=2)
        save(3)  # with the report number of the discarded checkpoint
        return statuses()

    validation = ValidationConfig(validate, max_concurrent=2)
    result = fit(function, tmp_path, validation, num_workers=1)
    assert result.return_value == ["VALIDATED"] * 2
    assert statuses_and_squares(tmp_path) == [("VALIDATED", 1), ("VALIDATED", 9)]


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
        _, err = driver.communicate(timeout=300)
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
    run.wait(timeout=300)
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
    run.wait(timeout=300)
    assert run.status == "stopped"
    assert_resumes(tmp_path)


@pytest.mark.usefixtures("ray_cluster")
def test_validation_of_killed_driver_is_rerun_on_resume(
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    with drivers(make_waiting_program(tmp_path, pipe, num_workers=1)) as driver:
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
