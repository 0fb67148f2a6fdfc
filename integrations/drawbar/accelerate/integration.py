"""For integrations of libraries that stand on Accelerate."""

from drawbar.accelerate._loop import check_ranks, plugins_kept_on_cpus

__all__ = ["check_ranks", "plugins_kept_on_cpus"]
