"""Find the cause of a failure, and decide whether a restart can help."""
