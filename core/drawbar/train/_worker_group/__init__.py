"""Worker groups as the controller sees them: on Ray, in threads, or under torchrun."""
