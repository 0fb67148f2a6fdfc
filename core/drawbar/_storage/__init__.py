"""Storage of runs and checkpoints on local and remote filesystems."""
