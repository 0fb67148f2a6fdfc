"""Experiment trackers: send the reports of a run to TensorBoard, MLflow, and other tools."""

from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._mlflow import MLflow
from drawbar.trackers._points import Point
from drawbar.trackers._tensorboard import TensorBoard
from drawbar.trackers._tracker import Tracker
from drawbar.trackers._trackio import Trackio
from drawbar.trackers._wandb import WandB
from drawbar.train.backend import set_public_module

__all__ = [
    "TRACKERS",
    "Connection",
    "Cursor",
    "MLflow",
    "Point",
    "TensorBoard",
    "TrackedRun",
    "Tracker",
    "Trackio",
    "WandB",
]

TRACKERS: dict[str, type[Tracker]] = {
    cls.kind: cls for cls in (TensorBoard, MLflow, WandB, Trackio)
}
"""Trackers by the name that `drawbar track --to` accepts."""

set_public_module(globals())
