"""Private APIs of Keras 2: the test fails when `tf_keras` changes what `_compat` uses."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drawbar.tensorflow._compat import enable_keras_v3_saving


def test_thread_saves_in_the_format_of_the_suffix_twice(tmp_path: Path) -> None:
    tf_keras: Any = importlib.import_module("tf_keras")
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])
    enabled = importlib.import_module("tf_keras.src.saving.saving_lib")._SAVING_V3_ENABLED

    def save() -> tuple[list[bytes], object]:
        with enable_keras_v3_saving():
            for name in ("one.keras", "two.keras"):
                model.save(tmp_path / name)
        starts = [(tmp_path / name).read_bytes()[:2] for name in ("one.keras", "two.keras")]
        return starts, enabled.value

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(save).result() == ([b"PK", b"PK"], False)  # ZIP, not HDF5
