"""Files of a run directory are not unpickled unless requested."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
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
