"""drawbar doctor: check machines before a run."""
