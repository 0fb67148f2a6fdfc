"""Read the history of a stored run, and find stored runs."""
