"""What each rank has seen of its data, in the checkpoints of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from drawbar import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def save(**values: Any) -> None:
    """Report a checkpoint to which every rank gives what it has seen."""
    rank = train.get_context().get_world_rank()
    with train.checkpoint_dir() as path:
        (path / f"{rank}.json").write_text(json.dumps(values))
        train.report({}, checkpoint=path)


def saved() -> list[dict[str, Any]]:
    """What every rank had saved in the checkpoint that this attempt starts from."""
    checkpoint = train.get_checkpoint()
    files = sorted(Path(checkpoint.path).glob("?.json")) if checkpoint else []
    return [json.loads(file.read_text()) for file in files]
