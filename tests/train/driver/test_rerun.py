"""Reruns of a finished run: the same training function resumes it, another one is an error."""

from __future__ import annotations

import functools
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.launch import ScriptTrainer
from drawbar.train import (
    DataParallelTrainer,
    ResumeError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from tests.train.runs import fit
from tests.train.text_checkpoints import content, save

SCRIPT = """
import sys
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

def train_func():
    {body}

DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="run", storage_path=sys.argv[1]),
).fit()
"""


def train_a() -> None:
    save("a")


def train_b() -> None:
    save("b")


def train_with(text: str) -> None:
    save(text)


def fail() -> None:
    save("failed")
    raise ValueError("boom")


class Model:
    def train(self) -> None:
        save("model")


class OtherModel(Model):
    pass


def test_rerun_of_finished_run_with_another_function_raises_resume_error(tmp_path: Path) -> None:
    fit(train_a, tmp_path)
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    with pytest.raises(ResumeError) as raised:
        fit(train_b, tmp_path)
    module = __name__
    assert f"finished with the training function {module}.train_a" in str(raised.value)
    assert f"this trainer has {module}.train_b" in str(raised.value)
    for remedy in ("another RunConfig.name", 'resume="never"', 'resume="must"'):
        assert remedy in str(raised.value)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before


def test_rerun_of_finished_run_with_must_allows_another_function(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(train_a, tmp_path)
    assert content(fit(train_b, tmp_path, resume="must").checkpoint) == "b"
    changed = f"train_loop_per_worker: '{__name__}.train_a' -> '{__name__}.train_b'"
    assert changed in capfd.readouterr().err
    fit(train_b, tmp_path)  # the last function counts


def test_rerun_of_finished_run_with_same_function_is_first_console_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(train_a, tmp_path)
    capfd.readouterr()
    fit(train_a, tmp_path)
    first = capfd.readouterr().err.splitlines()[0]
    assert f"the run at {tmp_path / 'run'} has already finished" in first
    assert "training continues from checkpoint checkpoint_000000" in first


def train_until(epochs: int) -> None:
    if train.get_checkpoint() is None or epochs > 1:
        save("trained")


def test_rerun_of_finished_run_prints_already_finished_only_without_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for epochs, is_trained in ((1, True), (1, False), (2, True)):
        fit(functools.partial(train_until, epochs), tmp_path)
        output = capfd.readouterr().err
        assert ("already finished: the training function returned" in output) != is_trained
        assert ("choose another name for the run\n" in output) != is_trained


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (functools.partial(train_with, "a"), functools.partial(train_with, "b"), True),
        (functools.partial(train_with, "a"), train_a, False),
        (train_a, functools.wraps(train_a)(lambda: save("wrapped")), True),
        (lambda: save("a"), lambda: save("b"), True),  # both are <lambda> of this module
        (lambda: save("a"), train_a, False),
        (Model().train, Model().train, True),
        (Model().train, OtherModel().train, False),
    ],
)
def test_rerun_of_finished_run_compares_functions_by_name(
    tmp_path: Path, first: Callable[[], None], second: Callable[[], None], is_same: bool
) -> None:
    fit(first, tmp_path)
    if is_same:
        assert fit(second, tmp_path).checkpoint is not None
    else:
        with pytest.raises(ResumeError, match="has finished with the training function"):
            fit(second, tmp_path)


def test_resume_of_failed_run_with_another_function_names_both(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerGroupError):
        fit(fail, tmp_path)
    fit(train_a, tmp_path)
    changed = f"train_loop_per_worker: '{__name__}.fail' -> '{__name__}.train_a'"
    assert changed in capfd.readouterr().err


def test_restore_of_finished_run_keeps_its_function(tmp_path: Path) -> None:
    fit(train_a, tmp_path)
    assert DataParallelTrainer.restore(tmp_path / "run").fit().checkpoint is not None


def test_fit_with_unwritable_journal_releases_run(tmp_path: Path) -> None:
    def start(config: dict[str, str]) -> None:
        DataParallelTrainer(
            lambda config: None,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=tmp_path),
        ).fit()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match=r"writing .*journal\.jsonl") as raised:
            start({"text": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    start({})  # not a RunInProgressError, although the traceback still refers to the journal
    assert raised.tb is not None


def run_script(path: Path, storage: Path, body: str = "pass") -> subprocess.CompletedProcess[str]:
    path.write_text(SCRIPT.format(body=body))
    command = [sys.executable, str(path), str(storage)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rerun_of_finished_run_from_another_script_raises_resume_error(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    assert run_script(first, tmp_path).returncode == 0
    edited = run_script(first, tmp_path, body="print('edited')")
    assert (edited.returncode, edited.stdout) == (0, "edited\n")
    other = run_script(second, tmp_path)
    assert other.returncode == 1
    assert f"train_func in {first}" in other.stderr
    assert f"train_func in {second}" in other.stderr
    restored = DataParallelTrainer.restore(tmp_path / "run").fit()  # in a third script
    assert restored.path == str(tmp_path / "run")


def test_rerun_of_finished_run_in_notebook_compares_names_only(tmp_path: Path) -> None:
    def in_notebook(source: str) -> Any:
        # A cell: code without a file, in a module without a file.
        namespace = {"__name__": "__main__", "save": save}
        exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"), namespace)
        return namespace["train_func"]

    fit(in_notebook("def train_func(): save('a')"), tmp_path)
    result = fit(in_notebook("# another cell\ndef train_func(): save('b')"), tmp_path)
    assert content(result.checkpoint) == "b"
    with pytest.raises(ResumeError, match=r"train_func in an interactive session, but .*\.train_a"):
        fit(train_a, tmp_path)


@pytest.mark.usefixtures("ray_cluster")
def test_rerun_of_finished_script_run_with_another_script_raises(
    tmp_path: Path,
) -> None:
    scripts = [tmp_path / "a.py", tmp_path / "b.py"]
    for script in scripts:
        script.write_text("from drawbar import train; train.report({})")
    trainers = [
        ScriptTrainer(
            script,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="run", storage_path=tmp_path / "runs"),
        )
        for script in scripts
    ]
    trainers[0].fit()
    with pytest.raises(ResumeError, match=f"{scripts[0]}, but this trainer has {scripts[1]}"):
        trainers[1].fit()
