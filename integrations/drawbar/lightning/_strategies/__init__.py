"""Lightning's strategies on the workers of a run, one file each, and what they need."""
