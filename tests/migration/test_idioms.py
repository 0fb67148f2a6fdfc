"""Examples of Ray Train's documentation work after a change of their imports.

Each script in `idioms/` follows one documented pattern and checks its result.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

IDIOMS = sorted(Path(__file__).parent.joinpath("idioms").glob("*.py"))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the frameworks
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("script", IDIOMS, ids=lambda script: script.stem)
@pytest.mark.nightly
def test_ray_train_idiom_works_after_import_change(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
