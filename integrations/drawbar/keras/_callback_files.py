"""Let only rank 0 write the files of Keras callbacks.

Other ranks have the same callbacks and save together with rank 0, because saving is a collective
with JAX. Their files are written to a temporary directory, which is deleted.
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
"""Path attributes of callbacks. `_RESTORED_PATHS` are redirected after all ranks have read them."""


@contextmanager
def write_on_rank_zero(callbacks: list[Any]) -> Iterator[list[Any]]:
    """Yield the callbacks for a `fit` of this rank, and restore their attributes afterwards."""
    if get_context().get_world_rank() == 0:
        yield callbacks
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        redirected: list[tuple[Any, str, str]] = []

        def redirect(kinds: PathAttributes) -> None:
            for callback in callbacks:
                target = Path(directory, str(id(callback)))
                matches = (names for kind, names in kinds.items() if isinstance(callback, kind))
                for name in next(matches, ()):
                    redirected.append((callback, name, getattr(callback, name)))
                    target.mkdir(exist_ok=True)
                    setattr(callback, name, str(target / Path(getattr(callback, name)).name))

        redirect(_OUTPUT_PATHS)
        last = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: redirect(_RESTORED_PATHS))
        try:
            yield [*callbacks, last]
        finally:
            for callback, name, path in redirected:
                setattr(callback, name, path)
