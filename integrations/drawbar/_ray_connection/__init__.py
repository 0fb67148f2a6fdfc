"""Find a Ray cluster, and connect this process to it."""
