"""What a run shows to whoever watches it; never steers, never raises."""
