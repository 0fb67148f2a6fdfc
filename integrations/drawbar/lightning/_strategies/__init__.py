"""Lightning strategies for the workers of a run."""
