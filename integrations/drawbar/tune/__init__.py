"""Ray Tune: tune trainers, with one run per trial."""

from drawbar.train.backend import set_public_module
from drawbar.tune._report_callback import TuneReportCallback
from drawbar.tune._resources import as_placement_group_factory
from drawbar.tune._trainable import as_trainable

__all__ = ["TuneReportCallback", "as_placement_group_factory", "as_trainable"]

set_public_module(globals())
