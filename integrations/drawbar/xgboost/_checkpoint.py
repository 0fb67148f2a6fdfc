"""XGBoostCheckpoint: a checkpoint made of a booster, and a booster out of a checkpoint."""

from __future__ import annotations

from xgboost import Booster

from drawbar._boosting import BoosterCheckpoint
from drawbar.xgboost._report_callback import RayTrainReportCallback


class XGBoostCheckpoint(BoosterCheckpoint[Booster]):
    """A checkpoint that holds one booster, as `RayTrainReportCallback` saves it."""

    MODEL_FILENAME = RayTrainReportCallback.CHECKPOINT_NAME

    def get_model(self) -> Booster:
        """Load the booster.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        return RayTrainReportCallback.get_model(self, self.MODEL_FILENAME)
