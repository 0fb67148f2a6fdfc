"""A run as others have it: wait, stop, look, follow from another process, find again."""
