"""XGBoostCheckpoint: save and load one booster."""

from __future__ import annotations

from xgboost import Booster

from drawbar._boosting import BoosterCheckpoint
from drawbar.xgboost._report_callback import RayTrainReportCallback


class XGBoostCheckpoint(BoosterCheckpoint[Booster]):
    """Checkpoint with one booster, as saved by `RayTrainReportCallback`.

    Args:
        path: Directory or URI of the checkpoint.
        filesystem: Filesystem of `path`. Default: derived from the path.

    Example:
        ```python
        checkpoint = XGBoostCheckpoint.from_model(booster)
        drawbar.train.report({"error": error}, checkpoint=checkpoint)
        booster = XGBoostCheckpoint(result.checkpoint.path).get_model()
        ```
    """

    MODEL_FILENAME = RayTrainReportCallback.CHECKPOINT_NAME

    def get_model(self) -> Booster:
        """Load the booster.

        Raises:
            FileNotFoundError: The checkpoint has no model file.
        """
        return RayTrainReportCallback.get_model(self, self.MODEL_FILENAME)
