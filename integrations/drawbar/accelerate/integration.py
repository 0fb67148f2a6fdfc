"""For integrations of libraries that stand on Accelerate."""

from drawbar.accelerate._prepare import check_ranks, plugins_kept_on_cpus
from drawbar.train.backend import set_public_module

__all__ = ["check_ranks", "plugins_kept_on_cpus"]

set_public_module(globals())
