"""Experiment trackers: send the reports of a run to TensorBoard, MLflow, and other tools."""

from drawbar.trackers._mlflow import MLflow
from drawbar.trackers._tensorboard import TensorBoard
from drawbar.trackers._tracker import Tracker
from drawbar.trackers._trackio import Trackio
from drawbar.train.backend import set_public_module

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "Trackio"]

TRACKERS: dict[str, type[Tracker]] = {cls.kind: cls for cls in (TensorBoard, MLflow, Trackio)}
"""Trackers by the name that `drawbar track --to` accepts."""

set_public_module(globals())
