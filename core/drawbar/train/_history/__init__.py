"""What happened in a run, in order, and all that is told from that alone."""
