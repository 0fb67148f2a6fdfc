"""Private APIs of Keras 2, read in tf_keras 2.16 to 2.21. No other file uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def enable_keras_v3_saving() -> Iterator[None]:
    """Make Keras 2 save `.keras` files in their format in this thread.

    In all threads except the one that imported Keras 2, it writes HDF5 under that name from the
    second file on. Its public setting is for all formats. Without the private one, Keras 2 saves as
    usual.
    """
    saving = sys.modules.get("tf_keras.src.saving.saving_lib")
    enabled = getattr(saving, "_SAVING_V3_ENABLED", None)
    if enabled is None:
        yield
        return
    before = getattr(enabled, "value", False)
    enabled.value = True
    try:
        yield
    finally:
        enabled.value = before
