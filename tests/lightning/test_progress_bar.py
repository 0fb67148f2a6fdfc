"""The progress bar of rank 0 is redrawn in the driver, as it would be on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

from tests.lightning.digits import fit

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch


class OwnBar(RichProgressBar):
    """User-defined progress bar."""


@pytest.mark.parametrize(
    ("bars", "shown"), [([], "TQDMProgressBar"), ([OwnBar], "OwnBar")], ids=["default", "own"]
)
def test_default_progress_bar_is_replaced_by_tqdm(
    tmp_path: Path, bars: list[Any], shown: str
) -> None:
    result = fit(
        tmp_path,
        lambda pl: [bar() for bar in bars],
        num_workers=0,
        max_epochs=1,
        enable_progress_bar=True,
        after=lambda trainer, module: [
            type(each).__name__ for each in trainer.callbacks if isinstance(each, ProgressBar)
        ],
    )
    assert result.return_value == [shown]
    log = Path(result.path, "logs", "rank_0.log").read_bytes()
    assert (b"\rEpoch 0: 100%" in log) == (not bars)
