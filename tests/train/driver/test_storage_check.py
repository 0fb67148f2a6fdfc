"""Tests that unwritable storage is found before any process starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


def test_fit_with_unwritable_storage_raises_before_ray_starts(
    tmp_path: Path, drivers: Drivers
) -> None:
    (tmp_path / "file").touch()

    def main() -> None:
        import ray
        from fsspec.implementations.local import LocalFileSystem

        from drawbar import train

        for path, filesystem in (
            ("/proc/runs", None),
            (tmp_path / "file" / "below", None),
            (tmp_path / "file" / "below", LocalFileSystem(auto_mkdir=True)),
        ):
            trainer = train.DataParallelTrainer(
                lambda: None,
                scaling_config=train.ScalingConfig(num_workers=1),
                run_config=train.RunConfig(
                    name="run", storage_path=path, storage_filesystem=filesystem
                ),
            )
            with pytest.raises(OSError, match=re.escape(str(path))):
                trainer.fit()
            assert not ray.is_initialized()

    drivers.run(main, RAY_ADDRESS=None, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]
