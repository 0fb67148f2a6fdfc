"""Where a run and its checkpoints lie, on any filesystem, and what makes a checkpoint whole."""
