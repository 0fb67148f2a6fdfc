"""Trainer arguments, errors before a process starts, resume settings, and restore."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from drawbar import train
from drawbar.torch import TorchTrainer
from drawbar.train import (
    BackendConfig,
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    ResumeError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from tests.train.runs import fit

LOCAL = ScalingConfig(num_workers=0)


def no_argument() -> None: ...


def one_argument(config: dict[str, Any]) -> None: ...


def two_arguments(config: dict[str, Any], extra: int) -> None: ...


def save(text: str) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(text)
        train.report({"text": text}, checkpoint=path)


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    return (Path(checkpoint) / "model").read_text()


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scaling_config": {"num_workers": 2}},
            "scaling_config must be a ScalingConfig, found {'",
        ),
        ({"scaling_config": 2}, "scaling_config must be a ScalingConfig, found 2"),
        ({"run_config": "run"}, "run_config must be a RunConfig, found 'run'"),
        ({"backend_config": "torch"}, "backend_config must be a BackendConfig, found 'torch'"),
        ({"backend_config": BackendConfig}, "backend_config must be a BackendConfig, found <class"),
        ({"dataset_config": {}}, "dataset_config must be a DataConfig, found {}"),
        ({"datasets": [1]}, r"datasets must be a dict of name to ray.data.Dataset, .* found \[1\]"),
        ({"datasets": {"train": [1]}}, r"datasets\['train'\] must be a ray.data.Dataset, a table"),
        ({"metadata": [1]}, r"metadata must be a dict, found \[1\]"),
        (
            {"metadata": {"a": object()}},
            "metadata must be JSON-serializable: Object of type object is not",
        ),
        (
            {"metadata": {"a": {1, 2}}},
            "metadata must be JSON-serializable: Object of type set is not JSON",
        ),
        ({"metadata": {(1, 2): 3}}, "metadata must be JSON-serializable: keys must be str"),
        (
            {"resume_from_checkpoint": "/c"},
            "resume_from_checkpoint must be a Checkpoint, found '/c",
        ),
    ],
)
def test_trainer_argument_of_wrong_type_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DataParallelTrainer(one_argument, **arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (None, "the training function must be callable, found None"),
        (5, r"must be callable, found 5 \(int\)"),
        (no_argument(), "pass the function itself, not its return value"),  # type: ignore[func-returns-value]
        (two_arguments, "requires config, extra, but a training function takes no argument or"),
    ],
)
def test_trainer_with_invalid_function_raises(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DataParallelTrainer(function)


def test_trainer_with_unused_config_warns_at_user_line() -> None:
    message = "train_loop_config has 'lr', 'epochs', but the training f"
    for trainer in (DataParallelTrainer, TorchTrainer):
        with pytest.warns(UserWarning, match=message) as warned:
            trainer(no_argument, train_loop_config={"lr": 1, "epochs": 2})
        assert warned[0].filename == __file__


def test_trainer_config_may_be_any_object(run_config: RunConfig) -> None:
    config: Any = SimpleNamespace(lr=0.1, hf_token="abc")
    result = DataParallelTrainer(
        lambda config: config.lr,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    assert result.return_value == 0.1
    journal = (Path(result.path) / "journal.jsonl").read_text()
    assert "lr=0.1" in journal
    assert "abc" not in journal


def test_trainer_with_missing_split_dataset_warns() -> None:
    config = DataConfig(datasets_to_split=["valid"])
    with pytest.warns(UserWarning, match=r"names \['valid'\], but datasets has \[\]"):
        DataParallelTrainer(no_argument, dataset_config=config)


def test_trainer_with_table_as_datasets_shows_only_its_type() -> None:
    table: Any = pd.DataFrame({"x": range(100)})
    with pytest.raises(TypeError, match=r"found a pandas.*DataFrame$"):
        DataParallelTrainer(no_argument, datasets=table)


def test_trainer_arguments_are_keyword_only() -> None:
    anything: Any = DataParallelTrainer
    with pytest.raises(TypeError, match="positional argument"):
        anything(one_argument, {"lr": 1})


def test_trainer_metadata_is_copied() -> None:
    metadata = {"by": "ann"}
    trainer = DataParallelTrainer(no_argument, metadata=metadata)
    metadata["by"] = "bob"
    assert trainer.metadata == {"by": "ann"}


def test_trainer_repr_has_function_and_changed_settings() -> None:
    trainer = DataParallelTrainer(
        no_argument, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(name="a")
    )
    shown = "DataParallelTrainer(no_argument, ScalingConfig(num_workers=2), RunConfig(name='a'))"
    assert repr(trainer) == shown


# -- checks of fit() before a process starts


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fit_with_unpicklable_function_names_variable(num_workers: int) -> None:
    resources = {"lock": threading.Lock()}

    def function() -> None:
        resources.clear()

    trainer = DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=num_workers))
    with pytest.raises(
        TypeError, match=r"function.resources\['lock'\] \(_thread.lock\): cannot pi"
    ):
        trainer.fit()


def test_fit_with_unpicklable_config_names_key(tmp_path: Path) -> None:
    config = {"lr": 1, "lock": threading.Lock()}
    with pytest.raises(
        TypeError, match=r"train_loop_config\['lock'\] \(_thread.lock\): cannot pic"
    ):
        fit(one_argument, tmp_path, config)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Missing(BackendConfig):
    """Config of a backend whose framework is not installed."""

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        raise ImportError(f"no framework for {scaling_config.num_workers} workers")


def test_fit_checks_backend_requirements_first(tmp_path: Path) -> None:
    run_config = RunConfig(name="run", storage_path=tmp_path)
    trainer = DataParallelTrainer(
        no_argument, backend_config=Missing(), scaling_config=LOCAL, run_config=run_config
    )
    with pytest.raises(ImportError, match="no framework for 0 workers"):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["storage", "storage/below"])
def test_fit_with_file_as_storage_path_raises(tmp_path: Path, part: str) -> None:
    (tmp_path / "storage").write_text("")
    with pytest.raises(OSError, match="or a part of it is a file, so choose a directory"):
        fit(no_argument, tmp_path / part)


def test_fit_with_unwritable_storage_path_raises() -> None:
    with pytest.raises(OSError, match=r"'/proc/runs/run' cannot be written by user \w+: No such"):
        fit(no_argument, Path("/proc/runs"))


def test_fit_with_missing_initial_checkpoint_raises(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        no_argument,
        scaling_config=LOCAL,
        run_config=RunConfig(name="run", storage_path=tmp_path),
        resume_from_checkpoint=Checkpoint(tmp_path / "none"),
    )
    with pytest.raises((ValueError, OSError, RuntimeError), match=f"{tmp_path}/none"):
        trainer.fit()


def test_fit_starts_from_checkpoint_of_another_run(tmp_path: Path) -> None:
    first = fit(lambda: save("first"), tmp_path / "a")
    second = DataParallelTrainer(
        lambda: save(content(train.get_checkpoint()) + ", second"),
        scaling_config=LOCAL,
        run_config=RunConfig(name="run", storage_path=tmp_path / "b"),
        resume_from_checkpoint=first.checkpoint,
    )
    assert content(second.fit().checkpoint) == "first, second"
    assert content(second.fit().checkpoint) == "first, second, second"  # now from its own one


def test_fit_with_unpicklable_return_value_warns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(lambda: threading.Lock(), tmp_path).return_value is None
    assert "rank 0: Cannot pickle the return value (lock)" in capfd.readouterr().err


# -- resume


@pytest.mark.parametrize(
    ("state", "resume", "outcome"),
    [
        ("none", "auto", ""),
        ("none", "never", ""),
        ("none", "must", "there is no run in"),
        ("unfinished", "auto", "a, b"),
        ("unfinished", "never", "contains an unfinished run"),
        ("unfinished", "must", "a, b"),
        ("finished", "auto", "has finished with the training function"),
        ("finished", "never", "contains a finished run"),
        ("finished", "must", "a, b"),
        ("damaged", "auto", "has finished with the training function"),
        ("damaged", "never", "contains a run with damaged parts"),
        ("damaged", "must", "a"),
    ],
)
def test_fit_with_another_function_follows_resume_setting(
    tmp_path: Path, state: str, resume: str, outcome: str
) -> None:
    make_run(tmp_path, state)
    resumed_from = "none"

    def function() -> None:
        nonlocal resumed_from
        start = train.get_checkpoint()
        resumed_from = content(start) if start else ""

    if " " in outcome and "," not in outcome:
        with pytest.raises(ResumeError, match=outcome):
            fit(function, tmp_path, resume=resume)
        assert resumed_from == "none"
    else:
        fit(function, tmp_path, resume=resume)
        assert resumed_from == outcome


def make_run(folder: Path, state: str) -> None:
    def function() -> None:
        save("a")
        save("a, b")
        if state == "unfinished":
            raise ValueError

    if state == "unfinished":
        with pytest.raises(WorkerGroupError):
            fit(function, folder)
    elif state != "none":
        fit(function, folder)
    if state == "damaged":
        os.truncate(folder / "run" / "checkpoint_000001" / "model", 1)


def test_resume_shows_changed_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(one_argument, tmp_path, {"lr": 1, 5: "a"})
    fit(one_argument, tmp_path, {"lr": 2, 5: "a"})
    err = capfd.readouterr().err
    assert "train_loop_config.lr: '1' -> '2'" in err
    assert "train_loop_config.5" not in err


def test_run_without_name_gets_unique_name(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        no_argument, scaling_config=LOCAL, run_config=RunConfig(storage_path=tmp_path)
    )
    paths = {trainer.fit().path for _ in range(3)}
    assert len(paths) == 3
    assert {Path(path).parent for path in paths} == {tmp_path}


# -- restore


def count_up(config: dict[str, Any]) -> int:
    start = train.get_checkpoint()
    number = int(content(start)) if start else 0
    save(str(number + config["step"]))
    return number + int(config["step"])


def test_restore_keeps_arguments_and_resumes(tmp_path: Path) -> None:
    fit(count_up, tmp_path, {"step": 2})
    trainer = DataParallelTrainer.restore(tmp_path / "run")
    assert trainer.train_loop_config == {"step": 2}
    assert trainer.scaling_config == LOCAL
    assert (trainer.run_config.name, trainer.run_config.storage_path) == ("run", str(tmp_path))
    assert trainer.fit().return_value == 4


def test_restore_with_overrides_replaces_arguments(tmp_path: Path) -> None:
    fit(count_up, tmp_path, {"step": 2})
    trainer = DataParallelTrainer.restore(
        str(tmp_path / "run"),
        run_config=RunConfig(name="ignored", failure_config=FailureConfig(max_failures=3)),
        train_loop_config={"step": 5},
        metadata={"by": "bob"},
    )
    assert trainer.run_config.failure_config.max_failures == 3
    result = trainer.fit()
    assert (result.path, result.return_value) == (str(tmp_path / "run"), 7)
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"by": "bob"}


def test_restore_with_unknown_argument_raises(tmp_path: Path) -> None:
    fit(no_argument, tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        DataParallelTrainer.restore(tmp_path / "run", epochs=3)


def test_can_restore_is_true_only_for_run_directory(tmp_path: Path) -> None:
    fit(no_argument, tmp_path)
    (tmp_path / "file").write_text("")
    assert DataParallelTrainer.can_restore(tmp_path / "run")
    for other in (tmp_path, tmp_path / "none", tmp_path / "file"):
        assert not DataParallelTrainer.can_restore(other)
        with pytest.raises(
            FileNotFoundError, match=f"{other} contains no run that can be restored"
        ):
            DataParallelTrainer.restore(other)


# -- subclasses


class Counter(DataParallelTrainer):
    """A trainer with a fixed training function and its own `__init__`."""

    def __init__(self, step: int, run_config: RunConfig) -> None:
        super().__init__(
            count_up, train_loop_config={"step": step}, scaling_config=LOCAL, run_config=run_config
        )


def test_trainer_subclass_with_own_init_is_restorable(tmp_path: Path) -> None:
    trainer = Counter(3, RunConfig(name="run", storage_path=tmp_path))
    assert repr(trainer).startswith("Counter(count_up, ScalingConfig(num_workers=0), RunConfig(")
    assert trainer.fit().return_value == 3
    restored = Counter.restore(tmp_path / "run")
    assert isinstance(restored, Counter)
    assert restored.fit().return_value == 6
