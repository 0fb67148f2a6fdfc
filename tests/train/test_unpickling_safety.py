"""Files of a run directory are not unpickled unless requested; messages and commands never are."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import cloudpickle
import pytest

from drawbar import train
from drawbar.train._protocol import commands, messages
from tests.train.runs import fit
from tests.train.text_checkpoints import save

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.fixture
def bomb(tmp_path: Path) -> bytes:
    return pickle.dumps(Bomb(tmp_path / "exploded"))


def test_attach_to_run_that_was_not_detached_unpickles_nothing(tmp_path: Path, bomb: bytes) -> None:
    fit(lambda: save("a"), tmp_path)
    for name in ("outcome.pkl", "trainer.pkl"):
        (tmp_path / "run" / name).write_bytes(bomb)
    assert train.attach(tmp_path / "run").wait().metrics == {"text": "a"}
    assert not (tmp_path / "exploded").exists()


def forbid_pickling(struct: type, patch: Callable[..., object] = setattr) -> None:
    """Let an instance of a struct raise when this process pickles it."""

    def fail(self: object) -> None:
        raise AssertionError(f"{type(self).__name__} is pickled")

    patch(struct, "__reduce__", fail)


@pytest.mark.usefixtures("ray_cluster")
def test_messages_and_commands_of_ray_workers_are_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> list[str]:
        for struct in get_args(messages.Message):
            forbid_pickling(struct)
        with train.checkpoint_dir() as path:
            (path / "model").touch()
            train.report({"loss": 1.0}, checkpoint=path)
        values: list[str] = train.collective.all_gather("value")
        return values

    for struct in get_args(commands.Command):
        forbid_pickling(struct, monkeypatch.setattr)
    result = train.DataParallelTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=tmp_path),
    ).fit()
    assert result.return_values == [["value"] * 2] * 2
    assert result.checkpoint is not None
