"""What Keras's own callbacks write: rank 0 writes it, as one process would.

The others have the same callbacks and save when rank 0 does, since that is a meeting of JAX's
processes; what they write goes into a folder of their own, which is thrown away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from drawbar.train import get_context

PathAttributes = dict[type, tuple[str, ...]]

_OUTPUT_PATHS: PathAttributes = {
    keras.callbacks.ModelCheckpoint: ("filepath",),
    keras.callbacks.CSVLogger: ("filename",),
    keras.callbacks.TensorBoard: ("log_dir",),
}
_RESTORED_PATHS: PathAttributes = {
    keras.callbacks.BackupAndRestore: (
        "backup_dir",
        "_weights_path",
        "_training_metadata_path",
        "_prev_weights_path",
        "_prev_training_metadata_path",
    ),
}
"""The attributes of callbacks that say where they write; of these, after all ranks have read."""


@contextmanager
def write_on_rank_zero(callbacks: list[Any]) -> Iterator[list[Any]]:
    """Give the callbacks for a `fit` of this rank, which are themselves again afterwards."""
    if get_context().get_world_rank() == 0:
        yield callbacks
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        redirected: list[tuple[Any, str, str]] = []

        def redirect(kinds: PathAttributes) -> None:
            for each in callbacks:
                own = Path(folder, str(id(each)))
                named = (names for kind, names in kinds.items() if isinstance(each, kind))
                for name in next(named, ()):
                    redirected.append((each, name, getattr(each, name)))
                    own.mkdir(exist_ok=True)
                    setattr(each, name, str(own / Path(getattr(each, name)).name))

        redirect(_OUTPUT_PATHS)
        last = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: redirect(_RESTORED_PATHS))
        try:
            yield [*callbacks, last]
        finally:
            for each, name, path in redirected:
                setattr(each, name, path)
