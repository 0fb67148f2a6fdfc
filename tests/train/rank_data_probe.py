"""Save the rows that each rank has read in checkpoints, for tests of data positions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from drawbar import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def save(**values: Any) -> None:
    """Report a checkpoint to which each rank contributes its values."""
    rank = train.get_context().get_world_rank()
    with train.checkpoint_dir() as path:
        (path / f"{rank}.json").write_text(json.dumps(values))
        train.report({}, checkpoint=path)


def saved() -> list[dict[str, Any]]:
    """Return the values of all ranks in the checkpoint from which this attempt resumes."""
    checkpoint = train.get_checkpoint()
    files = sorted(Path(checkpoint.path).glob("?.json")) if checkpoint else []
    return [json.loads(file.read_text()) for file in files]
