"""For integrations of libraries that stand on Accelerate."""

from drawbar.accelerate._loop import check_ranks, plugins_kept_on_cpus
from drawbar.train.backend import as_public

__all__ = ["check_ranks", "plugins_kept_on_cpus"]

as_public(globals())
