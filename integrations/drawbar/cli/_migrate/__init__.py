"""drawbar migrate: rewrite Ray Train imports and names."""
