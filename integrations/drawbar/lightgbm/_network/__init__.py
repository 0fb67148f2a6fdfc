"""LightGBM's network between the workers."""
